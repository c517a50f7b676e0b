"""SmolVLM and videos of Qwen2.5-VL through their processors.

The video processors of transformers need torchvision: where it is installed they are run, else patches are cut here.
"""

from __future__ import annotations

import importlib.util
import types

import pytest
import torch
import transformers as hf
from test_compressors import by_scipy
from vision_cases import TEXT, QwenProcessor, pair, perturbed, picture, tokenizer

from fathom.vision import compress_vision, from_dict

TORCHVISION = importlib.util.find_spec("torchvision") is not None


class SmolProcessor(hf.SmolVLMProcessor):
    """Without the video processor and num2words, which speaks of videos alone."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.fake_image_token, self.global_image_token = "<fake_token_around_image>", "<global-img>"
        self.image_token, self.video_token = "<image>", "<video>"
        self.image_token_id, self.image_seq_len = 2, 36
        hf.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    @classmethod
    def get_attributes(cls):
        return ["image_processor", "tokenizer"]


@pytest.fixture(scope="module")
def smol():
    torch.manual_seed(0)
    vision = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.SmolVLMConfig(
        vision_config={**vision, "image_size": 48, "patch_size": 4}, text_config=hf.LlamaConfig(**TEXT),
        scale_factor=2, image_token_id=2, pad_token_id=0,
    )  # fmt: skip
    try:
        image_processor = hf.SmolVLMImageProcessorPil(
            size={"longest_edge": 96}, max_image_size={"longest_edge": 48}, do_image_splitting=True
        )
    except ImportError as error:  # before transformers 5.24
        pytest.skip(f"this version's SmolVLM processor needs torchvision ({error})")
    return perturbed(hf.SmolVLMForConditionalGeneration(config)), SmolProcessor(image_processor, tokenizer())


def asked(processor, *rows):
    """Rows of pictures and a text each."""
    texts = [f"what {'<image> ' * len(pictures)} red cat" for pictures in rows]
    images = [list(pictures) for pictures in rows]
    return processor(images=images, text=texts, return_tensors="pt", padding=True)


@torch.no_grad()
def test_every_tile_of_smolvlm_is_compressed_after_the_connector(smol):
    model, processor = smol
    stock = asked(processor, [picture(60, 90)])
    tiles = stock.pixel_values.shape[1]
    assert tiles > 2 and (stock.input_ids == 2).sum() == tiles * 36
    expected = model(**stock).logits
    method = from_dict({"name": "fourier_vlm", "tokens": 9})
    with compress_vision(model, processor, from_dict({"name": "fourier_vlm", "ratio": 1.0})):
        assert (
            model(**asked(processor, [picture(60, 90)])).logits - expected
        ).abs().max() < 1e-5 * expected.abs().max()
    with compress_vision(model, processor, method):
        inputs = asked(processor, [picture(60, 90)])
        assert (inputs.input_ids == 2).sum() == tiles * 9
        found = model(**inputs).logits
    raw = model.model.get_image_features(stock.pixel_values, stock.pixel_attention_mask).pooler_output
    raw = raw if isinstance(raw, torch.Tensor) else torch.stack(list(raw))
    kept = by_scipy(raw.view(-1, 36, raw.shape[-1]), (6, 6), (3, 3)).float().flatten(0, 1)
    embeddings = model.get_input_embeddings()(inputs.input_ids).clone()
    embeddings[inputs.input_ids == 2] = kept
    right = model.lm_head(model.model.text_model(inputs_embeds=embeddings).last_hidden_state)
    assert (found - right).abs().max() < 1e-5 * right.abs().max()
    assert model(**asked(processor, [picture(60, 90)])).logits.equal(expected)


@pytest.mark.parametrize("name", ["fourier_vlm", "divprune", "tome"])
@torch.no_grad()
def test_smolvlms_rows_and_steps_equal_those_alone(smol, name):
    model, processor = smol
    rows = ([picture(60, 90)], [picture(48, 48, 1), picture(90, 50, 2)])
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "suppress_tokens": [2, 31]}
    with compress_vision(model, processor, from_dict({"name": name, "tokens": 9})):
        together = model.generate(**asked(processor, *rows), **settings)
        for row, pictures in enumerate(rows):
            assert together[row, -4:].equal(model.generate(**asked(processor, pictures), **settings)[0, -4:])
    refused = pytest.raises(ValueError, match="built for LLaVA alone, not SmolVLM")
    with refused, compress_vision(model, processor, from_dict({"name": "fastv", "tokens": 9})):
        pass


class Frames:
    """A video processor: two frames are a slice, whose patches the image processor cuts of the first."""

    merge_size, temporal_patch_size, model_input_names = 2, 2, []

    def __init__(self, image_processor):
        self.image_processor = image_processor

    def __call__(self, videos, **kwargs):
        cut = [self.image_processor(video[::2], return_tensors="pt") for video in videos]
        grids = [[len(one.image_grid_thw), *one.image_grid_thw[0, 1:].tolist()] for one in cut]
        metadata = [types.SimpleNamespace(sampled_fps=2.0) for _ in videos]
        pixels = torch.cat([one.pixel_values for one in cut])
        return {
            "pixel_values_videos": pixels,
            "video_grid_thw": torch.tensor(grids),
            "video_metadata": metadata,
        }


class ClipProcessor(QwenProcessor):
    """Qwen's with a video processor."""

    @classmethod
    def get_attributes(cls):
        return ["image_processor", "tokenizer"]

    def prepare_inputs_layout(self, images=None, text=None, videos=None, **kwargs):
        return images, [text] if isinstance(text, str) else list(text), videos, None

    def validate_inputs(self, **kwargs):
        pass


@torch.no_grad()
def test_a_video_beside_a_picture_keeps_a_grid_of_every_slice():
    model, stock = pair("qwen2_5_vl")
    processor = ClipProcessor(stock.image_processor, tokenizer())
    if TORCHVISION:
        processor.video_processor = hf.Qwen2VLVideoProcessor(
            patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 8 * 8, "longest_edge": 48 * 48},
            do_sample_frames=False,
        )  # fmt: skip
    else:
        processor.video_processor = Frames(stock.image_processor)
    frames = [picture(32, 48, seed) for seed in range(6)]
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "suppress_tokens": [2, 3, 4, 31]}

    def rows(*which):
        texts = ["a red <|video_pad|> cat what", "red <|image_pad|> cat", "what is this"]
        given = {}
        if 1 in which:
            given["images"] = [picture(60, 90)]
        if 0 in which:
            given["videos"] = [frames]
        return processor(text=[texts[row] for row in which], return_tensors="pt", padding=True, **given)

    with compress_vision(model, processor, from_dict({"name": "fourier_vlm", "ratio": "2/3"})):
        clip = rows(0)
        (t, height, width) = clip.video_grid_thw[0].tolist()
        kept = (height // 2 * 2 // 3) * (width // 2 * 2 // 3)
        assert t == 3 and (clip.input_ids == 4).sum() == t * kept < t * height * width // 4
        together = rows(0, 1, 2)
        logits = model(**together).logits
        made = model.generate(**together, **settings)
        for row in range(3):
            alone = rows(row)
            expected = model(**alone).logits[0]
            assert (logits[row, -len(expected) :] - expected).abs().max() < 2e-5 * expected.abs().max()
            assert made[row, -4:].equal(model.generate(**alone, **settings)[0, -4:])
    with compress_vision(model, processor, from_dict({"name": "fourier_vlm", "ratio": 1.0})):
        whole = model(**rows(0)).logits
    stock_clip = rows(0)
    assert (stock_clip.input_ids == 4).sum() == t * height * width // 4
    assert (model(**stock_clip).logits - whole).abs().max() < 1e-5 * whole.abs().max()

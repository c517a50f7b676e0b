"""Tiny random vision-language models of transformers with their processors, and pictures."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from fathom.vision import from_dict
from fathom.vision.base import LanguageCompressor, Seen, TowerCompressor

WORDS = ("<pad>", "<unk>", "<image>", "<|image_pad|>", "<|video_pad|>", "a", "red", "cat", "what", "is", "this")
TEXT: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 31,
}  # fmt: skip
CLIP: dict[str, Any] = {
    "hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 48,
    "patch_size": 8, "projection_dim": 8,
}  # fmt: skip


def tokenizer() -> Any:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", padding_side="left")
    fast.add_special_tokens({"additional_special_tokens": ["<image>", "<|image_pad|>", "<|video_pad|>"]})
    return fast


def perturbed(model: Any) -> Any:
    """Every parameter moved off its initial value, so that zero biases hide nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def clip(size: int = 48) -> Any:
    return hf.CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}, do_convert_rgb=True
    )


@functools.cache
def pair(family: str) -> tuple[Any, Any]:
    """(model, processor), shared: do not change them."""
    torch.manual_seed(0)
    if family == "llava":
        config = hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**CLIP), text_config=hf.LlamaConfig(**TEXT), image_token_index=2
        )
        processor = hf.LlavaProcessor(
            clip(), tokenizer(), patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
        )
        return perturbed(hf.LlavaForConditionalGeneration(config)), processor
    if family == "llava_next":
        pinpoints = [[48, 96], [96, 48], [96, 96]]
        config = hf.LlavaNextConfig(
            vision_config=hf.CLIPVisionConfig(**CLIP), text_config=hf.LlamaConfig(**TEXT), image_token_index=2,
            image_grid_pinpoints=pinpoints,
        )  # fmt: skip
        image_processor = hf.LlavaNextImageProcessorPil(
            size={"shortest_edge": 48}, crop_size={"height": 48, "width": 48}, image_grid_pinpoints=pinpoints
        )
        processor = hf.LlavaNextProcessor(
            image_processor, tokenizer(), patch_size=8, vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )  # fmt: skip
        return perturbed(hf.LlavaNextForConditionalGeneration(config)), processor
    assert family == "qwen2_5_vl"
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 16,
        "window_size": 16, "fullatt_block_indexes": [1], "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    config = hf.Qwen2_5_VLConfig(
        vision_config=vision, text_config=text, image_token_id=3, video_token_id=4, vision_start_token_id=6,
        vision_end_token_id=7,
    )  # fmt: skip
    image_processor = hf.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 8 * 8, "longest_edge": 96 * 96}
    )
    return perturbed(hf.Qwen2_5_VLForConditionalGeneration(config)), QwenProcessor(image_processor, tokenizer())


class QwenProcessor(hf.Qwen2_5_VLProcessor):
    """Without the video processor, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = 3, 4
        hf.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


# What methods need on models of two layers and eight channels, beside `tokens`
OPTIONS: dict[str, dict[str, Any]] = {"fastv": {"layer": 1}, "mqt": {"queries": 36, "heads": 2}}
OWN_WEIGHTS = ("mqt",)
NOT_ALL = ("dct_coefficients", "prumerge", "mqt")  # which change tokens even where all of them are kept


def method_of(name: str, tokens: int) -> Any:
    if name == "all_tokens":
        return from_dict({"name": name})
    return from_dict({"name": name, "tokens": tokens, **OPTIONS.get(name, {})})


def seen_by(x: torch.Tensor) -> Seen:
    """What a tower of two heads might have attended to, another thing for every row, the same for equal rows."""
    mixing = torch.randn(2, x.shape[-1], 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(x)
    keys = x @ mixing[0]
    return Seen((x.mean(1) @ mixing[1]), torch.cat((keys.mean(1, keepdim=True), keys), 1), 2)


def applied(method: Any, x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """What is left of features [B, n, C], whatever kind the method is of."""
    if isinstance(method, TowerCompressor):
        return method(x, grid, seen_by(x))
    if isinstance(method, LanguageCompressor):
        assert method(x, grid).equal(x) and method.count(grid) == x.shape[1]
        (left,) = {1: method.stages(x.shape[1], 2)}[1].values()
        scores = x.float().square().mean(-1)
        return torch.stack([method.keep(score, row, left)[1] for score, row in zip(scores, x)])
    if method.name in OWN_WEIGHTS:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            resampler = method.resampler(x.shape[-1]).to(x.dtype)
        return resampler(x, grid, method.count(grid)).detach()
    return method(x, grid)


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))

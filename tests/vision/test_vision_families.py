"""Compressors within stock models of transformers: features, placeholders and positions agree; nothing else moves."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from types import SimpleNamespace

import peft
import pytest
import torch
from test_compressors import by_scipy
from transformers import Trainer, TrainingArguments
from vision_cases import OWN_WEIGHTS, method_of, pair, picture

from fathom.vision import METHODS, compress_vision, convert_vision, from_dict

FAMILIES = {
    "llava": "<image>",
    "llava_next": "<image>",
    "qwen2_5_vl": "red <|image_pad|> cat",
}  # Qwen: between start and end
RATIO = from_dict({"name": "fourier_vlm", "ratio": "2/3"})
families = pytest.mark.parametrize("family", FAMILIES)


def batch(family, processor, rows=(0, 1, 2)):
    """A wide picture, a square one, two pictures in one text, and (last) text alone."""
    token = FAMILIES[family]
    texts = [f"what is {token} this", f"{token} a red cat what", f"a {token} is {token} cat", "what is this"]
    pictures = [[picture(60, 90)], [picture(48, 48, 1)], [picture(90, 50, 2), picture(64, 64, 3)], []]
    images = [one for row in rows for one in pictures[row]]
    return processor(images=images or None, text=[texts[row] for row in rows], return_tensors="pt", padding=True)


@families
@torch.no_grad()
def test_all_tokens_kept_is_the_stock_model(family):
    model, processor = pair(family)
    inputs = batch(family, processor)
    expected = model(**inputs).logits
    with compress_vision(model, processor, from_dict({"name": "fourier_vlm", "ratio": 1.0})):
        again = batch(family, processor)
        assert again.input_ids.equal(inputs.input_ids)
        assert (model(**again).logits - expected).abs().max() < 1e-5 * expected.abs().max()
    assert model(**batch(family, processor)).logits.equal(expected)  # and afterwards it is the stock model


@torch.no_grad()
def test_llava_is_tower_low_pass_projector():
    model, processor = pair("llava")
    with compress_vision(model, processor, RATIO):
        inputs = batch("llava", processor)
        found = model(**inputs).logits
    assert (inputs.input_ids == 2).sum() == 4 * 16  # four pictures of 6 × 6 → 4 × 4
    tower, inner = model.model.vision_tower, model.model
    states = tower(inputs.pixel_values, output_hidden_states=True).hidden_states[-2][:, 1:]
    features = inner.multi_modal_projector(by_scipy(states, (6, 6), (4, 4)).float())
    embeddings = inner.get_input_embeddings()(inputs.input_ids).clone()
    embeddings[inputs.input_ids == 2] = features.flatten(0, 1)
    hidden = inner.language_model(inputs_embeds=embeddings, attention_mask=inputs.attention_mask).last_hidden_state
    expected = model.lm_head(hidden)
    real = inputs.attention_mask.bool()
    assert (found - expected)[real].abs().max() < 1e-5 * expected[real].abs().max()


@torch.no_grad()
def test_qwen_positions_are_those_of_the_kept_grid():
    model, processor = pair("qwen2_5_vl")
    with compress_vision(model, processor, RATIO):
        inputs = batch("qwen2_5_vl", processor, rows=(0,))
        found = model(**inputs).logits
    (t, height, width), patch = inputs.image_grid_thw[0].tolist(), 2
    assert t == 1
    grid = height // patch, width // patch
    h, w = grid[0] * 2 // 3, grid[1] * 2 // 3
    assert (inputs.input_ids == 3).sum() == h * w
    raw = model.model.visual(inputs.pixel_values, grid_thw=inputs.image_grid_thw).pooler_output
    features = by_scipy(raw[None], grid, (h, w))[0].float()
    embeddings = model.get_input_embeddings()(inputs.input_ids).clone()
    embeddings[inputs.input_ids == 3] = features
    places = [(i, i, i) for i in range(3)] + [(3, 3 + i, 3 + j) for i in range(h) for j in range(w)]
    places += [(3 + max(h, w) + i,) * 3 for i in range(2)]  # text goes on after the largest position
    positions = torch.tensor(places).T[:, None]
    hidden = model.model.language_model(inputs_embeds=embeddings, position_ids=positions).last_hidden_state
    expected = model.lm_head(hidden)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.no_grad()
def test_qwen_compresses_every_slice_of_a_video_by_itself():
    model, processor = pair("qwen2_5_vl")
    grid = torch.tensor([[3, 12, 8]])
    pixels = torch.randn(3 * 12 * 8, 96, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[5, *[4] * (3 * 4 * 2), 8]])
    kinds = (ids == 4).int() * 2
    with compress_vision(model, processor, RATIO):
        found = model.model.get_video_features(pixels, grid, return_dict=True).pooler_output
        positions, delta = model.model.get_rope_index(ids, kinds, video_grid_thw=grid)
        assert torch.isfinite(
            model(input_ids=ids, pixel_values_videos=pixels, video_grid_thw=grid, mm_token_type_ids=kinds).logits
        ).all()
    raw = model.model.get_video_features(pixels, grid, return_dict=True).pooler_output[0]
    assert (found[0] - by_scipy(raw.view(3, 24, -1), (6, 4), (4, 2)).flatten(0, 1)).abs().max() < 1e-5 * raw.abs().max()
    assert positions[1, 0, 1:9].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert positions[2, 0, 1:9].tolist() == [1, 2] * 4
    assert delta.item() == positions.max() + 1 - ids.shape[1]


@families
@torch.no_grad()
def test_rows_of_a_batch_equal_the_rows_alone(family):
    """Pictures of other sizes, two pictures, text without one; and generation through the cache is the full forward."""
    model, processor = pair(family)
    with compress_vision(model, processor, RATIO):
        rows = (0, 1, 2, 3)
        inputs = batch(family, processor, rows)
        logits = model(**inputs).logits
        made = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False, suppress_tokens=[2, 3, 4])
        for row in rows:
            alone = batch(family, processor, (row,))
            expected, length = model(**alone).logits[0], alone.input_ids.shape[1]
            assert (logits[row, -length:] - expected).abs().max() < 2e-5 * expected.abs().max()
            if row == 3:
                continue
            text = alone
            for _ in range(4):  # without a cache
                scores = model(**text, use_cache=False).logits[:, -1:]
                scores[..., [2, 3, 4, 31]] = -torch.inf  # no pictures, and no end
                token = scores.argmax(-1)
                grown = {"input_ids": torch.cat((text["input_ids"], token), 1)}
                grown["attention_mask"] = torch.ones_like(grown["input_ids"])
                if "mm_token_type_ids" in text:
                    zero = torch.zeros_like(token)
                    grown["mm_token_type_ids"] = torch.cat((text["mm_token_type_ids"], zero), 1)
                text = {**text, **grown}
            assert made[row, -4:].equal(text["input_ids"][0, -4:])


@families
@torch.no_grad()
def test_beams_and_nested_blocks(family):
    model, processor = pair(family)
    half = from_dict({"name": "average_pooling", "ratio": 0.5})
    with compress_vision(model, processor, RATIO):
        outer = batch(family, processor)
        expected = model(**outer).logits
        with compress_vision(model, processor, half):
            inner = batch(family, processor)
            assert inner.input_ids.shape[1] < outer.input_ids.shape[1]
            assert model.generate(**inner, num_beams=2, max_new_tokens=2).shape[0] == 3
        assert model(**batch(family, processor)).logits.equal(expected)
        other, _ = copy.deepcopy(pair(family)[0]), None
    stock = batch(family, processor)
    with pytest.raises(ValueError, match="do not match"):
        other(**stock)  # the copy made within the block goes on compressing; its processor does not


@families
def test_gradients_pass_and_saving_within_the_block_saves_the_stock_model(family, tmp_path):
    model, processor = copy.deepcopy(pair(family)[0]), pair(family)[1]
    names = list(model.state_dict())
    with compress_vision(model, processor, RATIO):
        inputs = batch(family, processor)
        model(**inputs, labels=inputs.input_ids).loss.backward()
        assert list(model.state_dict()) == names
        model.save_pretrained(tmp_path)
    tower = model.model.visual if family == "qwen2_5_vl" else model.model.vision_tower
    gradients = [p.grad.abs().max().item() for p in tower.parameters() if p.grad is not None]
    assert max(gradients) > 0 and all(value < float("inf") for value in gradients)
    stock = type(model).from_pretrained(tmp_path).eval()
    inputs = batch(family, processor)
    assert stock(**inputs).logits.equal(model.eval()(**inputs).logits)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in OWN_WEIGHTS])
@torch.no_grad()
def test_every_method_serves_llava(name):
    model, processor = pair("llava")
    expected, method = model(**batch("llava", processor)).logits, method_of(name, 9)
    with compress_vision(model, processor, method):
        inputs = batch("llava", processor)
        assert (inputs.input_ids == 2).sum() == 4 * method.count((6, 6))
        logits = model(**inputs).logits
        assert torch.isfinite(logits).all() and logits.shape[:2] == inputs.input_ids.shape
        for row in range(3):
            alone = batch("llava", processor, (row,))
            one = model(**alone).logits[0]
            assert (logits[row, -len(one) :] - one).abs().max() < 2e-5 * one.abs().max()
    assert model(**batch("llava", processor)).logits.equal(expected)


STRANGER = """
import os, pickle, sys, torch
from pathlib import Path
from transformers import AutoModelForImageTextToText, AutoProcessor
folder = Path(sys.argv[1])
if not (child := os.fork()):  # apart, so that each finds fathom not yet imported
    config = pickle.loads((folder / "config.pickle").read_bytes())
    assert "Fathom" in type(AutoModelForImageTextToText.from_config(config)).__name__
    os._exit(0)
processor = AutoProcessor.from_pretrained(folder / "ours", trust_remote_code=True)
assert type(processor).__name__ == "FathomLlavaProcessor"
model = AutoModelForImageTextToText.from_pretrained(folder / "ours", trust_remote_code=True).eval()
inputs, expected = torch.load(folder / "given.pt", weights_only=False)
assert model(**inputs).logits.equal(expected)
processor.save_pretrained(folder / "third")
model.save_pretrained(folder / "third")
assert [file.name for file in (folder / "third").glob("*.py")] == ["modeling_fathom.py"]
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("family", ["llava", "llava_next"])
@torch.no_grad()
def test_a_converted_checkpoint_is_loaded_by_the_auto_classes(family, tmp_path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model, processor = pair(family)
    model.save_pretrained(tmp_path / "stock")
    processor.save_pretrained(tmp_path / "stock")
    convert_vision(tmp_path / "stock", tmp_path / "ours", RATIO)
    card = (tmp_path / "ours" / "README.md").read_text()
    assert f"# {RATIO.name}\n" in card and "import AutoModelForImageTextToText, AutoProcessor" in card
    with compress_vision(model, processor, RATIO):
        inputs = batch(family, processor)
        expected = model(**inputs).logits
    for _ in range(2):  # from the converted folder, and from what the loaded ones save
        loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours").eval()
        reader = AutoProcessor.from_pretrained(tmp_path / "ours")
        again = batch(family, reader)
        assert again.input_ids.equal(inputs.input_ids) and loaded(**again).logits.equal(expected)
        loaded.save_pretrained(tmp_path / "again")
        reader.save_pretrained(tmp_path / "again")
        (tmp_path / "ours").rename(tmp_path / "first")
        (tmp_path / "again").rename(tmp_path / "ours")
        (tmp_path / "first").rename(tmp_path / "again")
    with pytest.raises(FileExistsError, match="choose another folder"):
        convert_vision(tmp_path / "stock", tmp_path / "ours", RATIO)
    if family == "llava":
        torch.save((dict(inputs), expected.detach()), tmp_path / "given.pt")
        (tmp_path / "config.pickle").write_bytes(pickle.dumps(loaded.config))
        subprocess.run([sys.executable, "-c", STRANGER, tmp_path], check=True)


def test_the_trainer_and_peft_run_within_a_block(tmp_path):
    stock, processor = pair("llava")
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(copy.deepcopy(stock), adapters)
    alone = copy.deepcopy(model)
    with compress_vision(model, processor, RATIO):
        inputs = dict(batch("llava", processor, (0, 1)))
        options = {"max_steps": 1, "learning_rate": 0.5, "optim": "sgd", "use_cpu": True, "report_to": []}
        Trainer(
            model=model,
            args=TrainingArguments(tmp_path, max_grad_norm=0, save_strategy="no", **options),
            train_dataset=[0, 1],
            data_collator=lambda rows: {**inputs, "labels": inputs["input_ids"]},
        ).train()
    alone.train()
    with compress_vision(alone, None, RATIO):
        logits = alone(**inputs).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten()).backward()
    moved = 0
    for (name, found), weight in zip(model.named_parameters(), alone.parameters()):
        if weight.grad is not None:
            torch.testing.assert_close(found, weight - 0.5 * weight.grad, rtol=1e-4, atol=1e-6)
            moved += bool((weight.grad != 0).any())
        assert found.requires_grad == ("lora" in name)
    assert (
        moved >= 4 and type(model.base_model.model.model.multi_modal_projector).__name__ == "LlavaMultiModalProjector"
    )


def test_models_that_are_not_served_are_refused_by_name():
    for kind, said in {"qwen3_vl": "deepstack features", "gemma3": r"use LLaVA \(llava\), LLaVA-NeXT"}.items():
        model = SimpleNamespace(config=SimpleNamespace(model_type=kind))
        with pytest.raises(ValueError, match=f"model_type='{kind}': .*{said}"), compress_vision(model, None, RATIO):
            pass


def test_what_does_not_fit_is_refused():
    llava, processor = pair("llava")
    qwen, qwens = pair("qwen2_5_vl")
    with (
        pytest.raises(ValueError, match="it does not belong to LLaVA; use LlavaProcessor"),
        compress_vision(llava, qwens, RATIO),
    ):
        pass
    with (
        pytest.raises(ValueError, match="keeps no grid; use one that does"),
        compress_vision(qwen, qwens, from_dict({"name": "divprune", "tokens": 4})),
    ):
        pass
    with pytest.raises(ValueError, match="give a compressor"), compress_vision(llava, processor, "fourier_vlm"):
        pass
    with (
        compress_vision(llava, processor, from_dict({"name": "fourier_vlm", "tokens": 64})),
        pytest.raises(ValueError, match="6 × 6 = 36; use at most that"),
    ):
        batch("llava", processor)
    stock = batch("llava", processor)
    with compress_vision(llava, None, RATIO), pytest.raises(ValueError, match="do not match"):
        llava(**stock)
    assert "compressor" not in llava.model.multi_modal_projector.__dict__

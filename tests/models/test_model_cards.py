"""The card beside every kind of checkpoint, and what goes to the hub: a folder here stands for the hub."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub.errors import OfflineModeIsEnabled

import fathom
from fathom import FathomConfig, FathomForCausalLM
from fathom.models.model_card import WRITTEN, card_text, describe
from tiny import SIZES, tiny_model

BART = {"vocab_size": 61, "d_model": 8, "encoder_layers": 4, "decoder_layers": 1, "encoder_ffn_dim": 8,
        "decoder_ffn_dim": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2}  # fmt: skip
T5 = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 8, "num_layers": 2, "num_heads": 2}
MASKED = {"diffusion": {"name": "masked", "mask_token_id": 96}}
LATENT = {"encoder": FathomConfig(**SIZES, **MASKED), "denoiser": SIZES, "decoder": SIZES, "length": 8,
          "vocab_size": SIZES["vocab_size"]}  # fmt: skip
CASES = {  # class, its config and fields, the title, the Auto class that the card names
    "decoder": ("ForCausalLM", "Config", {**SIZES, "depth": "pondering"}, "pondering", "CausalLM"),
    "no method": ("ForCausalLM", "Config", SIZES, "llama, no method", "CausalLM"),
    "diffusion": ("ForMaskedDiffusion", "Config", {**SIZES, **MASKED}, "masked", "MaskedLM"),
    "encoder": ("ForSequenceClassification", "EncoderConfig", {**SIZES, "encoder": "fourier"}, "fourier",
                "SequenceClassification"),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**BART, "encoder": "fourier"}, "fourier", "Seq2SeqLM"),
    "relations": ("T5ForConditionalGeneration", "T5Config", {**T5, "relations": "rasat"}, "rasat", "Seq2SeqLM"),
    "table": ("TableT5ForConditionalGeneration", "TableT5Config", {**T5, "table": {"name": "akg"}}, "akg", "Seq2SeqLM"),
    "latents": ("ForLatentDiffusion", "LatentConfig", LATENT, "codar", "AutoModel"),
}  # fmt: skip


def made(case: str):
    kind, config, fields, *_ = CASES[case]
    return getattr(fathom, f"Fathom{kind}")(getattr(fathom, f"Fathom{config}")(**fields))


def front(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


@pytest.mark.parametrize("case", CASES)
def test_the_card_of_every_kind_says_what_the_model_is(case, tmp_path) -> None:
    model = made(case)
    model.save_pretrained(tmp_path)
    card, (*_, title, auto) = (tmp_path / "README.md").read_text(), CASES[case]
    assert f"\n# {title}\n" in card and f"import {auto}" in card.replace("AutoModelFor", "")
    parameters = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    assert f"{parameters:,} parameters" in card and "trust_remote_code=True" in card
    assert front(card)["tags"] == ["fathom", *([] if case == "no method" else [title])]
    assert "license" not in front(card) and "None was stated" in card


def test_a_card_that_somebody_wrote_stays_and_ours_is_renewed(tmp_path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tiny_model(depth={"name": "pondering", "steps": 1}).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "# pondering\n" in card and '`depth`: `{"name": "pondering", "steps": 1,' in card
    (tmp_path / "README.md").write_text("mine")
    tiny_model().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


FACTS = {
    "recipe": {"name": "demo", "data": {"train": "embedded"}}, "license": "apache-2.0", "seed": 3, "steps": 10,
    "base_model": "someone/base", "tokens": 640, "train_flops": 1.5e12, "held_out": "held-out text (90 bytes)",
    "held_out_name": "embedded", "notes": ["a text was short"], "device": "a CPU (abacus)",
    "versions": {"fathom": "0.2.0"},
    "scores": [{"name": "bits_per_byte", "value": 2.34567, "unit": "bits per byte", "meaning": "The loss in bits."},
               {"name": "unknown", "value": None, "unit": "", "meaning": ""}],
}  # fmt: skip


@pytest.fixture
def described(tmp_path) -> Path:
    model = tiny_model(depth={"name": "pondering"})
    model.save_pretrained(tmp_path / "model")
    describe(tmp_path / "model", model.config, 999, FACTS)
    return tmp_path / "model"


def test_facts_of_a_training_are_told_and_travel_with_the_weights(described, tmp_path) -> None:
    FathomForCausalLM.from_pretrained(described).save_pretrained(tmp_path / "again")
    card = (described / "README.md").read_text()
    again = (tmp_path / "again" / "README.md").read_text()
    assert again.replace(f"{sum(p.numel() for p in tiny_model(depth='pondering').parameters()):,}", "999") == card
    for said in ("train: embedded", "640 tokens in 10 steps", "| bits_per_byte | 2.346 | The loss in bits. |",
                 "on a CPU (abacus)", "- a text was short", "`apache-2.0`, as the recipe says"):  # fmt: skip
        assert said in card
    top = front(card)
    assert (top["license"], top["base_model"]) == ("apache-2.0", "someone/base") and "unknown" not in card
    assert top["model-index"][0]["results"][0]["metrics"][0]["value"] == 2.34567


@pytest.mark.parametrize("how", ["trained", "bf16"])
def test_numbers_of_other_weights_are_not_passed_off_as_these(described, tmp_path, how) -> None:
    model = FathomForCausalLM.from_pretrained(described, dtype=torch.bfloat16 if how == "bf16" else torch.float32)
    if how == "trained":
        with torch.no_grad():
            model.model.norm.weight.add_(1e-4)
    model.save_pretrained(tmp_path / "again")
    card = (tmp_path / "again" / "README.md").read_text()
    assert "its weights have changed since" in card and "model-index" not in front(card)


@pytest.mark.parametrize(("base", "linked"), [("someone/base", True), ("model", False)])
def test_a_folder_on_this_machine_is_no_model_of_the_hub(described, base, linked) -> None:
    config = FathomForCausalLM.from_pretrained(described).config
    card = card_text(config, 1, FACTS | {"base_model": base, "license": None})
    assert ("base_model" in front(card)) == linked and f"It contains weights of `{base}`" in card


def test_rows_in_another_order_are_other_weights(described, tmp_path) -> None:
    model = FathomForCausalLM.from_pretrained(described)
    with torch.no_grad():
        for weight in model.parameters():  # every tensor's sum stays
            weight.copy_(weight.flip(0).clone())
    model.save_pretrained(tmp_path / "again")
    assert "its weights have changed since" in (tmp_path / "again" / "README.md").read_text()


def test_texts_of_a_recipe_break_neither_table_nor_fence(described) -> None:
    config = FathomForCausalLM.from_pretrained(described).config
    score = {"name": "a|b", "value": 1.0, "unit": "bits: |", "meaning": "p(x | y)"}
    facts = FACTS | {"scores": [score], "recipe": {"prompt": "```\n# no heading\n"}, "held_out_name": "a: ü # 漢"}
    card = card_text(config, 1, facts)
    assert r"| a\|b | 1 | p(x \| y) |" in card and front(card)["model-index"][0]["results"][0]["dataset"]["name"]
    fenced = card.split("````yaml\n")[1].split("\n````\n")[0]
    assert yaml.safe_load(fenced) == facts["recipe"]


def test_the_hub_gets_the_card_with_the_weights(described, hub) -> None:
    model = FathomForCausalLM.from_pretrained(described)
    assert model.push_to_hub("me/model", tags=["mine"], private=True) == "hub://me/model#Upload model"
    names = {path.name for path in (hub / "me" / "model").iterdir()}
    assert {"README.md", "config.json", "fathom.json", "model.safetensors", "modeling_fathom.py"} <= names
    there = hub / "me" / "model" / "README.md"
    card = there.read_text()
    assert WRITTEN in card and "mine" in front(card)["tags"] and front(card)["license"] == "apache-2.0"
    # transformers' own card for models without one gives way, a person's does not
    for written, kept in (("This model card has been automatically generated.", False), ("Mine.", True)):
        there.write_text(written)
        model.push_to_hub("me/model")
        assert (there.read_text() == written) == kept
    model.save_pretrained(described.parent / "third", push_to_hub=True, repo_id="me/third")
    assert json.loads((hub / "me" / "third" / "fathom.json").read_text())["seed"] == 3


def test_offline_says_what_to_do(monkeypatch) -> None:
    def refuse(*_, **__):
        raise OfflineModeIsEnabled("offline")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    with pytest.raises(ConnectionError, match=r"HF_HUB_OFFLINE forbids it; unset it, or save_pretrained\(folder\)"):
        made("diffusion").push_to_hub("me/model")

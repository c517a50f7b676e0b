"""LongLLaDA: the authors' factors, and what a rescaled model must satisfy."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fathom import FathomConfig, FathomForMaskedDiffusion
from fathom.diffusion.longllada import LongLLaDA, critical_dimension, reach, rescale, reset, rotary, scale
from tiny import SIZES, assert_close, perturb, tiny_model, tokens

MASKED = {"name": "masked", "mask_token_id": 96}
LLADA, LLAMA3, DREAM = (500_000, 128, 4096), (500_000, 128, 8192), (1_000_000, 128, 2048)


@pytest.mark.parametrize(("of", "span", "target", "exact", "rounded"), [
    (LLADA, "causal", 8192, 3.40, 4), (LLADA, "causal", 16384, 13.60, 14), (LLADA, "causal", 24576, 30.60, 31),
    (LLADA, "causal", 32768, 54.40, 55), (LLAMA3, "causal", 16384, 3.53, 4), (LLAMA3, "causal", 32768, 12.54, 13),
    (DREAM, "causal", 4096, 4.68, 5), (DREAM, "causal", 8192, 24.2, 25), (DREAM, "causal", 16384, 125, 126),
    (LLADA, "bidirectional", 8192, 3.53, 4), (LLADA, "bidirectional", 131072, 562, 562),
])  # fmt: skip
def test_the_authors_factors(of, span, target, exact, rounded):
    assert scale(*of, target, "none", span) == pytest.approx(exact, rel=5e-3)
    assert scale(*of, target, "ceil", span) == rounded
    assert reach(*of, scale(*of, target, "none", span), span) == pytest.approx(target)
    assert scale(*of, 64, "none", span) == 1


def test_critical_dimensions_and_reach():
    assert [critical_dimension(*of) for of in (LLADA, LLAMA3, DREAM)] == [64, 70, 54]
    assert [round(reach(*of, 1)) for of in (LLADA, LLAMA3, DREAM)] == [4443, 8219, 2135]
    factors = [scale(*LLADA, t, "none") for t in range(5000, 40000, 5000)]
    assert factors == sorted(factors)


def made(**fields):
    torch.manual_seed(0)
    model = FathomForMaskedDiffusion(FathomConfig(**{**SIZES, **fields}, diffusion=MASKED))
    perturb(model)
    return model.eval()


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_rescaled_in_place_reset_and_built_so(kind, tmp_path):
    def build(theta):
        if kind == "ours":
            return made(rope_parameters={"rope_type": "default", "rope_theta": theta})
        torch.manual_seed(0)
        fields = {k: v for k, v in SIZES.items() if not k.endswith("token_id")}
        config = LlamaConfig(**fields, is_causal=False, rope_parameters={"rope_type": "default", "rope_theta": theta})
        return LlamaForCausalLM(config).eval()

    model, ids = build(1000.0), tokens(2, 30)
    with torch.no_grad():
        before = model(ids).logits
        rescale(model, 1)
        assert torch.equal(model(ids).logits, before)
        rescale(model, 3)
        rescale(model, 5)
        once = build(15_000.0)
        assert rotary(model) == rotary(once)
        frequencies = model.get_decoder().rotary_emb.inv_freq
        assert frequencies[0] == 1 and float(frequencies[-1]) == pytest.approx(15_000 ** -(6 / 8))
        assert_close(model(ids).logits, once(ids).logits, 1e-6)
        assert (model(ids).logits - before).abs().max() > 1e-4
        model.save_pretrained(tmp_path)
        assert_close(type(model).from_pretrained(tmp_path).eval()(ids).logits, once(ids).logits, 1e-6)
        reset(model)
        assert_close(model(ids).logits, before, 1e-6)
        assert LongLLaDA(target=640, trained=64).apply(model) > 1 and model.config.max_position_embeddings == 640


def test_what_has_no_base_is_refused():
    with pytest.raises(ValueError, match="positions are not rotary"):
        LongLLaDA(factor=2.0).apply(tiny_model("gpt2"))
    with pytest.raises(ValueError, match="only rope_type='default' is rescaled"):
        rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
        LongLLaDA(factor=2.0).apply(tiny_model(rope_parameters=rope))
    for options in ({}, {"target": 100, "factor": 2.0}):
        with pytest.raises(ValueError, match=r"longllada option target=.*: must be given, or else factor"):
            LongLLaDA(**options)


def test_keys_of_another_base_are_not_kept():
    model = made(rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
    with pytest.raises(ValueError, match="whose block cache may hold keys of the present base"):
        model.generate(tokens(1, 6), max_new_tokens=4, block_length=2, on_block=lambda *_: rescale(model, 2))
    assert rotary(model)[0] == 1000.0

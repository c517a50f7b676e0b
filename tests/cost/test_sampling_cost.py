"""The cost of an answer against torch's FLOP counter and the sampler's own counts."""

import dataclasses
import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fathom import FathomConfig, FathomForMaskedDiffusion
from fathom.cost.sampling import sampling_cost
from fathom.diffusion import DiffusionGenerationConfig, DKVCache, Dual, Prefix, SparseDLLM
from tiny import SIZES, tiny_model
from tiny_checkpoint import run_cli

CACHES = [
    None,
    Prefix(),
    Dual(),
    Dual(delay_steps=1, refresh=2),
    SparseDLLM(),
    SparseDLLM(keep_ratio=(0.3, 0.8), evict="suffix"),
    SparseDLLM(score="softmax", delay_steps=0),
    SparseDLLM(score="snapkv"),
    DKVCache(cache_steps=3),
]


def model(shift=False, **fields):
    torch.manual_seed(0)
    section = {"name": "masked", "mask_token_id": 96, "shift": shift}
    sizes = {**SIZES, "vocab_size": 97, "num_key_value_heads": 2, **fields}
    return FathomForMaskedDiffusion(FathomConfig(**sizes, diffusion=section)).eval()


def check(made, cache, **options):
    options = {"block_length": 6, **options}
    sampled = DiffusionGenerationConfig(max_new_tokens=12, block_cache=cache, return_dict_in_generate=True, **options)
    ids = torch.randint(3, 96, (1, 9), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        out = made.generate(ids, generation_config=sampled)
    cost = sampling_cost(made.config, 9, sampled)
    assert (cost.full, cost.block) == (out.nfe.get("full", 0), out.nfe.get("block", 0))
    assert cost.columns == out.columns and cost.cache_bytes == out.cache_bytes
    assert cost.flops == pytest.approx(counter.get_total_flops(), rel=1e-9)


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: "none" if cache is None else cache.name)
def test_closed_forms_are_what_is_counted(cache):
    check(model(), cache, steps=8)


@pytest.mark.parametrize("cache", [None, Dual(), SparseDLLM(), SparseDLLM(first_step="extra_query")])
def test_of_shifted_models(cache):
    check(model(shift=True), cache)


@pytest.mark.parametrize("size", [4, 3])
def test_of_block_diffusion(size):
    """The prompt's 9 tokens end within a block of 4, or fill three of 3; the last block of 4 is short."""
    torch.manual_seed(0)
    section = {"name": "block", "mask_token_id": 96, "block_length": size}
    sizes = {**SIZES, "vocab_size": 97, "num_key_value_heads": 2}
    made = FathomForMaskedDiffusion(FathomConfig(**sizes, diffusion=section)).eval()
    check(made, None, block_length=size, steps=12)
    check(made, None, block_length=size, steps=24 // size)


def test_of_a_loop():
    check(model(depth={"name": "loop", "passes": 2}), SparseDLLM())


def test_what_depends_on_the_text_is_refused():
    with pytest.raises(ValueError, match="the cost depends on the text"):
        sampling_cost(model().config, 9, DiffusionGenerationConfig(block_cache=DKVCache(mode="greedy")))
    with pytest.raises(ValueError, match="diffusion='none'"):
        sampling_cost(tiny_model().config, 9, DiffusionGenerationConfig())


def test_the_verb_has_a_table_of_caches(tmp_path, monkeypatch, capsys):
    model().save_pretrained(tmp_path / "model")
    asked = ("--prompt", 9, "--new-tokens", 12, "--steps", 8, "--block-length", 6)
    code, out, _ = run_cli(monkeypatch, capsys, "cost", tmp_path / "model", *asked, "--json")
    (caches,) = json.loads(out)["models"].values()
    sampled = DiffusionGenerationConfig(max_new_tokens=12, steps=8, block_length=6, block_cache=SparseDLLM())
    assert code == 0 and caches["sparse_dllm"] == dataclasses.asdict(sampling_cost(model().config, 9, sampled))
    assert list(caches) == ["none", "prefix", "dual", "sparse_dllm", "dkv_cache"]
    code, out, _ = run_cli(monkeypatch, capsys, "cost", tmp_path / "model", *asked)
    assert code == 0 and "× fewer" in out
    code, _, err = run_cli(monkeypatch, capsys, "cost", tmp_path / "model", "--steps", 8)
    assert code == 2 and "go with --prompt" in err
    tiny_model().save_pretrained(tmp_path / "other")
    code, _, err = run_cli(monkeypatch, capsys, "cost", tmp_path / "other", "--prompt", 9)
    assert code == 2 and "is a diffusion model" in err

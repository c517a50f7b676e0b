"""Every policy, schedule and block cache against the sampler written out in diffusion_reference.py, and what they all
must satisfy, on Llama (grouped keys), GPT-NeoX (parallel, biases, partial rotation) and Qwen2 forms."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from diffusion_reference import PlainModel, sample

from fathom import FathomConfig, FathomForMaskedDiffusion
from fathom.diffusion import (
    BLOCK_CACHES,
    POLICIES,
    Dual,
    Prefix,
    SparseDLLM,
)
from tiny import FAMILY_SIZES, SIZES, perturb

MASK = 96
FAMILIES = ("llama", "gpt_neox", "qwen2")
# Options under which a method does something else than its neighbours in a few steps on an untrained model.
TELLING = {"threshold": {"threshold": 0.03}, "dynamic": {"threshold": 0.03}, "entropy_bounded": {"bound": 5.0}}
CACHES = [
    ("none", {}),
    ("prefix", {}),
    ("dual", {}),
    ("dual", {"delay_steps": 1, "refresh": 2}),
    ("dkv_cache", {"cache_steps": 3}),
    ("dkv_cache", {"mode": "greedy", "cache_steps": 6, "window": 2}),
    ("dllm_cache", {"prompt_interval": 4, "response_interval": 3, "ratio": 0.4}),
    ("dllm_cache", {"prompt_interval": 6, "response_interval": 6, "ratio": 0.2}),
    ("sparse_dllm", {"keep_ratio": 0.7, "delay_steps": 1, "first_step": "extra_query"}),
    ("sparse_dllm", {"keep_ratio": 0.4, "delay_steps": 0, "kernel_size": None, "first_step": "extra_query"}),
]
OFFICIAL = ("sparse_dllm", {"keep_ratio": 0.5})
SHAPE = {"max_new_tokens": 12, "block_length": 6, "steps": 8}
_models: dict[tuple, FathomForMaskedDiffusion] = {}


def model(family: str = "llama", shift: bool = False, **fields) -> FathomForMaskedDiffusion:
    """A random tiny model in float64."""
    key = (family, shift, repr(fields))
    if key not in _models:
        torch.manual_seed(3)
        section = {"name": "masked", "mask_token_id": MASK, "shift": shift}
        config = FathomConfig(backbone=family, **{**SIZES, **FAMILY_SIZES[family], **fields}, diffusion=section)
        made = FathomForMaskedDiffusion(config).double()
        perturb(made, 3)
        with torch.no_grad():
            made.lm_head.weight.mul_(2)  # so that tokens differ in their probabilities
        _models[key] = made.eval()
    return _models[key]


def ids(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, MASK, (rows, length), generator=torch.Generator().manual_seed(seed))


def made(axis: dict, named: tuple[str, dict]):
    name, options = named
    return None if name == "none" else axis[name](**options)


def run(tested, inputs, policy, cache, mask=None, **options):
    options = {**SHAPE, "temperature": 1.0, "seed": [5] * len(inputs), **options}
    return tested.generate(
        inputs, mask, policy=made(POLICIES, policy), block_cache=made(BLOCK_CACHES, cache),
        return_dict_in_generate=True, **options,
    )  # fmt: skip


def against_reference(tested, policy, cache, **options):
    prompt = ids(1, 5)
    out = run(tested, prompt, policy, cache, **options)
    options = {"steps": 8, "temperature": 1.0, "seed": 5, **options}
    options["seed"] = 5
    expected, revealed, confidence = sample(
        PlainModel(tested), prompt[0].tolist(), policy, cache, length=12, block_length=6, **options
    )
    assert out.sequences[0].tolist() == expected
    assert {j: int(out.revealed[0, j]) for j in revealed} == revealed
    found = [float(out.confidence[0, j]) for j in confidence]
    assert found == pytest.approx(list(confidence.values()), rel=1e-5)  # as sharp as fp32, in which it is kept
    assert (out.revealed[0, :5] == -1).all() and MASK not in expected
    assert len(set(expected[5:])) > 3  # tokens differ, so the comparison says something
    return out


every_policy = pytest.mark.parametrize(
    "policy", [(name, TELLING.get(name, {})) for name in POLICIES], ids=lambda p: p[0]
)
every_cache = pytest.mark.parametrize("cache", CACHES, ids=lambda c: "-".join(map(str, [c[0], *c[1].values()])))
both_shifts = pytest.mark.parametrize("shift", [False, True], ids=["", "shift"])


def refused(policy, cache) -> bool:
    """Pairs that are refused by name."""
    return policy[0] == "fourier_sampler" and cache[0] == "dkv_cache"


# ---------------------------------------------------------------- against the plain sampler


@every_policy
@both_shifts
def test_policies_are_the_plain_ones(policy, shift):
    against_reference(model(shift=shift), policy, ("none", {}))


@every_cache
@both_shifts
@pytest.mark.parametrize("family", FAMILIES)
def test_caches_are_the_plain_ones(cache, shift, family):
    against_reference(model(family, shift), ("low_confidence", {}), cache)


@pytest.mark.parametrize("schedule", ["dream", "exact"])
def test_schedules_are_the_plain_ones(schedule):
    against_reference(model(), ("entropy", {}), ("none", {}), schedule=schedule)


def test_the_official_first_step_of_shifted_models():
    """One token, the block's first, in step 0, whatever the confidence."""
    out = against_reference(model(shift=True), ("low_confidence", {}), OFFICIAL, schedule="dream")
    assert [out.revealed[0, 5:].tolist().count(step) for step in (0, 4)] == [1, 1]
    assert out.revealed[0, 5] == 0 and out.revealed[0, 11] == 4
    with pytest.raises(ValueError, match="first_step='official' with 1 step a block"):
        run(model(shift=True), ids(1, 5), ("entropy", {}), OFFICIAL, steps=2)


@pytest.mark.parametrize(
    "policy", [("fourier_sampler", {"variance_scope": "block"}), ("fourier_sampler", {"rho": 0.9})], ids=str
)
def test_fourier_with_a_cache_is_the_plain_one(policy):
    against_reference(model(), policy, ("dual", {}))


# ---------------------------------------------------------------- what all must satisfy


@every_policy
@every_cache
def test_a_row_of_a_padded_batch_is_the_row_alone(policy, cache):
    """And the same seed gives the same ids; no mask is left; tokens that stood there stay."""
    tested, prompts = model("qwen2"), ids(2, 6)
    mask = torch.ones_like(prompts)
    mask[1, :3] = 0
    if refused(policy, cache):
        with pytest.raises(ValueError, match="policy='fourier_sampler' reads the states of the whole block"):
            run(tested, prompts, policy, cache, mask)
        return
    out = run(tested, prompts, policy, cache, mask, seed=[5, 6])
    assert torch.equal(out.sequences[:, :6], prompts) and not (out.sequences == MASK).any()
    for row, start in ((0, 0), (1, 3)):
        alone = run(tested, prompts[row : row + 1, start:], policy, cache, seed=[5 + row])
        assert torch.equal(out.sequences[row, start:], alone.sequences[0])
        assert torch.equal(out.revealed[row, 6:], alone.revealed[0, 6 - start :])
        torch.testing.assert_close(out.confidence[row, 6:], alone.confidence[0, 6 - start :], rtol=1e-5, atol=1e-7)


@every_cache
def test_guided_rows_are_rows_alone(cache):
    tested, prompts = model(), ids(2, 6)
    mask = torch.ones_like(prompts)
    mask[1, :3] = 0
    guided = {"cfg_scale": 1.5, "cfg_keep_tokens": [int(prompts[0, 1])]}
    out = run(tested, prompts, ("margin", {}), cache, mask, seed=[5, 6], **guided)
    for row, start in ((0, 0), (1, 3)):
        alone = run(tested, prompts[row : row + 1, start:], ("margin", {}), cache, seed=[5 + row], **guided)
        assert torch.equal(out.sequences[row, start:], alone.sequences[0])
    plain = run(tested, prompts, ("margin", {}), cache, mask, seed=[5, 6])
    assert sum(out.nfe.values()) == 2 * sum(plain.nfe.values())
    assert not torch.equal(out.sequences, plain.sequences)
    empty = run(tested, prompts[:, :0], ("margin", {}), cache, cfg_scale=1.5)
    assert torch.equal(empty.sequences, run(tested, prompts[:, :0], ("margin", {}), cache).sequences)


def test_guidance_is_the_papers_formula():
    tested, prompt = model(), ids(1, 4)
    out = run(tested, prompt, ("left_to_right", {}), ("none", {}), temperature=0, max_new_tokens=1, block_length=1,
              steps=1, cfg_scale=0.7)  # fmt: skip
    canvas = torch.cat([prompt, torch.tensor([[MASK]])], 1)
    given, free = tested(canvas).logits[0, -1], tested(torch.full_like(canvas, MASK)).logits[0, -1]
    logits = free + 1.7 * (given - free)
    logits[MASK] = -torch.inf
    assert out.sequences[0, -1] == logits.argmax()
    torch.testing.assert_close(out.confidence[0, -1], logits.softmax(-1).max().float())


def test_one_block_of_single_tokens_is_a_plain_loop():
    """Bk = S = G by hand: one token a step, the likeliest."""
    tested, canvas = model(), torch.cat([ids(1, 4), torch.full((1, 6), MASK)], 1)
    expected = canvas.clone()
    while (expected == MASK).any():
        logits = tested(expected).logits[0]
        logits[:, MASK] = -torch.inf
        p = logits.softmax(-1).amax(-1).masked_fill(expected[0] != MASK, -1)
        expected[0, p.argmax()] = logits[p.argmax()].argmax()
    found = tested.generate(canvas[:, :4], max_new_tokens=6, block_length=6, steps=6)
    assert torch.equal(found, expected)
    infilled = tested.generate(canvas, max_new_tokens=0, infill=True)
    assert torch.equal(infilled, expected)


def test_temperature_samples_the_softmax_and_zero_is_the_limit():
    from fathom.diffusion import DiffusionGenerationConfig
    from fathom.diffusion.sampling import Sampler, truncate

    tested = model()
    logits = torch.tensor([2.0, 0.5, -1.0, 1.0], dtype=torch.float64)
    sampler = Sampler(tested, ids(1, 3), None, DiffusionGenerationConfig(temperature=0.5))
    drawn = sampler.choose(logits.repeat(20000, 1), torch.zeros(20000, dtype=torch.long)).bincount() / 20000
    torch.testing.assert_close(drawn.double(), (logits / 0.5).softmax(-1), rtol=0, atol=0.012)
    sampler = Sampler(tested, ids(1, 3), None, DiffusionGenerationConfig(temperature=1e-6))
    assert sampler.choose(logits[None], torch.zeros(1, dtype=torch.long)) == 0
    assert truncate(logits[None], 2, None).isfinite().tolist() == [[True, False, False, True]]
    assert truncate(logits[None], None, 0.6).isfinite().tolist() == [[True, False, False, False]]
    assert truncate(logits[None], None, 0.7).isfinite().tolist() == [[True, False, False, True]]
    assert truncate(torch.zeros(1, 4), 2, None).isfinite().tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("steps", [4, 8, 12])
def test_evaluations_bytes_and_kept_counts(steps):
    """2 min(s, 2) full passes and nb (s − 2) block passes; ⌊r n⌋ kept, none of the block, none of padding."""
    tested, prompts = model(), ids(2, 9)
    mask = torch.ones_like(prompts)
    mask[1, :5] = 0
    cache = SparseDLLM(keep_ratio=0.7)
    out = tested.generate(
        prompts, mask, block_cache=cache, return_dict_in_generate=True, max_new_tokens=12, block_length=6, steps=steps
    )
    s = steps // 2
    assert out.nfe["full"] == 2 * min(s, 2) and out.nfe.get("block", 0) == 2 * max(s - 2, 0)
    config, most = tested.config, 7 * (9 + 12 - 6) // 10
    expected = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 8 * most * 2
    assert out.cache_bytes == expected


def kept(cache, inputs, mask, **fields):
    """What a state keeps after its evicting pass over the canvas [prompt | 6 masks | 6 masks], first block."""
    from fathom.diffusion.base import Block
    from fathom.diffusion.passes import Passes, sampling_attention

    tested = model(**fields)
    canvas = torch.cat([inputs, torch.full((len(inputs), 12), MASK)], 1)
    real = torch.cat([mask.bool(), torch.ones(len(inputs), 12, dtype=torch.bool)], 1)
    state = cache.new_state(Passes(tested, real))
    start = inputs.shape[1]
    state.begin(Block(0, start, start + 6, 6, False))
    with torch.no_grad(), sampling_attention(tested):
        for step in range(cache.delay_steps + 1):
            state.states(canvas, canvas == MASK, step, torch.ones(len(inputs), dtype=torch.long))
    return state


@pytest.mark.parametrize("score", ["dot", "softmax", "snapkv", "nearest", "random"])
@pytest.mark.parametrize("evict", ["all", "suffix"])
def test_what_is_kept(score, evict):
    inputs, mask = ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :5] = 0
    state = kept(SparseDLLM(keep_ratio=(0.7, 0.2), score=score, evict=evict), inputs, mask)
    for layer, tenths in zip(state.layers, (7, 2), strict=True):
        for row, (before, pads) in enumerate(((9, 0), (4, 5))):
            expected = before + tenths * 6 // 10 if evict == "suffix" else tenths * (before + 6) // 10
            real = layer.columns[row] if layer.real is None else layer.columns[row][layer.real[row]]
            columns = set(real.tolist())
            assert len(columns) == len(real) == expected
            assert not columns & set(range(9, 15)) and not columns & set(range(pads))
            if evict == "suffix":
                assert set(range(pads, 9)) <= columns
            if score == "nearest" and evict == "all" and tenths == 2:
                assert columns == ({7, 8, 15} if row == 0 else {8, 15})
    alone = kept(SparseDLLM(keep_ratio=(0.7, 0.2), score=score, evict=evict), inputs[1:, 5:], mask[1:, 5:])
    for together, single in zip(state.layers, alone.layers, strict=True):
        real = slice(None) if together.real is None else together.real[1]
        assert set((together.columns[1][real] - 5).tolist()) == set(single.columns[0].tolist())


def test_a_spike_keeps_its_neighbours_and_pooling_may_stop_at_the_seam():
    from types import SimpleNamespace

    from fathom.diffusion.sparse_dllm import SparseState

    scores = torch.tensor([[0.0, 0, 0, 9, 0, 0, 0, 0]])
    for seam, width, expected in ((True, 3, {2, 3, 4}), (False, 3, {2, 3}), (True, None, {3}), (True, 1, {3})):
        state = SparseState(SparseDLLM(kernel_size=width, pool_across_seam=seam), SimpleNamespace())
        state.before = 4
        assert set((state.pool(scores)[0] == 9).nonzero().flatten().tolist()) == expected
    with pytest.raises(ValueError, match="sparse_dllm option kernel_size=4: must be odd, or None for no pooling"):
        SparseDLLM(kernel_size=4)
    assert SparseDLLM(keep_ratio=0.7).ratio(0, 1) * 90 == 63


# ---------------------------------------------------------------- equalities between methods


def same_samples(tested, first, second, policy="low_confidence", rows: int = 2, **options):
    outs = [
        tested.generate(
            ids(rows, 7), policy=policy, block_cache=cache, temperature=1.0, seed=4, **{**SHAPE, **options},
            return_dict_in_generate=True,
        )
        for cache in (first, second)
    ]  # fmt: skip
    same = torch.equal(outs[0].sequences, outs[1].sequences) and torch.equal(outs[0].revealed, outs[1].revealed)
    return same and torch.allclose(outs[0].confidence, outs[1].confidence, rtol=1e-5, atol=1e-7)


@both_shifts
def test_equalities_of_caches(shift):
    tested = model(shift=shift)
    assert same_samples(tested, None, Dual(refresh=1))
    assert same_samples(tested, None, Prefix(refresh=1))
    whole = SparseDLLM(keep_ratio=1.0, first_step="extra_query")
    assert same_samples(tested, whole, Dual(delay_steps=1))
    assert same_samples(tested, dataclasses.replace(whole, delay_steps=0), Dual())
    assert same_samples(tested, None, whole, steps=4)  # s = 2: full passes alone
    assert same_samples(tested, SparseDLLM(kernel_size=1, first_step="extra_query"),
                        SparseDLLM(kernel_size=None, first_step="extra_query"))  # fmt: skip
    assert same_samples(tested, None, SparseDLLM(keep_ratio=0.0, first_step="extra_query"), max_new_tokens=6, steps=2)
    one = model(shift=shift, num_hidden_layers=1)  # its keys and values depend on their own token alone
    assert same_samples(one, None, Dual()) and same_samples(one, None, whole)
    assert not same_samples(tested, None, Dual()) and not same_samples(tested, None, Prefix())  # else this says little


def test_dllm_cache_without_reuse_is_no_cache_and_says_what_it_cannot_take_apart():
    whole = run(model(), ids(2, 5), ("low_confidence", {}), ("none", {}))
    for options in ({"prompt_interval": 1, "response_interval": 1}, {"prompt_interval": 1, "ratio": 1.0}):
        out = run(model(), ids(2, 5), ("low_confidence", {}), ("dllm_cache", options))
        assert torch.equal(out.sequences, whole.sequences) and torch.equal(out.revealed, whole.revealed)
    reused = run(model(), ids(2, 5), ("low_confidence", {}), ("dllm_cache", {"ratio": 0.25}))
    assert reused.columns < whole.columns and reused.cache_bytes > 0
    assert all("forward" not in module.__dict__ for module in model().modules())
    with pytest.raises(ValueError, match="mixer='depth_attention'"):
        run(model(mixer={"name": "depth_attention"}), ids(1, 5), ("entropy", {}), ("dllm_cache", {}))


def test_block_only_attention_of_one_block_without_a_prompt():
    tested = model()
    out = tested.generate(ids(2, 0), block_cache=SparseDLLM(), max_new_tokens=6, block_length=6, steps=6)
    assert torch.equal(out, tested.generate(ids(2, 0), max_new_tokens=6, block_length=6, steps=6))


def test_fourier_without_weight_is_low_confidence_and_costs_no_pass():
    tested = model()
    weightless = ("fourier_sampler", {"beta_min": 0.0, "beta_max": 0.0})
    outs = [
        run(tested, ids(2, 5), policy, ("none", {}), seed=[1, 2]) for policy in (weightless, ("low_confidence", {}))
    ]
    assert torch.equal(outs[0].sequences, outs[1].sequences) and outs[0].nfe == outs[1].nfe
    assert torch.equal(outs[0].revealed, outs[1].revealed)
    one = [
        run(tested, ids(1, 5), ("fourier_sampler", {"history": history}), ("none", {}))
        for history in ("per_row", "global")
    ]
    assert torch.equal(one[0].revealed, one[1].revealed)
    gated = run(tested, ids(2, 5), ("fourier_sampler", {"gate": 0.2}), ("none", {}))
    assert not (gated.sequences == MASK).any()


# ---------------------------------------------------------------- Fourier's numbers


def test_band_scores_of_a_worked_example():
    from fathom.diffusion import fourier
    from fathom.diffusion.fourier import band

    def band_score(hidden, first, width):
        place = torch.arange(hidden.shape[1] // 2 + 1)
        return fourier.band_score(hidden, (place >= first) & (place < first + width))

    places = torch.arange(8, dtype=torch.float64)
    signal = torch.stack([places, torch.cos(2 * torch.pi * 3 * places / 8)], 1)[None]
    expected = {
        (0.4, 0): [0.17868, 0.03371, 0.03371, 0.17868, 0.57894, 1, 1, 0.57894],
        (0.4, 1): [0.34315, 1, 0.17157, 0, 0, 0.17157, 1, 0.34315],
        (0.4, 2): [1, 0.41101, 0.00226, 0.23077, 0.38462, 0.15611, 0.25717, 0.84615],
        (1, 0): [0.0202, 0.0303, 0.08081, 0.19192, 0.34343, 0.51515, 0.72727, 1],
        (1, 2): [0.0202, 0.0303, 0.08081, 0.19192, 0.34343, 0.51515, 0.72727, 1],
    }
    for (rho, step), values in expected.items():
        _, first, width = band(8, rho, step, 3)
        found = band_score(signal, first, width)[0]
        torch.testing.assert_close(found, torch.tensor(values, dtype=torch.float64), rtol=0, atol=6e-6)
    for length in (5, 8):  # odd and even
        h = torch.randn(2, length, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        bins, first, width = band(length, 0.4, 1, 4)
        phi = band_score(h, first, width)
        torch.testing.assert_close(band_score(7 * h, first, width), phi, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(band_score(h.roll(2, 1), first, width), phi.roll(2, 1), rtol=1e-9, atol=1e-12)
        assert phi.min() >= 0 and abs(phi.max() - 1) < 1e-6
        square = h.square().sum(-1)
        torch.testing.assert_close(band_score(h, 0, bins), square / square.amax(1, keepdim=True), rtol=1e-5, atol=1e-9)
    starts = [band(64, 0.4, step, 64)[1] for step in range(64)]
    assert band(64, 0.4, 0, 64) == (33, 0, 13) and band(64, 0.2, 0, 64)[2] == 6 and starts == sorted(starts)
    assert starts[-1] == 20 and band(4, 0.4, 0, 4)[2] == 1 and band(8, 0.4, 0, 1)[1] == 3


def test_weights_of_a_worked_history():
    from fathom.diffusion.fourier import calibrate

    def beta(history, value):
        return float(calibrate(history, torch.tensor([value], dtype=torch.float64), 0.4, 0.6))

    def empty():
        return torch.full((1, 20), torch.nan, dtype=torch.float64)

    history = empty()
    assert beta(history, 1.0) == pytest.approx(0.59973, abs=5e-6)
    for value in range(2, 20):
        beta(history, float(value))
    assert beta(history, 99.0) == pytest.approx(0.40069, abs=5e-6)
    short = empty()
    beta(short, 1.0), beta(short, 3.0)
    assert beta(short, 2.0) == pytest.approx(0.56827, abs=5e-6)
    full = history.clone()
    assert beta(history, float("nan")) == 0.6 and torch.equal(history, full) and not full.isnan().any()
    for value in range(30):
        assert 0.4 <= beta(history, value**0.5) <= 0.6
    assert history[0].tolist() == [value**0.5 for value in range(10, 30)]

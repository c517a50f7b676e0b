"""The Triton step of a full slot cache against the PyTorch form and a float64 loop (CUDA, or Triton's interpreter)."""

from __future__ import annotations

import copy
import os
from importlib.util import find_spec

import pytest
import torch
from cache_cases import SMALL, VOCABULARY, get_model, make, new_state, relative

from fathom.caches import H2O, TOVA, StreamingLLM, TreeKV, WeightedKV, compress, prefill
from fathom.caches import token_budget as slots
from fathom.caches.rope import SlotRope
from fathom.caches.versions import CACHE_NAME
from fathom.ops import kernels

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs the package triton and a GPU (or TRITON_INTERPRET=1)",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 16


class Rotary(torch.nn.Module):
    def forward(self, x, position_ids):
        frequency = 100.0 ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64, device=x.device) / WIDTH)
        angle = position_ids[..., None].double() * frequency
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


TREE = {"budget": 24, "n_sink": 2, "n_recent": 9, "block": 2}
OTHER = {"budget": 24, "n_sink": 2, "n_recent": 9}
METHODS = {
    "treekv": TreeKV(**TREE),
    "treekv sum max": TreeKV(**TREE, score="sum", group_reduce="max"),
    "treekv last": TreeKV(**TREE, score="last", stride=2),
    "treekv none": TreeKV(**TREE, score="none"),
    "treekv layer sum": TreeKV(**TREE, granularity="layer", group_reduce="sum"),
    "treekv one slot": TreeKV(budget=24, n_sink=14, n_recent=9, stride=2, prefill="chunked"),
    "treekv without a tree": TreeKV(budget=24, n_sink=2, n_recent=22),
    "treekv original": TreeKV(**TREE, positions="original"),
    "treekv long": TreeKV(budget=300, n_sink=4, n_recent=100, prefill="chunked"),
    "weightedkv": WeightedKV(**OTHER),
    "weightedkv drop": WeightedKV(**OTHER, merge=False),
    "weightedkv layer": WeightedKV(**OTHER, granularity="layer"),
    "weightedkv newest": WeightedKV(budget=24, n_sink=0, n_recent=0, positions="original"),
    "weightedkv long": WeightedKV(budget=700, n_sink=4, n_recent=10),
    "h2o": H2O(budget=24, n_recent=7),
    "h2o layer": H2O(budget=24, n_recent=0, granularity="layer", group_reduce="max"),
    "tova": TOVA(budget=24),
    "tova by head": TOVA(budget=24, n_sink=3, granularity="kv_head"),
    "streaming_llm": StreamingLLM(budget=24, n_sink=3),
}
HELD = ("key", "value", "received", "queries", "pointer")


def stream(tokens, heads, groups, seed=0):
    """Queries that repeat a few directions, so that weights are far from uniform and scores do not tie."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, n, tokens, WIDTH, generator=generator) for n in (heads, groups, groups))
    return 1.5 * query, key, value


def run(method, parts, monkeypatch, kernel, dtype=torch.float32, device=DEVICE):
    """Outputs of a prompt and single steps, and the state. Counts how often the kernel served."""
    served = []
    decode = slots.SlotState.decode

    def counted(*args):
        output = decode(*args)
        served.append(output is not None)
        return output

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "TRITON", kernel)
        patch.setattr(slots.SlotState, "decode", counted)
        state = new_state(method, SlotRope(Rotary()) if method.pre_rope else None)
        outputs = [state.attend(*(x.to(device, dtype) for x in part), WIDTH**-0.5) for part in parts]
    return torch.cat(outputs, 2), state, served


CASES = [(name, 4, 2) for name in METHODS] + [(name, 3, 1) for name in ("treekv", "weightedkv")] + [("h2o", 2, 2)]


@pytest.mark.parametrize("name,heads,groups", CASES)
def test_steps_equal_the_pytorch_form(name, heads, groups, monkeypatch):
    """In fp32, step by step: outputs, what is held, where the pointer stands, and that memory stays where it is."""
    method = METHODS[name]
    steps = 20 if method.budget < 100 else 3  # more than one sweep, and every step of it
    whole = stream(method.budget + 7 + steps, heads, groups)
    cuts = [method.budget + 5, 2] + [1] * steps  # after a sweep by blocks two tokens may be missing
    parts = list(zip(*(x.split(cuts, 2) for x in whole)))
    expected, reference, none = run(method, parts, monkeypatch, kernel=False, device="cpu")
    found, state, served = run(method, parts, monkeypatch, kernel=True)
    assert not any(none) and all(served) and len(served) >= steps
    assert relative(found.cpu(), expected) < 1e-5
    assert state.seen == reference.seen and state.stored == reference.stored
    for held in HELD:
        right = getattr(reference, held, None)
        if right is None:
            assert getattr(state, held, None) is None
        elif right.is_floating_point():
            assert relative(getattr(state, held).cpu(), right) < 1e-5, held
        else:
            assert torch.equal(getattr(state, held).cpu(), right), held


def rotate64(x, position):
    half = WIDTH // 2
    frequency = 100.0 ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    c, s = (position * frequency).cos(), (position * frequency).sin()
    return torch.cat((x[:half] * c - x[half:] * s, x[half:] * c + x[:half] * s))


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("slots_held", [1, 15, 63, 64, 130])
def test_one_step_equals_a_loop(slots_held, dtype, limit):
    """Output, weights, choice, merge and shift of one step, head by head in float64, around the edges of blocks."""
    from fathom.ops.slot_decode import slot_decode

    heads, groups, batch = 4, 2, 2
    generator = torch.Generator().manual_seed(slots_held)
    q, fresh_k, fresh_v = (torch.randn(batch, n, 1, WIDTH, generator=generator) for n in (heads, groups, groups))
    k, v = (torch.randn(batch, groups, slots_held, WIDTH, generator=generator) for _ in range(2))
    received = torch.rand(batch, groups, slots_held, generator=generator)
    queries = torch.randint(1, 9, (batch, groups, slots_held), generator=generator, dtype=torch.int32)
    q, fresh_k, fresh_v, k, v = (x.to(DEVICE, dtype) for x in (q, fresh_k, fresh_v, k, v))
    table = SlotRope(Rotary()).table(slots_held + 1, q)
    held = [x.clone().to(DEVICE) for x in (k, v, received, queries)]
    first = min(2, slots_held - 1)
    output = slot_decode(
        *(q, fresh_k, fresh_v, held[0], held[1], table, 0.3, held[2], held[3], None),
        *(first, slots_held - first),
        reduce="mean",
        accumulate=True,
        average=True,
        merge=True,
    )
    assert output.dtype == dtype
    wide_q, wide_k, wide_v, new_k, new_v = (x.double().cpu() for x in (q, k, v, fresh_k, fresh_v))
    for b in range(batch):
        for g in range(groups):
            keys, values = torch.cat((wide_k[b, g], new_k[b, g])), torch.cat((wide_v[b, g], new_v[b, g]))
            turned = torch.stack([rotate64(x, s) for s, x in enumerate(keys)])
            pooled = torch.zeros(slots_held + 1, dtype=torch.float64)
            for h in (2 * g, 2 * g + 1):
                weights = (0.3 * turned @ rotate64(wide_q[b, h, 0], slots_held)).softmax(0)
                assert relative(output[b, h, 0].double().cpu(), weights @ values) < limit
                pooled += weights / 2
            pooled[:-1] += received[b, g]
            counts = torch.cat((queries[b, g] + 1, torch.ones(1, dtype=torch.int32)))
            average = pooled / counts
            j = first + int(average[first:slots_held].argmin())
            share = average[j] / (average[j] + average[j + 1])
            values[j + 1] = share * values[j] + (1 - share) * values[j + 1]
            stay = [s for s in range(slots_held + 1) if s != j]
            for found, expected in zip(held, (keys, values, pooled, counts)):
                assert relative(found[b, g].double().cpu(), expected[stay].double()) < limit


def test_what_the_kernel_does_not_serve(monkeypatch):
    """Wide numbers, gradients and options that only `keep` knows take the PyTorch form."""
    parts = list(zip(*(x.split([30] + [1] * 3, 2) for x in stream(33, 4, 2))))
    for method in (WeightedKV(**OTHER, merge_stats="sum"), WeightedKV(**OTHER, merge_into_recent=False)):
        assert run(method, parts, monkeypatch, kernel=True)[2] == []
    assert run(METHODS["weightedkv"], parts, monkeypatch, kernel=True, dtype=torch.float64)[2] == [False] * 3
    parts = [tuple(x.requires_grad_() for x in part) for part in parts]
    assert run(METHODS["weightedkv"], parts, monkeypatch, kernel=True)[2] == [False] * 3


@torch.no_grad()
def logits_of_steps(model, method, ids, mask, tokens, warm):
    """Logits of single steps after a left-padded prompt; on CUDA the steps after `warm` are replays of one graph."""
    device = model.device
    with compress(model, method):
        cache = prefill(model, ids.to(device), attention_mask=mask.to(device))[CACHE_NAME]
        token, position = tokens[:, :1].clone().to(device), mask.sum(-1, keepdim=True).to(device)
        captured, logits = None, []

        def forward():
            return model(input_ids=token, position_ids=position, use_cache=True, **{CACHE_NAME: cache}).logits

        for step in range(tokens.shape[1]):
            token.copy_(tokens[:, step : step + 1])
            if device.type == "cuda" and step >= warm:
                if captured is None:
                    torch.cuda.synchronize()
                    captured = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(captured):
                        result = forward()
                captured.replay()
            else:
                result = forward()
            logits.append(result.float().cpu())
            position += 1
    return torch.stack(logits)


IN_MODELS = [(name, {}) for name in ("treekv", "weightedkv", "h2o", "tova", "streaming_llm")]
IN_MODELS += [(name, {"positions": "original"}) for name in ("treekv", "weightedkv")]
IN_MODELS += [(name, {"granularity": "layer"}) for name in ("treekv", "h2o")] + [("treekv", {"score": "none"})]


@pytest.mark.parametrize("name,options", IN_MODELS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_steps_of_a_model_equal_the_cpu(family, name, options, ids, monkeypatch):
    """Grouped heads and a left-padded row, in fp32; on CUDA as replays of a graph. In bf16, where rounding may choose
    another slot, only methods that choose without scores are compared: as near to fp32 as the PyTorch form."""
    method, cpu, prompt = make(name, SMALL, **options), get_model(family), ids[:, :24]
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0
    tokens = torch.randint(
        1, VOCABULARY, (2, 18 if DEVICE == "cuda" else 8), generator=torch.Generator().manual_seed(6)
    )
    monkeypatch.setattr(kernels, "TRITON", False)
    expected = logits_of_steps(cpu, method, prompt, mask, tokens, 4)
    monkeypatch.undo()
    served = []
    decode = slots.SlotState.decode
    monkeypatch.setattr(slots.SlotState, "decode", lambda *args: served.append(decode(*args)) or served[-1])
    found = logits_of_steps(copy.deepcopy(cpu).to(DEVICE), method, prompt, mask, tokens, 4)
    assert served and all(output is not None for output in served)
    assert relative(found, expected) < 1e-4
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    if name == "streaming_llm" or options.get("score") == "none":
        half = copy.deepcopy(cpu).to(torch.bfloat16)
        found = logits_of_steps(copy.deepcopy(half).to(DEVICE), method, prompt, mask, tokens, 4)
        monkeypatch.setattr(kernels, "TRITON", False)
        pytorch = logits_of_steps(half, method, prompt, mask, tokens, 4)
        assert relative(found, expected) < 1.5 * relative(pytorch, expected)  # the error that the model has in bf16

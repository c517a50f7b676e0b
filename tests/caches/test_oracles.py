"""Each method against a plain reference: one head and one token at a time, float64, from the papers' equations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.fft
import torch
from cache_cases import new_state, relative

from fathom.caches import (
    H2O,
    KIVI,
    TOVA,
    FreqKV,
    PyramidKV,
    Scored,
    SnapKV,
    StreamingLLM,
    TreeKV,
    WeightedKV,
    cache_shape,
    compress,
    prefill,
)
from fathom.caches.base import CacheShape
from fathom.caches.rope import SlotRope
from fathom.caches.token_budget import keep_highest
from fathom.caches.versions import CACHE_NAME
from fathom.ops import cached_attention
from fathom.ops.tree_sweep import tree_sweep

HEADS, GROUPS, WIDTH, TOKENS = 4, 2, 8, 60


class Rotary(torch.nn.Module):
    """Stand-in for a model's rotary module."""

    def forward(self, x, position_ids):
        frequency = 100.0 ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
        angle = position_ids[..., None].double() * frequency
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def turn(x: np.ndarray, position: int) -> np.ndarray:
    """Rotation of one vector, as complex numbers."""
    frequency = 100.0 ** -(np.arange(0, WIDTH, 2) / WIDTH)
    z = (x[: WIDTH // 2] + 1j * x[WIDTH // 2 :]) * np.exp(1j * position * frequency)
    return np.concatenate((z.real, z.imag))


@pytest.fixture
def stream():
    generator = torch.Generator().manual_seed(3)
    shape = lambda heads: torch.randn(1, heads, TOKENS, WIDTH, generator=generator, dtype=torch.float64)  # noqa: E731
    return 1.5 * shape(HEADS), shape(GROUPS), shape(GROUPS)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


class Slot:
    def __init__(self, key, value):
        self.key, self.value, self.received, self.queries = key, value, 0.0, 0


def reference(stream, evict, budget, slot_positions=True):
    """Tokens one by one; `evict(slots, weights, group, all_weights)` changes the list of a group in place."""
    query, key, value = (t[0].numpy() for t in stream)
    caches = [[] for _ in range(GROUPS)]
    outputs = np.zeros((HEADS, TOKENS, WIDTH))
    per_group = HEADS // GROUPS
    for t in range(TOKENS):
        last = []
        for group, slots in enumerate(caches):
            slots.append(Slot(key[group, t], value[group, t]))
            slots[-1].position = t
            average = np.zeros(len(slots))
            for head in range(group * per_group, (group + 1) * per_group):
                n = len(slots)
                q = turn(query[head, t], n - 1 if slot_positions else t)
                places = range(n) if slot_positions else [slot.position for slot in slots]
                scores = np.array([q @ turn(slot.key, p) for slot, p in zip(slots, places)]) / math.sqrt(WIDTH)
                weights = softmax(scores)
                outputs[head, t] = sum(w * slot.value for w, slot in zip(weights, slots))
                average += weights / per_group
            for slot, w in zip(slots, average):
                slot.received += w
                slot.queries += 1
            last.append(average)
        pooled = np.mean(last, axis=0)
        for group, slots in enumerate(caches):
            if len(slots) > budget:
                evict(slots, last[group], group, pooled)
    return outputs, caches


def run(method, stream, chunks=None, dtype=torch.float64):
    state = new_state(method, SlotRope(Rotary()) if method.pre_rope else None)
    query, key, value = (t.to(dtype) for t in stream)
    step = chunks or [1] * TOKENS
    parts = zip(query.split(step, 2), key.split(step, 2), value.split(step, 2))
    return torch.cat([state.attend(q, k, v, WIDTH**-0.5) for q, k, v in parts], 2)[0].numpy(), state


def check(method, stream, evict, budget):
    expected, caches = reference(stream, evict, budget)
    got, state = run(method, stream)
    assert np.abs(got - expected).max() < 1e-12 * np.abs(expected).max() * 100
    for group, slots in enumerate(caches):
        np.testing.assert_allclose(state.key[0, group].numpy(), [slot.key for slot in slots], atol=1e-12)
        np.testing.assert_allclose(state.value[0, group].numpy(), [slot.value for slot in slots], atol=1e-12)
    return state, caches


def test_streaming_llm(stream):
    check(StreamingLLM(budget=12, n_sink=3), stream, lambda slots, *_: slots.pop(3), 12)


def test_streaming_llm_evicting_before_equals_after_with_one_recent_less(stream):
    after, _ = run(StreamingLLM(budget=12, n_sink=3), stream)
    before, state = run(StreamingLLM(budget=13, n_sink=3, evict="before", chunk=1), stream)
    assert np.abs(after - before).max() < 1e-12
    assert state.stored == 13


def test_h2o(stream):
    def evict(slots, *_):
        slots.pop(int(np.argmin([slot.received for slot in slots[: len(slots) - 5]])))

    check(H2O(budget=12, n_recent=5), stream, evict, 12)


def test_tova(stream):
    state, _ = check(
        TOVA(budget=12), stream, lambda slots, weights, group, pooled: slots.pop(int(np.argmin(pooled))), 12
    )
    assert state.stored == 12


@pytest.mark.parametrize("score", ["avg", "sum", "last", "none"])
@pytest.mark.parametrize("stride", [1, 2])
def test_treekv(stream, score, stride):
    sink, recent, budget = 2, 4, 13
    tree = budget - sink - recent
    pointers = [0] * GROUPS

    def evict(slots, weights, group, pooled):
        p = sink + pointers[group]
        value = {
            "avg": lambda i: slots[i].received / slots[i].queries,
            "sum": lambda i: slots[i].received,
            "last": lambda i: weights[i],
            "none": lambda i: -i,
        }[score]
        slots.pop(p + 1 if value(p) > value(p + 1) else p)
        pointers[group] = (pointers[group] + stride) % tree

    method = TreeKV(
        budget=budget, n_sink=sink, n_recent=recent, score=score, stride=stride, prefill="sequential", block=1
    )
    state, _ = check(method, stream, evict, budget)
    assert int(state.pointer) == pointers[0] == pointers[1]


@pytest.mark.parametrize("newest_leaves", [False, True])
@pytest.mark.parametrize("slots,capacity,pointer,stride", [(40, 9, 4, 1), (41, 9, 4, 2), (12, 11, 10, 2), (9, 1, 0, 1)])
def test_tree_sweep_is_one_eviction_at_a_time(slots, capacity, pointer, stride, newest_leaves):
    score = torch.randint(4, (2, 3, slots), generator=torch.Generator().manual_seed(0)).float()  # with ties
    found, end = tree_sweep(score, capacity, pointer, stride, newest_leaves)
    for row, kept in zip(score.flatten(0, 1).tolist(), found.flatten(0, 1).tolist()):
        held, p = list(range(slots)), pointer
        while len(held) > capacity:
            held.pop(p + 1 if newest_leaves or row[held[p]] > row[held[p + 1]] else p)
            p = (p + stride) % capacity
        assert held == kept and p == end


@pytest.mark.parametrize("excess", [1, 2, 13, 20])
@pytest.mark.parametrize("n_sink,n_recent", [(0, 0), (3, 0), (0, 4), (3, 7)])
def test_keep_highest_drops_the_lowest(n_sink, n_recent, excess):
    score = torch.randint(6, (2, 2, 30), generator=torch.Generator().manual_seed(1)).float()  # with ties
    found = keep_highest(score, excess, n_sink, n_recent)
    for row, kept in zip(score.flatten(0, 1).tolist(), found.flatten(0, 1).tolist()):
        gone = sorted(range(n_sink, 30 - n_recent), key=lambda s: (row[s], s))[:excess]
        assert kept == [s for s in range(30) if s not in gone]


def test_weightedkv(stream):
    sink, recent, budget = 2, 4, 13

    def evict(slots, *_):
        average = [slot.received / slot.queries for slot in slots]
        j = sink + int(np.argmin(average[sink : len(slots) - recent]))
        a, b = average[j], average[j + 1]
        slots[j + 1].value = (a * slots[j].value + b * slots[j + 1].value) / (a + b)
        slots.pop(j)

    state, caches = check(
        WeightedKV(budget=budget, n_sink=sink, n_recent=recent, prefill="exact"), stream, evict, budget
    )
    np.testing.assert_allclose(state.received[0, 1].numpy(), [slot.received for slot in caches[1]], atol=1e-12)
    assert state.queries[0, 1].tolist() == [slot.queries for slot in caches[1]]


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_weightedkv_options(stream, sums, right):
    sink, recent, budget = 2, 4, 13

    def evict(slots, *_):
        average = [slot.received / slot.queries for slot in slots]
        edge = len(slots) - recent
        j = sink + int(np.argmin(average[sink:edge]))
        to = j + 1 if right or j + 1 < edge else j - 1
        slots[to].value = (average[j] * slots[j].value + average[to] * slots[to].value) / (average[j] + average[to])
        if sums:
            slots[to].received += slots[j].received
            slots[to].queries += slots[j].queries
        slots.pop(j)

    method = WeightedKV(
        budget=budget,
        n_sink=sink,
        n_recent=recent,
        prefill="exact",
        merge_stats="sum" if sums else "keep",
        merge_into_recent=right,
    )
    check(method, stream, evict, budget)


def test_weightedkv_paper_toy():
    """Figure 3: four slots, given mean scores; values as combinations of the original ones."""
    means = {
        5: [0.3, 0.1, 0.5, 0.3, 0.5],
        6: [0.3, 0.4, 0.2, 0.3, 0.9],
        7: [0.3, 0.4, 0.2, 0.5, 0.7],
        8: [0.2, 0.4, 0.3, 0.4, 0.6],
    }
    state = new_state(WeightedKV(budget=4, n_sink=0, n_recent=0))
    value = torch.eye(8, dtype=torch.float64)[:4].view(1, 1, 4, 8)
    kept = [1, 2, 3, 4]
    for step, scores in means.items():
        value = torch.cat((value, torch.eye(8, dtype=torch.float64)[step - 1].view(1, 1, 1, 8)), dim=2)
        kept.append(step)
        queries = torch.ones(1, 1, 5, dtype=torch.int32)
        state.grown = {"received": torch.tensor([[scores]], dtype=torch.float64), "queries": queries}
        index, value = state.keep(value, 1, 1)
        value = value[:, :, index[0, 0]]
        kept = [kept[i] for i in index[0, 0].tolist()]
    assert kept == [3, 6, 7, 8]
    expected = torch.zeros(8, dtype=torch.float64)
    expected[[0, 1, 2]] = torch.tensor([1 / 3, 1 / 9, 5 / 9], dtype=torch.float64)
    torch.testing.assert_close(value[0, 0, 0], expected)
    assert torch.allclose(value.sum(-1), torch.ones(()).double())


def snap_reference(stream, cap, window, kernel):
    query, key, _value = (t[0].numpy() for t in stream)
    kept = []
    for group in range(GROUPS):
        score = np.zeros(TOKENS - window)
        for head in range(group * 2, group * 2 + 2):
            for t in range(TOKENS - window, TOKENS):
                weights = softmax(np.array([query[head, t] @ key[group, s] for s in range(t + 1)]) / math.sqrt(WIDTH))
                score += weights[: TOKENS - window] / 2
        half = kernel // 2
        pooled = [np.pad(score, half)[i : i + kernel].sum() / kernel for i in range(len(score))]
        best = sorted(np.argsort(-np.array(pooled), kind="stable")[: cap - window])
        kept.append(best + list(range(TOKENS - window, TOKENS)))
    return kept


def test_snapkv(stream):
    method = SnapKV(budget=20, n_recent=6)
    _, state = run(method, stream, [TOKENS])
    for group, kept in enumerate(snap_reference(stream, 20, 6, 5)):
        assert torch.equal(state.key[0, group], stream[1][0, group, kept])


def test_pyramidkv_budgets():
    """Layer budgets of the formula, and the mean."""
    method = PyramidKV(budget=128 + 32, n_recent=32, beta=20)
    shape = CacheShape(1, 1, 1, 1, 1, layers=8)
    kept = [method.layer_bytes(shape, 4096, 0, layer) // 2 for layer in range(8)]
    low = 128 // 20
    high = 256 - low
    assert kept == [high - layer * ((high - low) // 7) + 32 for layer in range(8)]
    assert abs(sum(kept) / 8 - 160) < 8
    assert [method.layer_bytes(shape, 159, 0, layer) // 2 for layer in range(8)] == [159] * 8
    assert [method.layer_bytes(shape, 255, 0, layer) // 2 for layer in range(8)] == [160] * 8


@pytest.mark.parametrize("n_sink,n_recent", [(0, 1), (0, 15), (4, 4), (3, 12), (0, 16), (15, 1)])
@pytest.mark.parametrize("prompt", [1, 14, 16, 17, 30, 58])
def test_pyramidkv_keeps_its_mean_beside_sinks_and_wide_windows(stream, n_sink, n_recent, prompt):
    """States hold the closed form, sinks and window in every layer, and `budget` on average; steps drop nothing."""
    method = PyramidKV(budget=16, n_sink=n_sink, n_recent=n_recent, beta=4)
    held = []
    for layer in range(3):
        state = new_state(method, index=layer)
        for span in (slice(0, prompt), slice(prompt, prompt + 1), slice(prompt + 1, prompt + 2)):
            state.attend(*(part[:, :, span] for part in stream), 0.3)
        held.append(state.stored - 2)
        shape = CacheShape(1, GROUPS, WIDTH, WIDTH, 8, layers=3)
        assert state.nbytes() == method.layer_bytes(shape, prompt, 2, layer)
    if prompt <= 16:
        assert held == [prompt] * 3
    else:
        assert min(held) >= n_sink + n_recent and abs(sum(held) / 3 - 16) < 1


@pytest.mark.parametrize("chunks", [[TOKENS], [1] * TOKENS, [7, 30, 1, 22]])
@pytest.mark.parametrize("ratio,recent", [(0.5, 0), (0.35, 3), (0.0, 2)])
def test_freqkv(stream, chunks, ratio, recent):
    """Every way of feeding the tokens equals the token-by-token procedure, with scipy's DCT."""
    capacity, sink = 17, 3
    middle = capacity - sink - recent
    length = math.floor(ratio * middle + 1e-9)
    query, key, value = (t[0].numpy() for t in stream)
    expected = np.zeros((HEADS, TOKENS, WIDTH))
    for head in range(HEADS):
        keys, values = np.zeros((0, WIDTH)), np.zeros((0, WIDTH))
        for t in range(TOKENS):
            if len(keys) == capacity:
                packed = []
                for x in (keys, values):
                    low = scipy.fft.dct(x[sink : sink + middle], axis=0, norm="ortho")[:length]
                    short = scipy.fft.idct(low, axis=0, norm="ortho") if length else low
                    packed.append(np.concatenate((x[:sink], math.sqrt(length / middle) * short, x[sink + middle :])))
                keys, values = packed
            keys = np.concatenate((keys, key[head // 2, t][None]))
            values = np.concatenate((values, value[head // 2, t][None]))
            q = turn(query[head, t], len(keys) - 1)
            weights = softmax(np.array([q @ turn(k, p) for p, k in enumerate(keys)]) / math.sqrt(WIDTH))
            expected[head, t] = weights @ values
    for transform in ("gemm", "fft"):
        method = FreqKV(budget=capacity, n_sink=sink, n_recent=recent, ratio=ratio, transform=transform)
        got, state = run(method, stream, chunks)
        assert np.abs(got - expected).max() < 1e-6, transform
        assert state.stored == method.slots(TOKENS) == len(keys)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_kivi(stream, bits):
    """Token by token: what every query sees, quantised with numpy."""
    group, residual = 4, 8
    query, key, value = (t[0].numpy() for t in stream)

    def rounded(x):
        low, step = x.min(), (x.max() - x.min()) / (2**bits - 1)
        return np.clip(np.round((x - low) / step), 0, 2**bits - 1) * step + low

    got, _ = run(KIVI(bits=bits, group=group, residual=residual), stream)
    for head in range(HEADS):
        for t in range(TOKENS):
            held = t  # tokens in the cache before this one
            keys, values = key[head // 2, : t + 1].copy(), value[head // 2, : t + 1].copy()
            for start in range(0, held // residual * residual, group):
                for channel in range(WIDTH):
                    keys[start : start + group, channel] = rounded(key[head // 2, start : start + group, channel])
            for token in range(max(0, held - residual)):
                for start in range(0, WIDTH, group):
                    values[token, start : start + group] = rounded(value[head // 2, token, start : start + group])
            weights = softmax(keys @ query[head, t] / math.sqrt(WIDTH))
            assert np.abs(got[head, t] - weights @ values).max() < 1e-6


@pytest.mark.parametrize("queries", [1, 20, 64, 90])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_blockwise_attention_is_attention(queries, dtype, tolerance, monkeypatch):
    """Blocks of several lengths, then the newest; short and long calls; in parts of a few queries at a time too."""
    generator = torch.Generator().manual_seed(0)
    random = lambda heads, n: torch.randn(2, heads, n, 8, generator=generator, dtype=dtype)  # noqa: E731
    query, key, value = random(4, queries), random(2, 200), random(2, 200)
    scores = torch.einsum("bghmd,bgnd->bghmn", query.unflatten(1, (2, 2)), key) * 0.4
    hidden = torch.arange(200) > torch.arange(200 - queries, 200)[:, None]
    expected = torch.einsum("bghmn,bgnd->bghmd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)
    cuts = [0, 7, 50, 100]
    blocks = lambda: [(key[:, :, a:b], value[:, :, a:b]) for a, b in itertools.pairwise(cuts)]  # noqa: E731
    for at_once in (2**25, 2 * 4 * 4096 * 13):
        monkeypatch.setattr(cached_attention, "SCORES_AT_ONCE", at_once)
        found = cached_attention.blockwise_attention(query, blocks, (key[:, :, 100:], value[:, :, 100:]), 0.4)
        assert relative(found, expected.flatten(1, 2)) < tolerance


@pytest.mark.parametrize("chunk", [200, 100, 20, 7])
def test_a_compression_ratio_is_of_the_whole_prompt(llama, chunk):
    """However it is read, in chunks or turns: half of 200 tokens, not half of the half that was left; and its bytes."""
    ids = torch.randint(1, 97, (2, 200), generator=torch.Generator().manual_seed(0))
    method = Scored(scorer="keydiff", compression_ratio=0.5, acts_on="prompt")
    with compress(llama, method):
        cache = prefill(llama, ids[:, :120], chunk_size=chunk)[CACHE_NAME]
        assert cache.layers[0].states[0].stored == 60
        cache = prefill(llama, ids[:, 120:], cache=cache, chunk_size=chunk)[CACHE_NAME]
        assert [layer.states[0].stored for layer in cache.layers] == [100] * 3
        assert cache.nbytes() == method.cache_bytes(cache_shape(llama, batch=2), 200)
        llama(ids[:, :1], **{CACHE_NAME: cache})  # decoding drops nothing, and a turn takes it into account
        assert cache.layers[0].states[0].stored == 101
        llama(ids[:, :3], **{CACHE_NAME: cache})
        assert cache.layers[0].states[0].stored == 102

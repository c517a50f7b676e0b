"""The kernels of range attention against softmax over a dense mask in float64, and finite differences of that."""

from __future__ import annotations

import dataclasses
import os
from importlib.util import find_spec

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fathom.ops import biased_attention
from fathom.ops.biased_attention import MASKED, ChannelBias, RangeBias, causal_ranges
from fathom.ops.token_blocks import TokenRanges, listed_blocks, readers_of, sees, token_ranges

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs the package triton and a GPU (or TRITON_INTERPRET=1)",
)
DEVICE = "cpu" if INTERPRETED else "cuda"
NOWHERE = 2**30


def segments(rows, length, shares, seed=0):
    """Token numbers of the queries (the last segment's, filled up with its last) and of each segment's keys."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.arange(rows * length, dtype=torch.int32)
    live, keys, query = torch.ones(len(order), dtype=torch.bool), [order], order
    for share in shares:
        live &= torch.rand(len(order), generator=generator) < share
        chosen = live.nonzero()[:, 0]
        filling = -len(chosen) % 16
        query = order[torch.cat((chosen, chosen[-1:].expand(filling)))]
        keys.append(torch.cat((order[chosen], torch.full((filling,), NOWHERE, dtype=torch.int32))))
    return query, keys, query // length * length


def dense(query, key, value, seen, scaling, bias=0):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    weights = (query @ key.mT * scaling + bias).masked_fill(~seen, -torch.inf).softmax(-1)
    return weights.nan_to_num(0) @ value  # of a query that sees nothing


def assert_near_dense(
    query, keys, first, heads, groups, width, dtype, limit, hidden=None, bias=None, listed=False, rows=None
):
    from fathom.ops.range_attention.kernel import range_attention, serves

    query, keys, first = query.to(DEVICE), [part.to(DEVICE) for part in keys], first.to(DEVICE)
    ranges, key = token_ranges(query, keys, first, 4), torch.cat(keys)
    seen = sees(query[None], key[None], first[None])[0].cpu()
    if hidden is not None:
        if hidden.start == 0:
            ranges.start[:, hidden], ranges.stop[:, hidden] = 0, 0
        else:  # as fillings of gathered steps have it
            ranges.start[:, hidden], ranges.stop[:, hidden] = NOWHERE, ranges.stop[:, hidden.start - 1, None]
        ranges = TokenRanges(ranges.start, ranges.stop, readers_of(ranges.start, ranges.stop, len(key)))
        seen[hidden] = False
    if listed:
        if rows is None:
            counts = torch.tensor([len(query)])
        else:
            counts = torch.bincount(first[ranges.start[0] < NOWHERE].unique(return_inverse=True)[1])
        blocks = listed_blocks(ranges.start, ranges.stop, heads // groups, counts.to(DEVICE))
        every = torch.cat([torch.arange(begin, begin + count) for begin, count in blocks.T.tolist()])
        assert torch.equal(every.sort().values, torch.arange(len(query)))
        mixed = torch.randperm(blocks.shape[1], generator=torch.Generator().manual_seed(0)).to(DEVICE)
        ranges = dataclasses.replace(ranges, blocks=blocks[:, mixed].contiguous())
    torch.manual_seed(1)
    q, grad = (torch.randn(1, len(query), heads, width).to(dtype).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(1, groups, len(key), width).to(dtype) for _ in range(2))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    if bias is not None:
        exact.append(bias.double().requires_grad_())
    expected = dense(*exact[:3], seen, 0.3, *exact[3:])
    wanted = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    given = [x.detach().to(DEVICE).requires_grad_() for x in (q, k, v)]
    if bias is not None:
        given.append(bias.to(DEVICE).requires_grad_())
    assert serves(width, heads // groups, dtype)
    output = range_attention(*given[:3], ranges, 0.3, *given[3:])
    found = [output, *torch.autograd.grad(output, given, grad.to(DEVICE))]
    for name, x, y in zip(("output", "query", "key", "value", "bias"), wanted, found):
        assert y.dtype == (torch.float32 if name == "bias" else dtype) and y.shape == x.shape
        error = (y.detach().double().cpu() - x.detach()).abs().max() / x.detach().abs().max()
        assert error < limit, (name, error.item())


@pytest.mark.parametrize("heads, groups, width", [(4, 2, 16), (2, 2, 32), (8, 1, 16), (4, 1, 128)])
@pytest.mark.parametrize("shares", [(), (0.7,), (0.6, 0.5)], ids=["all", "second", "third"])
def test_output_and_gradients_are_those_of_a_dense_mask(shares, heads, groups, width):
    rows, length = (3, 50) if width < 100 else (2, 35)
    assert_near_dense(*segments(rows, length, shares), heads, groups, width, torch.float32, 5e-6)


@pytest.mark.parametrize("heads, groups, width", [(4, 2, 16), (2, 2, 32), (8, 1, 16)])
@pytest.mark.parametrize("shares", [(), (0.7,), (0.6, 0.5)], ids=["all", "second", "third"])
@pytest.mark.parametrize("aligned", [False, True], ids=["across rows", "within rows"])
def test_blocks_of_queries_in_any_order(aligned, shares, heads, groups, width):
    rows = 3 if aligned else None
    given = *segments(3, 50, shares), heads, groups, width, torch.float32, 5e-6
    assert_near_dense(*given, listed=True, rows=rows)


def test_the_longest_blocks_come_first_and_hold_one_row_each():
    """Rows of 64, 40 and 66 tokens and three that see nothing, 16 to a block: 64 heads times queries."""
    lengths = torch.tensor([64, 40, 66])
    begin = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    stop = torch.cat((torch.arange(1, 171), torch.full((3,), 170)))[None].int()
    start = torch.cat((begin, torch.full((3,), NOWHERE)))[None].int()
    first, count = listed_blocks(start, stop, 4, lengths).tolist()
    known = [(168, 2), (48, 16), (152, 16), (32, 16), (136, 16), (96, 8), (16, 16), (80, 16), (120, 16)]
    assert list(zip(first, count))[:9] == known
    assert sorted(zip(first, count))[-3:] == [(168, 2), (170, 3), (172, 0)]
    plain, numbers = listed_blocks(start, stop, 4, torch.tensor([170])).tolist()
    assert sorted(zip(plain, numbers)) == [*((n, 16) for n in range(0, 160, 16)), (160, 10), (170, 3)]


@pytest.mark.parametrize("dtype, limit", [(torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("heads, groups, width", [(4, 1, 64), (2, 1, 128)])
@pytest.mark.parametrize("listed", [False, True], ids=["as they come", "listed"])
def test_16_bits(listed, dtype, limit, heads, groups, width):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter computes products of bfloat16 wrongly")
    assert_near_dense(*segments(3, 70, (0.6, 0.5)), heads, groups, width, dtype, limit, listed=listed)


def test_rows_of_one_token_and_of_none():
    """Rows whose tokens have all stopped, and rows of a single token."""
    query, keys, first = segments(40, 1, (0.4, 0.5))
    assert_near_dense(query, keys, first, 2, 1, 16, torch.float32, 5e-6)


def biased(keys, seed=0):
    """Biases of every size, the hidden (ops/biased_attention.py) and the large among them."""
    bias = -10 * torch.rand(keys, generator=torch.Generator().manual_seed(seed)).square()
    bias[::5], bias[1::11], bias[3::7] = 0, MASKED, 4
    return bias


@pytest.mark.parametrize("heads, groups, width", [(4, 2, 16), (2, 2, 32), (8, 1, 16), (4, 1, 128)])
@pytest.mark.parametrize("shares", [(), (0.6, 0.5)], ids=["all", "third"])
def test_a_bias_of_the_keys_and_its_gradient(shares, heads, groups, width):
    query, keys, first = segments(*((3, 70) if width < 100 else (2, 35)), shares)
    assert_near_dense(query, keys, first, heads, groups, width, torch.float32, 5e-6, bias=biased(sum(map(len, keys))))


@pytest.mark.parametrize("dtype, limit", [(torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
def test_a_bias_in_16_bits(dtype, limit):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter computes products of bfloat16 wrongly")
    query, keys, first = segments(2, 150, (0.6,))
    assert_near_dense(query, keys, first, 4, 1, 64, dtype, limit, bias=biased(sum(map(len, keys))))


@pytest.mark.parametrize("listed", [False, True], ids=["as they come", "listed"])
@pytest.mark.parametrize("rows, hidden", [(1, slice(0, 5)), (3, slice(-20, None)), (3, slice(-75, None))])
def test_queries_that_see_nothing_give_zero_and_no_gradient(rows, hidden, listed):
    query, keys, first = segments(rows, 60, (0.8,))
    assert_near_dense(query, keys, first, 4, 2, 16, torch.float32, 5e-6, hidden=hidden, listed=listed, rows=rows)


def rows_of_slots(rows, slots, heads, groups, width, dtype):
    """query, key, value and the output's gradient, as the decoder lays them out; the bias."""
    torch.manual_seed(2)
    counts = heads, groups, groups, heads
    tensors = (torch.randn(rows, slots, n, width).to(dtype).transpose(1, 2) for n in counts)
    return *tensors, torch.stack([biased(slots, row) for row in range(rows)])


@pytest.mark.parametrize("rows, slots", [(1, 1), (1, 37), (3, 1), (2, 64), (3, 45), (2, 130)])
@pytest.mark.parametrize("heads, groups", [(4, 2), (3, 3), (4, 1)])
def test_plain_causal_rows_with_a_bias(rows, slots, heads, groups):
    *given, grad, bias = rows_of_slots(rows, slots, heads, groups, 16, torch.float32)
    exact = [x.double().requires_grad_() for x in (*given, bias)]
    seen = torch.ones(slots, slots, dtype=torch.bool).tril()
    expected = dense(*exact[:3], seen, 0.3, exact[3][:, None, None])
    wanted = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    tensors = [x.to(DEVICE).requires_grad_() for x in (*given, bias)]
    mask = RangeBias(tensors[3], causal_ranges(rows, slots, torch.device(DEVICE)))
    output = biased_attention.range_biased_attention(*tensors[:3], mask, 0.3)
    assert output.transpose(1, 2).is_contiguous()  # as the projection behind it wants it
    for name, x, y in zip(("output", "query", "key", "value", "bias"), wanted,
                          [output, *torch.autograd.grad(output, tensors, grad.to(DEVICE))]):  # fmt: skip
        assert y.shape == x.shape
        error = (y.double().cpu() - x).abs().max() / x.abs().max().clamp(min=1)  # of one slot, zeros
        assert error < 5e-6, (name, error.item())


def test_nothing_is_copied_on_the_way_to_the_kernels(monkeypatch):
    *given, _, bias = rows_of_slots(2, 20, 4, 2, 16, torch.float16)
    met = []
    monkeypatch.setattr(biased_attention, "range_attention", lambda *tensors: met.extend(tensors) or tensors[0])
    mask = RangeBias(bias, causal_ranges(2, 20, torch.device("cpu")))
    biased_attention.range_biased_attention(*given, mask, 0.3)
    assert [x.data_ptr() for x in met[:3]] == [x.data_ptr() for x in given]


@pytest.mark.parametrize("dtype, heads, form", [
    (torch.float16, 4, "range"), (torch.float32, 4, "channel"), (torch.float16, 6, "channel"),
])  # fmt: skip
def test_channels_serve_what_the_kernels_do_not(monkeypatch, dtype, heads, form):
    """They do not take three heads of a key/value head; in 32 bits they are slower."""
    *given, _, bias = (x.to(DEVICE) for x in rows_of_slots(2, 50, heads, 2, 16, dtype))
    called = []
    range_form = biased_attention.range_biased_attention
    monkeypatch.setattr(biased_attention, "range_biased_attention", lambda *a: called.append(1) or range_form(*a))

    class Module(torch.nn.Module):
        num_key_value_groups, is_causal = heads // 2, True

    mask = RangeBias(bias, causal_ranges(2, 50, torch.device(DEVICE)))
    found, wanted = (
        biased_attention.biased_attention(sdpa_attention_forward, Module(), *given, mask, 0.3)[0]
        for mask in (mask, ChannelBias(bias))
    )
    assert bool(called) == (form == "range")
    torch.testing.assert_close(found, wanted, rtol=5e-3, atol=5e-3)


def test_tensors_of_one_width_and_dtype_are_asked_for():
    from fathom.ops.range_attention import range_attention

    *given, _, bias = (x.to(DEVICE) for x in rows_of_slots(1, 20, 2, 1, 32, torch.float32))
    query, key, value = given
    ranges = causal_ranges(1, 20, query.device)
    with pytest.raises(ValueError, match="32, 32 and 16 channels"):
        range_attention(query, key, value[..., :16], ranges, 0.3, bias.flatten())
    with pytest.raises(ValueError, match=r"torch\.float32, torch\.float16"):
        range_attention(query, key.half(), value, ranges, 0.3, bias.flatten())


@pytest.mark.parametrize(
    ("memory", "dtype", "widths"),
    [
        (65536, torch.float16, ()),
        (101376, torch.float16, (64, 128)),
        (101376, torch.float32, (64,)),
        (166912, torch.float16, (64, 128, 256)),
        (166912, torch.float32, (64, 128)),
        (232448, torch.float32, (64, 128, 256)),
    ],
)
def test_programs_that_do_not_fit_are_left_to_others(monkeypatch, memory, dtype, widths):
    """Turing, consumer Ampere and Ada, an A100 and an H200."""
    from fathom.ops.range_attention import kernel as range_attention

    monkeypatch.setattr(range_attention, "SHARED_MEMORY", memory)
    assert tuple(w for w in (64, 128, 256) if range_attention.serves(w, 4, dtype)) == widths


@pytest.mark.skipif(INTERPRETED, reason="compiled on a GPU only")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_what_is_around(dynamic, with_bias):
    from fathom.ops.range_attention.kernel import range_attention

    torch._dynamo.reset()
    query, keys, first = segments(4, 200, (0.6, 0.5))
    ranges = token_ranges(query.to(DEVICE), [part.to(DEVICE) for part in keys], first.to(DEVICE), 4)
    torch.manual_seed(0)
    q = torch.randn(1, len(query), 4, 64, device=DEVICE)
    k, v = (torch.randn(1, 2, sum(map(len, keys)), 64, device=DEVICE) for _ in range(2))
    bias = [biased(k.shape[2]).to(DEVICE)] if with_bias else []

    def around(q, k, v, *bias):
        bias = [3 * x.sin() for x in bias]
        return range_attention((2 * q).transpose(1, 2), k + 1, v, ranges, 0.2, *bias).transpose(1, 2).sin()

    found = []
    for function in (around, torch.compile(around, dynamic=dynamic, fullgraph=True)):
        tensors = [x.clone().requires_grad_() for x in (q, k, v, *bias)]
        output = function(*tensors)
        found.append([output.detach(), *torch.autograd.grad(output.square().sum(), tensors)])
    for x, y in zip(*found):
        torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(INTERPRETED, reason="compiled on a GPU only")
def test_compiled_rows_with_a_bias():
    torch._dynamo.reset()
    *given, _, bias = (x.to(DEVICE) for x in rows_of_slots(2, 200, 4, 2, 64, torch.bfloat16))

    def around(q, k, v, bias):
        mask = RangeBias(3 * bias.sin(), causal_ranges(2, 200, bias.device))
        return biased_attention.biased_attention(None, None, 2 * q, k + 1, v, mask, 0.2)[0].sin()

    found = []
    for function in (around, torch.compile(around, fullgraph=True)):
        tensors = [x.clone().requires_grad_() for x in (*given, bias)]
        output = function(*tensors)
        found.append([output.detach(), *torch.autograd.grad(output.square().sum(), tensors)])
    for x, y in zip(*found):
        assert (x - y).abs().max() < 2e-2 * x.abs().max()

"""The forms of attention with a bias per key against softmax written out query by query."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from checked import check

from fathom.ops import biased_attention as ops
from fathom.ops.biased_attention import MASKED, ChannelBias, FlexBias
from fathom.ops.eager_attention import eager_attention
from fathom.ops.visibility import CAUSAL
from tiny import assert_close

dense_mask, append_bias_channels = check(ops.dense_mask), check(ops.append_bias_channels)

BATCH, HEADS, GROUPS, WIDTH = 2, 4, 2, 12
SCALING = WIDTH**-0.5
SHAPES = ((1, 1), (1, 7), (5, 5), (5, 12), (140, 140), (3, 300))


@dataclasses.dataclass(frozen=True)
class Stages:
    """Slots stage by stage: a query sees earlier tokens at its own and earlier stages."""

    tokens: int

    def __call__(self, query, key):
        return (key % self.tokens <= query % self.tokens) & (key // self.tokens <= query // self.tokens)


def inputs(queries, keys, dtype=torch.float64, width=WIDTH):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    bias = -3 * normal(BATCH, keys).abs().to(torch.promote_types(dtype, torch.float32))
    return (
        normal(BATCH, HEADS, queries, width),
        normal(BATCH, GROUPS, keys, width),
        normal(BATCH, GROUPS, keys, width),
        bias,
    )


def oracle(query, key, value, bias, sees=CAUSAL):
    """[B, S, H, D]; weights exp(score)·exp(bias) of the seen keys, summed in a loop."""
    queries, keys = query.shape[2], key.shape[2]
    out = torch.empty(BATCH, queries, HEADS, WIDTH, dtype=query.dtype)
    for b in range(BATCH):
        for i in range(queries):
            at = torch.tensor(keys - queries + i)
            seen = [s for s in range(keys) if sees(at, torch.tensor(s))]
            for h in range(HEADS):
                scores = key[b, h // (HEADS // GROUPS), seen] @ query[b, h, i] / math.sqrt(WIDTH)
                weights = scores.exp() * bias[b, seen].to(query.dtype).exp()
                out[b, i, h] = (weights / weights.sum()) @ value[b, h // (HEADS // GROUPS), seen]
    return out


def by_dense(query, key, value, bias, sees=CAUSAL):
    queries, keys = query.shape[2], key.shape[2]
    index = torch.arange(keys, device=query.device)
    mask = dense_mask(bias, sees(index[keys - queries :, None], index)[None], query.dtype)
    return eager_attention(torch.nn.Module(), query, key, value, mask, query.shape[-1] ** -0.5)[0]


def by_flex(query, key, value, bias, sees=CAUSAL):
    blocks = ops.block_mask(sees, query.shape[2], key.shape[2], query.device)
    return ops.biased_attention(None, None, query, key, value, FlexBias(bias, blocks), query.shape[-1] ** -0.5)[0]


def causal_kernel(module, query, key, value, mask, scaling, dropout=0.0):
    """SDPA's own causal flag, as a flash kernel would see it."""
    assert mask is None and key.shape[-1] == query.shape[-1] and value.shape[-1] % 8 == 0
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    is_causal = query.shape[2] > 1
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scaling)
    return out.transpose(1, 2), None


def by_channel(query, key, value, bias):
    return ops.biased_attention(causal_kernel, None, query, key, value, ChannelBias(bias), query.shape[-1] ** -0.5)[0]


@pytest.mark.parametrize(("queries", "keys"), SHAPES)
@pytest.mark.parametrize("form", [by_dense, by_flex, by_channel])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@torch.no_grad()
def test_forms_equal_the_equation(form, queries, keys, dtype, tolerance):
    if form is by_channel and queries not in (1, keys):
        pytest.skip("SDPA's causal flag aligns the first query with the first key")
    tensors = inputs(queries, keys, dtype)
    assert_close(form(*tensors), oracle(*tensors), tolerance)


@pytest.mark.parametrize("form", [by_dense, by_flex])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (4, 8), (4, 12), (12, 12)])
@torch.no_grad()
def test_a_visibility_of_its_own(form, queries, keys):
    tensors = inputs(queries, keys)
    assert_close(form(*tensors, Stages(4)), oracle(*tensors, Stages(4)), 1e-12)


@pytest.mark.parametrize("form", [by_dense, by_flex, by_channel])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_masked_key_is_as_good_as_absent(form, dtype):
    """Also in half precision, where −4000/scaling must stay finite."""
    query, key, value, bias = inputs(1, 6, dtype)
    bias[:, 2] = MASKED
    kept = [0, 1, 3, 4, 5]
    expected = form(query, key[:, :, kept], value[:, :, kept], bias[:, kept])
    assert_close(form(query, key, value, bias), expected, 1e-2 if dtype.itemsize == 2 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_channels_carry_the_bias_in_half_precision(dtype):
    """Three terms: a logit is within 1e-3 of the exact bias, down to log 1e-30; one term alone would be off by more."""
    bias = torch.linspace(-69.1, 0, 500)[None].expand(BATCH, -1)
    query, key, value, _ = inputs(1, 500, dtype)
    for scaling in (1 / 8, 1 / 16):
        q, k, _ = append_bias_channels(torch.zeros_like(query), torch.zeros_like(key), value, bias, scaling)
        logits = (q[:, :1].double() @ k[:, :1].double().transpose(2, 3) * scaling)[:, 0, 0]
        assert (logits - bias).abs().max() < 1e-3
        assert ((bias / scaling).to(dtype).double() * scaling - bias).abs().max() > 1e-3


def backward(out):
    """The gradient of a sum with weights that vary over the outputs."""
    weights = torch.arange(out.numel(), device=out.device, dtype=torch.float64).view_as(out).sin()
    (out * weights.to(out.dtype)).sum().backward()


def results(form, tensors):
    tensors = [x.clone().requires_grad_() for x in tensors]
    out = form(*tensors)
    backward(out)
    return [out.detach(), *(x.grad for x in tensors)]


@pytest.mark.parametrize("form", [by_dense, by_channel])
def test_gradients_equal_the_oracles(form):
    for actual, expected in zip(results(form, inputs(5, 5)), results(oracle, inputs(5, 5))):
        assert_close(actual, expected, 1e-10)


@pytest.mark.parametrize("width", [7, 12, 64])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_the_channel_form_equals_the_dense_form_in_float64(width, dtype, tolerance):
    tensors = inputs(40, 40, width=width)
    given = [*(x.to(dtype) for x in tensors[:3]), tensors[3].to(torch.promote_types(dtype, torch.float32))]
    for actual, expected in zip(results(by_channel, given), results(by_dense, tensors)):
        assert_close(actual.double(), expected, tolerance)


# bias, and what the keys with the lowest bias are multiplied by, so that they would take all of an unbiased softmax
ADVERSARIAL = {
    "all tiny": (torch.full((40,), -69.0), 1),
    "spread over log 1e-30": (torch.linspace(-69.0, 0, 40), 1),
    "large scores of tiny weights": (torch.linspace(-69.0, 0, 40).flip(0), 60),
    "large scores of hidden keys": (torch.tensor([0.0, MASKED, -3.0, -69.0]).repeat(10), 300),
}


@pytest.mark.parametrize(("bias", "factor"), ADVERSARIAL.values(), ids=ADVERSARIAL)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_the_channel_form_bears_extreme_weights_and_scores(bias, factor, dtype, tolerance):
    query, key, value, _ = inputs(40, 40)
    key = torch.where((bias == bias.min())[:, None], factor * key, key)
    tensors = query, key, value, bias.double().expand(BATCH, -1)
    given = [*(x.to(dtype) for x in tensors[:3]), tensors[3].to(torch.promote_types(dtype, torch.float32))]
    for actual, expected in zip(results(by_channel, given), results(by_dense, tensors)):
        assert_close(actual.double(), expected, tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_queries_that_see_hidden_keys_only_harm_no_others(dtype):
    """As left padding makes them."""
    *tensors, bias = inputs(9, 9, dtype)
    bias[:, :4] = MASKED
    alone = results(by_channel, [*(x[:, :, 4:] for x in tensors), bias[:, 4:]])
    tensors = [x.requires_grad_() for x in (*tensors, bias)]
    out = by_channel(*tensors)
    assert out.isfinite().all()
    backward(out[:, 4:])
    for actual, expected in zip([out[:, 4:], *(x.grad[:, :, 4:] for x in tensors[:3]), bias.grad[:, 4:]], alone):
        assert_close(actual, expected, 3e-2 if dtype.itemsize == 2 else 1e-6)
    assert all((x.grad[:, :, :4] == 0).all() for x in tensors[:3]) and (bias.grad[:, :4] == 0).all()
    for x in tensors:
        x.grad = None
    backward(by_channel(*tensors))
    assert all(x.grad.isfinite().all() for x in tensors)


@torch.no_grad()
def test_errors_in_bfloat16_beside_those_without_a_bias():
    def error(form, bias):
        query, key, value, _ = inputs(200, 200, torch.bfloat16, width=64)
        exact = by_dense(query.double(), key.double(), value.double(), bias.double())
        return (form(query, key, value, bias).double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()

    bias = inputs(200, 200)[3].float()
    plain = error(lambda query, key, value, bias: causal_kernel(None, query, key, value, None, 1 / 8)[0], 0 * bias)
    assert error(by_channel, bias) < 1.2 * plain


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has a backward on a GPU only")
@pytest.mark.parametrize("form", [by_flex, by_channel])
@pytest.mark.parametrize(("queries", "keys"), [(140, 140), (256, 640)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_gpu_kernels_equal_the_dense_form_in_float64(form, queries, keys, dtype, tolerance):
    if form is by_channel and queries != keys:
        pytest.skip("SDPA's causal flag aligns the first query with the first key")
    both = []
    for function, kind in ((form, dtype), (by_dense, torch.float64)):
        *tensors, bias = inputs(queries, keys, width=64)
        bias = bias.to("cuda", torch.promote_types(kind, torch.float32))
        both.append(results(function, [*(x.to("cuda", kind) for x in tensors), bias]))
    for actual, expected in zip(*both):
        assert_close(actual.double(), expected, tolerance)


def test_block_masks_are_made_once_a_shape():
    cpu = torch.device("cpu")
    first = ops.block_mask(Stages(5), 5, 10, cpu)
    assert ops.block_mask(Stages(5), 5, 10, cpu) is first
    assert ops.block_mask(Stages(10), 5, 10, cpu) is not first
    assert ops.block_mask(Stages(5), 10, 10, cpu) is not first


@torch.no_grad()
def test_flex_keeps_documents_apart():
    query, key, value, bias = inputs(6, 6)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]])
    blocks = ops.block_mask(CAUSAL, 6, 6, query.device)
    actual = ops.flex_biased_attention(query, key, value, FlexBias(bias, blocks, documents), SCALING).transpose(1, 2)
    for row, starts in enumerate(([0, 3, 6], [0, 1, 4, 6])):
        for a, b in itertools.pairwise(starts):
            alone = oracle(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], bias[:, a:b])
            assert_close(actual[row, a:b], alone[row], 1e-12)

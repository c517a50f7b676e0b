"""KIVI's decode kernel against a loop over rebuilt tokens in float64 (CUDA, or Triton's interpreter)."""

from __future__ import annotations

import itertools
import os
from importlib.util import find_spec

import pytest
import torch
from cache_cases import new_state, relative

from fathom.caches import KIVI
from fathom.ops.group_quantize import dequantize, plain, quantize

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs the package triton and a GPU (or TRITON_INTERPRET=1)",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = pytest.mark.skipif(DEVICE == "cpu", reason="products of Triton's interpreter have no bfloat16")


def code(packed, bits, place):
    """Code `place` of a packed row, lowest bits first."""
    per_byte = 8 // bits
    return (int(packed[place // per_byte]) >> (place % per_byte * bits)) & (2**bits - 1)


def rebuilt(held, bits, group, along_tokens):
    """All numbers of one head, one at a time: held = codes, scale, minimum → [tokens, channels] in float64."""
    codes, scale, minimum = (x.cpu() for x in held)
    first, second = codes.shape[:2]
    tokens, channels = (first * group, second) if along_tokens else (first, second * group)
    result = torch.empty(tokens, channels, dtype=torch.float64)
    for i in range(first):
        for j in range(second):
            for place in range(group):
                x = code(codes[i, j], bits, place) * scale[i, j, 0].double() + minimum[i, j, 0].double()
                if along_tokens:
                    result[i * group + place, j] = x
                else:
                    result[i, j * group + place] = x
    return result


def random_codes(shape, bits, group, generator, dtype):
    bytes_held = torch.randint(256, (*shape, group * bits // 8), generator=generator, dtype=torch.uint8)
    scale, minimum = (torch.randn(*shape, 1, generator=generator).to(dtype) for _ in range(2))
    return tuple(x.to(DEVICE) for x in (bytes_held, scale.abs() / 2**bits, minimum / 2))


# bits, group, key width, value width, coded keys, coded values, full keys
SIZES = [
    (2, 32, 32, 64, 160, 150, 3),
    (2, 16, 16, 16, 96, 33, 64),  # most values are full
    (4, 32, 64, 32, 64, 0, 1),  # no value is coded
    (8, 8, 16, 16, 72, 71, 8),
    (2, 128, 16, 128, 256, 255, 128),  # a group wider than a block
    (2, 4, 16, 16, 132, 40, 70),
]


@pytest.mark.parametrize("heads,groups", [(4, 2), (3, 3), (5, 1)])
@pytest.mark.parametrize(
    "dtype,limit", [(torch.float32, 1e-5), (torch.float16, 2e-3), pytest.param(torch.bfloat16, 1e-2, marks=BF16)]
)
@pytest.mark.parametrize("bits,group,key_width,width,coded_keys,coded_values,full_keys", SIZES)
def test_kernel_equals_a_loop(
    bits, group, key_width, width, coded_keys, coded_values, full_keys, heads, groups, dtype, limit, monkeypatch
):
    """Half precision: rebuilt numbers and weights are rounded once each."""
    from fathom.ops.quantized_attention import kernel as quantized_decode

    monkeypatch.setattr(quantized_decode, "PROGRAMS", 8 if heads == 4 else 1)  # runs of one block and of several
    generator = torch.Generator().manual_seed(group + heads)
    key_codes = random_codes((2, groups, coded_keys // group, key_width), bits, group, generator, dtype)
    value_codes = random_codes((2, groups, coded_values, width // group), bits, group, generator, dtype)
    full_values = coded_keys + full_keys - coded_values
    query, key, value = (
        torch.randn(2, n, tokens, channels, generator=generator).to(DEVICE, dtype)
        for n, tokens, channels in (
            (heads, 1, key_width),
            (groups, full_keys, key_width),
            (groups, full_values, width),
        )
    )
    assert quantized_decode.serves(query, key, value, bits, group)
    found = quantized_decode.quantized_attention(
        query, key_codes, value_codes if coded_values else None, key, value, bits, group, 0.3
    )
    assert found.dtype == dtype and found.shape == (2, heads, 1, width)
    for b in range(2):
        for g in range(groups):
            keys = rebuilt([x[b, g] for x in key_codes], bits, group, along_tokens=True)
            values = rebuilt([x[b, g] for x in value_codes], bits, group, along_tokens=False)
            keys = torch.cat((keys, key[b, g].double().cpu()))
            values = torch.cat((values, value[b, g].double().cpu()))
            for h in range(g * heads // groups, (g + 1) * heads // groups):
                weights = (0.3 * keys @ query[b, h, 0].double().cpu()).softmax(0)
                assert relative(found[b, h, 0].double().cpu(), weights @ values) < limit


@pytest.mark.parametrize("newest", [16, 33, 79, 80])
def test_rings_with_room_hold_the_same_tokens(newest):
    """Against the plain form on the same stores, whose unused room is full of numbers; and that on what counts."""
    from fathom.ops.quantized_attention import kernel, plain

    bits, group, residual, room, generator = 2, 8, 16, 112, torch.Generator().manual_seed(newest)
    key_codes = random_codes((2, 2, room // group, 16), bits, group, generator, torch.float32)
    value_codes = random_codes((2, 2, room, 32 // group), bits, group, generator, torch.float32)
    query, key, value = (
        torch.randn(2, heads, tokens, width, generator=generator).to(DEVICE)
        for heads, tokens, width in ((4, 1, 16), (2, residual, 16), (2, residual + 1, 32))
    )
    place = torch.tensor([newest], device=DEVICE)
    given = query, key_codes, value_codes, key, value, place, bits, group, 0.3
    assert kernel.serves(query, key, value, bits, group)
    expected = plain.ring_quantized_attention(*given)
    assert relative(kernel.ring_quantized_attention(*given).cpu(), expected.cpu()) < 1e-5
    coded, old = newest // residual * residual, newest - residual
    slots = torch.arange(newest + 1, device=DEVICE)
    counted = plain.quantized_attention(
        query, tuple(x[:, :, : coded // group] for x in key_codes),
        tuple(x[:, :, :old] for x in value_codes) if old else None,
        key[:, :, slots[coded:] % residual], value[:, :, slots[old:] % (residual + 1)], bits, group, 0.3,
    )  # fmt: skip
    assert relative(expected.cpu(), counted.cpu()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits,group", [(2, 32), (2, 4), (4, 8), (4, 128), (8, 1), (8, 16)])
def test_quantising_kernel(bits, group, dtype):
    """Scale, minimum and codes of every group: fp64 numbers rounded where the definition rounds; halves to even."""
    from fathom.ops.group_quantize.kernel import quantize, quantizes

    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(3, 7, group, generator=generator).to(dtype)
    x[0, 0] = 1.5  # equal numbers
    x[1] = torch.arange(group) % (2 ** (bits + 1) - 1) / 2  # where the group is long enough, quotients are halves
    x[2] *= 1e4
    if dtype == torch.bfloat16 and DEVICE == "cpu":  # the interpreter cuts off: whole steps need no rounding
        x = torch.randint(2**bits, x.shape, generator=generator).to(dtype) * 0.5 - 1
        x[..., 0], x[..., -1] = -1, -1 + 0.5 * (2**bits - 1)
    assert quantizes(x, bits)
    packed, scale, minimum = (y.cpu() for y in quantize(x.to(DEVICE), bits))
    assert scale.dtype == minimum.dtype == dtype and packed.shape == (3, 7, group * bits // 8)
    for row in itertools.product(range(3), range(7)):
        low, high = x[row].double().min(), x[row].double().max()
        assert minimum[row].item() == low
        assert scale[row].item() == ((high - low).float() / (2**bits - 1)).to(dtype).item()
        step = scale[row].item() or 1.0
        for place in range(group):
            quotient = (x[row][place].float() - minimum[row].float()) / step
            expected = min(max(round(quotient.item()), 0), 2**bits - 1)
            assert code(packed[row], bits, place) == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_visible(bad):
    """As in the plain form: the whole group is lost, and no other."""
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    x[1, 5] = bad
    for codes in (quantize(x.to(DEVICE), 4), plain.quantize(x, 4)):
        rebuilt = dequantize(*codes, 4, 32)
        assert rebuilt[[0, 2]].isfinite().all() and not rebuilt[1].isfinite().any()


def steps(method, parts, monkeypatch, kernel):
    """Outputs of a prompt and single steps, the state, and which steps the kernel served. Both quantise by a kernel."""
    from fathom.ops.quantized_attention import kernel as quantized_decode

    served, serves = [], quantized_decode.serves

    def noted(query, *rest):
        serving = kernel and serves(query, *rest)
        if query.shape[2] == 1:
            served.append(serving)
        return serving

    with monkeypatch.context() as patch:
        patch.setattr(quantized_decode, "serves", noted)
        state = new_state(method)
        output = torch.cat([state.attend(*(x.to(DEVICE) for x in part), 0.25) for part in parts], 2)
    return output, state, served


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), pytest.param(torch.bfloat16, 2e-2, marks=BF16)])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_steps_equal_the_pytorch_form(bits, dtype, limit, monkeypatch):
    """Steps over the moments when keys are quantised, when no value is yet, and when the full part is empty."""
    method = KIVI(bits=bits, group=8, residual=16)
    generator = torch.Generator().manual_seed(bits)
    whole = [torch.randn(2, heads, 60, 32, generator=generator).to(dtype) for heads in (4, 2, 2)]
    parts = list(zip(*(x.split([13] + [1] * 24 + [4] + [1] * 19, 2) for x in whole)))
    expected, reference, none = steps(method, parts, monkeypatch, kernel=False)
    found, state, served = steps(method, parts, monkeypatch, kernel=True)
    assert not any(none) and len(served) == 40 and all(served)  # every single step from 16 tokens on
    assert relative(found.float(), expected.float()) < limit
    for (name, left), (_, right) in zip(state.tensors(), reference.tensors(), strict=True):
        assert torch.equal(left, right), name


def test_what_the_kernel_does_not_serve(monkeypatch):
    """Wide numbers, gradients, groups of less than a byte and steps too large take the PyTorch form."""
    from fathom.ops.quantized_attention.kernel import serves

    wide = torch.zeros(1, 1, 1, 256)
    assert serves(wide, wide, wide, 2, 64) and not serves(wide, wide, wide, 2, 128)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, heads, 40, 32, generator=generator) for heads in (4, 2, 2)]
    parts = list(zip(*(x.split([38, 1, 1], 2) for x in whole)))
    double = [tuple(x.double() for x in part) for part in parts]
    assert steps(KIVI(group=8, residual=16), double, monkeypatch, kernel=True)[2] == [False] * 2
    assert steps(KIVI(group=2, residual=16), parts, monkeypatch, kernel=True)[2] == [False] * 2
    parts = [tuple(x.requires_grad_() for x in part) for part in parts]
    assert steps(KIVI(group=8, residual=16), parts, monkeypatch, kernel=True)[2] == [False] * 2


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_in_a_cuda_graph(dtype):
    """8B widths, no synchronisation with the host: a replay gives what the call gave."""
    generator = torch.Generator("cuda").manual_seed(0)
    random = lambda heads, n: torch.randn(2, heads, n, 128, generator=generator, device="cuda", dtype=dtype)  # noqa: E731
    state = new_state(KIVI())
    with torch.no_grad():
        state.attend(random(32, 1000), random(8, 1000), random(8, 1000), 128**-0.5)
        query, key, value = random(32, 1), random(8, 1), random(8, 1)
        attend = lambda: state.select(torch.arange(2, device="cuda")).attend(query, key, value, 128**-0.5)  # noqa: E731
        expected = attend().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = attend()
        found.zero_()
        graph.replay()
    assert torch.equal(found, expected)

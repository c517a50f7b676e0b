"""Kernels that rebuild blocks of VQKV and KIVI against loops over single numbers (CUDA, or Triton's interpreter)."""

from __future__ import annotations

import copy
import importlib
import itertools
import os
from importlib.util import find_spec

import pytest
import torch
from cache_cases import codebooks, get_model, new_state, relative

from fathom.caches import KIVI, VQKV, compress, prefill
from fathom.caches.methods import vqkv
from fathom.caches.versions import CACHE_NAME
from fathom.ops import kernels
from fathom.ops.quantized_attention import plain as quantized_attention
from fathom.ops.residual_vq import decode

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs the package triton and a GPU (or TRITON_INTERPRET=1)",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# one rounding, relative; Triton's interpreter cuts bfloat16 off
HALF_STEP = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8 if DEVICE == "cuda" else 2**-7}


# rows, heads, sets of codebooks, tokens held, stages, entries, width
BOOKS = [
    (2, 2, 1, 300, 5, 20, 16),
    (1, 4, 4, 130, 3, 7, 24),  # a width that is no power of two
    (2, 4, 2, 37, 9, 33, 80),
    (1, 1, 1, 5, 1, 1, 1),
    (1, 2, 1, 40, 17, 300, 128),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [torch.int16, torch.int32])
@pytest.mark.parametrize("rows,heads,sets,tokens,stages,entries,width", BOOKS)
def test_sum_of_codewords(rows, heads, sets, tokens, stages, entries, width, stored, dtype):
    """Σ_i Q_i[z_i] in float64, one vector at a time; a run of the tokens, too."""
    from fathom.ops.residual_vq.kernel import rebuild, serves

    generator = torch.Generator().manual_seed(tokens)
    books = torch.randn(sets, stages, entries, width, generator=generator).to(dtype)
    codes = torch.randint(entries, (rows, heads, tokens, stages), generator=generator)
    expected, size = torch.zeros(2, rows, heads, tokens, width, dtype=torch.float64)
    for b, g, t in itertools.product(range(rows), range(heads), range(tokens)):
        for i in range(stages):
            word = books[g // (heads // sets), i, codes[b, g, t, i]].double()
            expected[b, g, t] += word
            size[b, g, t] += word.abs()
    held = (codes - 32768 if stored == torch.int16 else codes).to(DEVICE, stored)
    assert serves(books)
    for run in (slice(None), slice(1, tokens - 1), slice(tokens - 1, tokens)):
        found = rebuild(held[:, :, run], books.to(DEVICE))
        assert found.dtype == dtype
        # the fp32 sum of N numbers is off by less than N half steps of what it adds up
        limit = HALF_STEP[dtype] * expected.abs() + stages * 2**-24 * size
        assert ((found.cpu().double() - expected[:, :, run]).abs() <= 1.01 * limit[:, :, run] + 1e-7).all()


def test_order_and_rounding_of_the_sum():
    """fp32 sums over the stages in their order, to the last bit; a 16-bit result is that sum rounded once. PyTorch's
    embedding bag (`decode`) does the same."""
    from fathom.ops.residual_vq.kernel import rebuild

    generator = torch.Generator().manual_seed(0)
    books = torch.randn(1, 11, 50, 16, generator=generator).to(torch.float16)
    codes = torch.randint(50, (1, 2, 64, 11), generator=generator)
    total = torch.zeros(1, 2, 64, 16)
    for i in range(11):
        total = total + books[0, i, codes[..., i]].float()
    held = codes.to(DEVICE, torch.int32)
    assert torch.equal(rebuild(held, books.float().to(DEVICE)).cpu(), total)
    assert torch.equal(rebuild(held, books.to(DEVICE)).cpu(), total.half())
    for table in (books.float().to(DEVICE), books.to(DEVICE)):
        assert torch.equal(rebuild(held, table), decode(held, table[0]))


def test_largest_code():
    """16-bit codes up to 65535."""
    from fathom.ops.residual_vq.kernel import rebuild

    books = torch.arange(65536.0, device=DEVICE).view(1, 1, -1, 1)
    codes = torch.tensor([0, 1, 32767, 32768, 65535], device=DEVICE).view(1, 1, -1, 1)
    for held in ((codes - 32768).to(torch.int16), codes.to(torch.int32)):
        assert rebuild(held, books).flatten().tolist() == codes.flatten().tolist()


def rounded(x: float, dtype: torch.dtype) -> float:
    return torch.tensor(x, dtype=torch.float64).to(dtype).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("along_tokens", [True, False])
@pytest.mark.parametrize(
    "bits,group,first,second", [(2, 32, 4, 6), (2, 4, 9, 3), (4, 8, 5, 20), (8, 1, 7, 3), (8, 16, 3, 4)]
)
def test_dequantised_blocks(bits, group, first, second, along_tokens, dtype):
    """One number at a time: the product is rounded, then the sum; to the last bit."""
    from fathom.ops.group_quantize.kernel import dequantize_block, dequantizes

    generator = torch.Generator().manual_seed(group)
    packed = torch.randint(256, (2, 2, first, second, group * bits // 8), generator=generator, dtype=torch.uint8)
    scale, minimum = (torch.randn(2, 2, first, second, 1, generator=generator).to(dtype) for _ in range(2))
    if dtype == torch.bfloat16 and DEVICE == "cpu":  # the interpreter cuts off: nothing to round
        scale, minimum = scale.sign() / 2, minimum.round() / 2
        packed &= 0x77 if bits == 8 else 0xFF
    assert dequantizes(scale, minimum, bits, group)
    run = slice(1, first - 1)
    found = dequantize_block(*(x[:, :, run].to(DEVICE) for x in (packed, scale, minimum)), bits, along_tokens).cpu()
    assert found.dtype == dtype
    per_byte = 8 // bits
    for b, g, i, j, place in itertools.product(range(2), range(2), range(1, first - 1), range(second), range(group)):
        code = int(packed[b, g, i, j, place // per_byte]) >> (place % per_byte * bits) & (2**bits - 1)
        product = rounded(code * scale[b, g, i, j].item(), dtype)
        at = ((i - 1) * group + place, j) if along_tokens else (i - 1, j * group + place)
        assert found[b, g][at].item() == rounded(product + minimum[b, g, i, j].item(), dtype)


def test_what_the_kernels_do_not_serve():
    from fathom.ops.group_quantize import kernel as group_quantize
    from fathom.ops.residual_vq import kernel as residual_vq

    scale = torch.ones(1, 1, 4, 4, 1)
    assert group_quantize.dequantizes(scale, scale, 2, 4)
    for other, bits, group in ((scale.double(), 2, 4), (scale, 2, 2), (scale, 2, 12), (scale.requires_grad_(), 2, 4)):
        assert not group_quantize.dequantizes(other, other, bits, group)
    books = torch.zeros(1, 2, 3, 4)
    assert not residual_vq.serves(books.double()) and not residual_vq.serves(books.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("at_once", [16, 4096])
def test_kivi_rebuilds_the_same(at_once, dtype, monkeypatch):
    """Every block of a state equals the PyTorch form's, bit for bit: keys, values and values in full."""
    monkeypatch.setattr(quantized_attention, "TOKENS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    state = new_state(KIVI(bits=2, group=8, residual=16))
    for length in (50, 3, 1, 13, 40):
        query, key, value = (torch.randn(2, 2, length, 32, generator=generator).to(DEVICE, dtype) for _ in range(3))
        state.attend(query, key, value, 0.2)
        launched = count_launches("fathom.ops.group_quantize.kernel", "dequantize_block", monkeypatch)
        found = list(state.blocks())
        assert len(launched) >= 2 * len(found) - 1  # a block may hold values in full only
        with monkeypatch.context() as patched:
            patched.setattr(kernels, "TRITON", False)
            expected = list(state.blocks())
        for left, right in zip(found, expected, strict=True):
            assert torch.equal(left[0], right[0]) and torch.equal(left[1], right[1])


def count_launches(module, name, monkeypatch):
    module, calls = importlib.import_module(module), []
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: calls.append(name) or function(*args))
    return calls


@pytest.mark.parametrize("share,rope", [("layer", "post"), ("head", "post"), ("layer", "pre")])
@pytest.mark.parametrize("packing", ["int16", "bits"])
def test_vqkv_reads_a_prompt_the_same(packing, share, rope, monkeypatch):
    """Logits of a prompt in parts, blocks rebuilt by the kernel and by PyTorch."""
    monkeypatch.setattr(vqkv, "TOKENS_AT_ONCE", 8)
    model = copy.deepcopy(get_model("llama")).to(DEVICE)
    ids = torch.randint(1, 97, (2, 50), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    method = VQKV(
        codebooks=codebooks("llama", share=share, rope=rope), pack=packing, attention="blocks", n_sink=2, n_local=6
    )
    launched, logits = count_launches("fathom.ops.residual_vq.kernel", "rebuild", monkeypatch), []
    for kernel in (True, False):
        monkeypatch.setattr(kernels, "TRITON", kernel)
        before = len(launched)
        with compress(model, method), torch.no_grad():
            cache = prefill(model, ids[:, :30])[CACHE_NAME]
            logits.append(model(ids[:, 30:], **{CACHE_NAME: cache}).logits)
        assert (len(launched) > before) == kernel
    assert relative(logits[0], logits[1]) < 1e-5

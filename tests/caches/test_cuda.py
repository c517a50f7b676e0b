"""Every method on a GPU: kernels of SDPA in half precision, device placement, graphs. Skipped without CUDA."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
from cache_cases import LARGE, SMALL, VOCABULARY, get_model, make, relative
from transformers import LlamaConfig, LlamaForCausalLM

from fathom.caches import METHODS, cache_shape, compress, prefill
from fathom.caches.speed import BUFFER, decode_speed
from fathom.caches.versions import CACHE_NAME

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
GREEDY = {"do_sample": False, "max_new_tokens": 12}
KERNELS = [("vqkv", "triton"), ("fourier_attention", "triton"), ("fourier_attention", "dense"), ("vqkv", "dense")]
CASES = [(name, {}) for name in sorted(SMALL)] + [(name, {"attention": how}) for name, how in KERNELS]


@pytest.fixture(scope="module")
def on_gpu():
    """Tiny Llamas on the device by precision, with the weights of the one on the CPU."""
    model = get_model("llama")
    return {dtype: copy.deepcopy(model).to("cuda", dtype) for dtype in (torch.float32, torch.bfloat16)}


def method(name, options, size):
    if options.get("attention") == "triton" and find_spec("triton") is None:
        pytest.skip("needs triton")
    return make(name, size, **options)


@pytest.mark.parametrize("name,options", CASES)
def test_generation_equals_the_cpu(name, options, on_gpu, ids):
    cpu, chosen = get_model("llama"), method(name, options, SMALL)
    reference = make(name, SMALL)  # the CPU's own form
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with compress(cpu, reference):
        expected = cpu.generate(ids, attention_mask=mask, **GREEDY)
    with compress(on_gpu[torch.float32], chosen):
        found = on_gpu[torch.float32].generate(ids.cuda(), attention_mask=mask.cuda(), **GREEDY)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("name,options", CASES)
def test_half_precision(name, options, on_gpu):
    """bf16: a chunked prompt of several hundred tokens and steps stay near the stock model where nothing is dropped;
    bytes are the closed form where something is."""
    model, generator = on_gpu[torch.bfloat16], torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (2, 230), generator=generator).cuda()
    with compress(model, method(name, options, LARGE)):
        whole = model(ids).logits.float()
    assert relative(whole, model(ids).logits.float()) < 0.05
    small = method(name, options, SMALL)
    if name == "fourier_attention":
        small = type(small)(**{**vars(small), "window": 256, "reconstruction": "projection"})
    with compress(model, small):
        out = prefill(model, ids, chunk_size=100)
        for step in range(5):
            out = model(ids[:, step : step + 1], **{CACHE_NAME: out[CACHE_NAME]})
    assert out.logits.isfinite().all() and out[CACHE_NAME].get_seq_length() == 235
    if name in ("full", "weightedkv", "streaming_llm", "h2o", "tova", "freqkv", "kivi"):
        assert out[CACHE_NAME].nbytes() == small.cache_bytes(cache_shape(model, 2), 230, 5)


def test_codes_wide_enough_for_the_flash_kernel():
    """Long calls over codes and quantised keys in bf16 at head dim 64, chunks of more than 64 queries."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes)).eval()
    ids = torch.randint(1, VOCABULARY, (1, 500), generator=torch.Generator().manual_seed(4))
    kivi = METHODS["kivi"](bits=8, residual=32)
    with compress(model, kivi):
        expected = prefill(model, ids, chunk_size=128).logits
    half = model.to("cuda", torch.bfloat16)
    with compress(half, kivi):
        found = prefill(half, ids.cuda(), chunk_size=128).logits.float().cpu()
    assert relative(found, expected) < 0.05


@pytest.mark.parametrize("name,options", [*CASES, ("full_buffer", {})])
def test_a_step_is_one_cuda_graph(name, options, on_gpu):
    """No step of any method synchronises with the host."""
    if name == "scored":
        pytest.skip("evicts once a prompt; its scorers may synchronise")
    chosen = BUFFER if name == "full_buffer" else method(name, options, SMALL)
    row = decode_speed(on_gpu[torch.bfloat16], chosen, 60, 2, graph=True, repeats=2)
    assert row["seconds_per_step"] > 0
    fixed = name in ("treekv", "weightedkv", "streaming_llm", "h2o", "tova", "full_buffer")
    assert row["grows"] != fixed

"""Fewer vision tokens and a compressed KV cache in one model: the cache is that of the language model alone, given what
the compressor keeps."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from test_vision_families import batch
from vision_cases import method_of, pair

from fathom import compress
from fathom.caches import from_dict as cache_of
from fathom.vision import compress_vision, from_dict

KIVI = {"name": "kivi", "group": 8}
CACHES = {
    "streaming_llm": {"name": "streaming_llm", "budget": 12, "n_sink": 2},
    "freqkv": {"name": "freqkv", "budget": 16},
    "kivi": {**KIVI, "residual": 8},
}
VISION = {"fourier_vlm": 9, "divprune": 7, "visionzip": 9}
SETTINGS = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "suppress_tokens": [2, 3, 4, 31]}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("vision", VISION)
@torch.no_grad()
def test_a_compressed_cache_holds_what_the_compressor_keeps(vision, cache):
    model, processor = pair("llava")
    method, stored = method_of(vision, VISION[vision]), cache_of(CACHES[cache])
    text = hf.LlamaForCausalLM(model.config.text_config).eval()
    text.model.load_state_dict(model.model.language_model.state_dict())
    text.lm_head.load_state_dict(model.lm_head.state_dict())
    with compress_vision(model, processor, method):
        inputs = batch("llava", processor, (0, 1))
        embeddings = model.get_input_embeddings()(inputs.input_ids).clone()
        kept = model.model.get_image_features(inputs.pixel_values).pooler_output
        embeddings[inputs.input_ids == 2] = torch.cat(list(kept))
        with compress(text, stored):
            expected = text.generate(inputs_embeds=embeddings, attention_mask=inputs.attention_mask, **SETTINGS)
        with compress(model, stored):
            inner = model.generate(**inputs, **SETTINGS)
    with compress(model, stored), compress_vision(model, processor, method):
        outer = model.generate(**batch("llava", processor, (0, 1)), **SETTINGS)
    assert inner.equal(outer) and inner[:, inputs.input_ids.shape[1] :].equal(expected)


@torch.no_grad()
def test_a_cache_keeps_qwens_positions_or_is_refused():
    """Positions of time, row and column are not those that a cache could give to its slots."""
    model, processor = pair("qwen2_5_vl")
    for name in ("streaming_llm", "freqkv"):
        with pytest.raises(ValueError, match="positions on several axes"), compress(model, cache_of(CACHES[name])):
            pass
    with compress_vision(model, processor, from_dict({"name": "fourier_vlm", "ratio": "2/3"})):
        inputs = batch("qwen2_5_vl", processor, (0, 1))
        expected = model.generate(**inputs, **SETTINGS)
        for stored in ({"name": "streaming_llm", "budget": 256, "positions": "original"}, {**KIVI, "residual": 256}):
            with compress(model, cache_of(stored)):
                assert model.generate(**inputs, **SETTINGS).equal(expected)


@pytest.mark.parametrize("name", ["fastv", "sparsevlm"])
@torch.no_grad()
def test_methods_that_read_weights_are_refused_under_a_compressed_cache(name):
    model, processor = pair("llava")
    method, stored = method_of(name, 9), cache_of(CACHES["streaming_llm"])
    refused = pytest.raises(ValueError, match="this method reads attention weights, which it does not give")
    with refused, compress_vision(model, processor, method), compress(model, stored):
        model.generate(**batch("llava", processor, (0,)), **SETTINGS)
    with refused, compress(model, stored), compress_vision(model, processor, method):
        pass
    assert model(**batch("llava", processor, (0,))).logits.isfinite().all()

"""Under autocast a cache is that of a model in autocast's dtype, and what is promised in fp32 stays in fp32."""

from __future__ import annotations

import copy

import pytest
import torch
from cache_cases import LARGE, SMALL, make, relative
from transformers import Trainer, TrainingArguments, default_data_collator

from fathom.caches import CodebookTraining, FreqKV, build_cache, compress, compression_report, prefill
from fathom.caches.codebooks import learn
from fathom.caches.versions import CACHE_NAME
from fathom.ops import dct
from fathom.ops import fourier_coefficients as fourier
from fathom.ops.code_attention import histogram_mix, lookup_scores
from fathom.ops.residual_vq import encode


def autocast(enabled: bool = True):
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def test_room_for_every_token_is_the_stock_model(method_name, ids, llama):
    """In one call, chunk by chunk and without a cache, padded too."""
    method, mask = make(method_name, LARGE), torch.ones_like(ids)
    mask[0, :11] = 0
    with autocast(), torch.no_grad():
        stock = llama(ids, attention_mask=mask).logits
        with compress(llama, method):
            assert relative(llama(ids, attention_mask=mask).logits[0, 11:], stock[0, 11:]) < 0.05
            assert relative(llama(ids, attention_mask=mask, use_cache=False).logits[1], stock[1]) < 0.05
            assert relative(prefill(llama, ids, chunk_size=8, attention_mask=mask).logits, stock[:, -1:]) < 0.05


def test_compressing_calls_run_and_hold_two_bytes_a_number(method_name, ids, llama):
    method = make(method_name, SMALL)
    with compress(llama, method), torch.no_grad():
        with autocast():
            cache = prefill(llama, ids, chunk_size=8)[CACHE_NAME]
            llama(ids[:, :1], **{CACHE_NAME: cache})
            llama.generate(ids, do_sample=False, max_new_tokens=4)
        full = 41 * 2 * sum(2 * 2 * 8 * 2 for _ in range(3))  # tokens · rows · (K, V · heads · width · bytes), layers
        assert compression_report(cache).full_bytes == full


def test_a_conversation_may_leave_and_enter_autocast(method_name, ids, llama):
    with compress(llama, make(method_name, SMALL)), torch.no_grad():
        expected = llama(ids)[CACHE_NAME]
        for first in (True, False):
            cache = build_cache(llama, make(method_name, SMALL))
            with autocast(first):
                llama(ids, **{CACHE_NAME: cache})
            for token in (3, 4):  # a full cache is overwritten in place
                with autocast(not first):
                    out = llama(torch.full((2, 1), token), **{CACHE_NAME: cache}).logits
                assert out.isfinite().all()
            assert cache.layers[0].seen == expected.layers[0].seen + 2


@pytest.mark.parametrize("name", ["full", "kivi", "streaming_llm", "scored"])
def test_plain_caches_may_leave_and_enter_autocast(name, ids, llama):
    """The model's own attention gets keys in the dtype of its queries, whatever the cache holds."""
    method = make(name, LARGE, positions="original")
    with torch.no_grad():
        expected = llama(ids[:1]).logits[:, -1]
        for first in (True, False):
            cache = build_cache(llama, method)
            with autocast(first):
                llama(ids[:1, :-1], **{CACHE_NAME: cache})
            with autocast(not first):
                assert relative(llama(ids[:1, -1:], **{CACHE_NAME: cache}).logits[:, 0], expected) < 0.05
            assert cache.layers[0].dtype == (torch.bfloat16 if first else torch.float32)


def test_training(ids, llama, tmp_path):
    """Compressing forwards have about the loss and the gradient of fp32; Trainer(bf16=True) trains."""
    model = copy.deepcopy(llama)  # with a config of its own, in which the Trainer turns the cache off
    results = []
    with compress(model, FreqKV(budget=16, n_sink=2)):
        for mixed in (False, True):
            model.zero_grad()
            with autocast(mixed):
                loss = model(ids, labels=ids).loss
            loss.backward()
            results.append((loss.detach(), model.model.embed_tokens.weight.grad.clone()))
        assert relative(results[1][0], results[0][0]) < 0.01 and relative(results[1][1], results[0][1]) < 0.1
        arguments = TrainingArguments(str(tmp_path), max_steps=2, bf16=True, use_cpu=True, report_to=[])
        rows = [{"input_ids": row, "labels": row} for row in ids.repeat(4, 1).tolist()]
        trainer = Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator)
        assert 0 < trainer.train().training_loss < 50


@pytest.mark.parametrize("transform", ["gemm", "fft"])
def test_resampling_stays_in_fp32(transform):
    x = torch.randn(2, 60, 8, generator=torch.Generator().manual_seed(0))
    with autocast():
        mixed = dct.resample(x, 30, "low", transform)
    assert torch.equal(mixed, dct.resample(x, 30, "low", transform))


def test_fourier_coefficients_stay_in_fp32():
    x = torch.randn(1, 90, 4, generator=torch.Generator().manual_seed(0)).cumsum(1)
    weight = fourier.weights("projection", 40, 128, torch.float32, torch.device("cpu"))
    results = []
    for mixed in (False, True):
        with autocast(mixed):
            states = fourier.transform(x[:, :80], 40, 128) + fourier.transform(x[:, 80:], 40, 128, start=80)
            results.append(fourier.rebuild(states, weight, 0, 90, 128))
    assert torch.equal(*results)


def test_codes_stay_those_of_fp32():
    generator = torch.Generator().manual_seed(0)
    books, x = torch.randn(3, 64, 8, generator=generator), torch.randn(1, 2, 500, 8, generator=generator)
    results = []
    for mixed in (False, True):
        with autocast(mixed):
            codes = encode(x, books)
            scores = lookup_scores(x[:, :, :3], codes, books.expand(1, -1, -1, -1))
            results.append((codes, scores, histogram_mix(scores, codes, books.expand(1, -1, -1, -1))))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_states_compute_as_in_a_model_of_that_dtype(ids, llama):
    """Coefficients of FourierAttention and codes of VQKV, from the same 16-bit keys, with autocast on and off."""
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(1, 2, 40, 8, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(1, 4, 40, 8, generator=generator).bfloat16()
    for name in ("fourier_attention", "vqkv", "freqkv", "h2o", "kivi"):
        results = []
        with compress(llama, make(name, SMALL)):
            for mixed in (False, True):
                cache = build_cache(llama, make(name, SMALL))
                layer = cache.layers[0]
                layer.fused = True
                with autocast(mixed):
                    for part in (slice(0, 30), *(slice(t, t + 1) for t in range(30, 40))):
                        layer.update(key[:, :, part], value[:, :, part])
                        output = layer.attend(query[:, :, part], 0.3)
                results.append([output, *(tensor for _, tensor in layer.states[0].tensors())])
        assert all(torch.equal(a, b) for a, b in zip(*results)), name


@pytest.mark.parametrize("init", ["gaussian", "kmeans"])
def test_codebooks_are_trained_in_fp32(init):
    x = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    plain = learn(x, 2, 16, CodebookTraining(init=init, steps=5, batch=64, kmeans_rounds=2))
    with autocast():
        assert torch.equal(learn(x, 2, 16, CodebookTraining(init=init, steps=5, batch=64, kmeans_rounds=2)), plain)

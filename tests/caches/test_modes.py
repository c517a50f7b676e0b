"""Threads, inference mode before training, compiled and copied models."""

from __future__ import annotations

import copy
import io
import sys
import threading
import time

import pytest
import torch
from cache_cases import LARGE, SMALL, build, get_model, make, relative
from transformers import DynamicCache

from fathom.caches import CodebookTraining, FreqKV, build_cache, compress, prefill, train_codebooks
from fathom.caches.trial import TRACED
from fathom.caches.versions import CACHE_NAME
from fathom.ops.dct import resampler


def in_threads(work, count=4):
    """The results of work(0) … work(count − 1), all at once; the first error is raised here."""
    results, errors, ready = [None] * count, [], threading.Barrier(count)

    def run(index):
        try:
            ready.wait()
            results[index] = work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def test_threads_share_a_model(method_name, ids, llama):
    """Forwards of several threads meet in the middle: each goes on with its own cache, length and padding."""
    method = make(method_name, SMALL)
    texts = [ids[:, : 40 - 7 * i].roll(i) for i in range(3)]
    meeting = threading.Barrier(3)

    def meet(*args):
        meeting.wait(timeout=30)

    def logits(index):
        with torch.no_grad():  # the grad mode is a thread's own
            cache = build_cache(llama, method)
            llama(texts[index], **{CACHE_NAME: cache})
            return llama(texts[index][:, :1], **{CACHE_NAME: cache}).logits

    with compress(llama, method):
        alone = [logits(index) for index in range(3)]
        hook = llama.model.layers[1].register_forward_pre_hook(meet)
        try:
            together = in_threads(logits, 3)
        finally:
            hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(alone, together))


def test_threads_enter_and_leave(ids):
    """One of several threads binds the model, the others are refused; looking at it disturbs no forward."""
    model, method, entered, refused = copy.deepcopy(get_model("llama")), make("treekv", SMALL), [], []
    stop, errors = threading.Event(), []
    interval = sys.getswitchinterval()

    def look():
        while not stop.is_set():
            build_cache(model, method)

    def forwards():
        try:
            while not stop.is_set():
                torch.testing.assert_close(model(ids).logits, expected)
        except BaseException as error:
            errors.append(error)

    def enter(index):
        for _ in range(10):
            try:
                with compress(model, method):
                    entered.append(index)
            except ValueError as error:
                refused.append(str(error))

    with torch.no_grad():
        expected = model(ids).logits
        sys.setswitchinterval(1e-5)
        try:
            background = [threading.Thread(target=work) for work in (look, look, torch.no_grad()(forwards))]
            for thread in background:
                thread.start()
            time.sleep(0.5)
            stop.set()
            for thread in background:
                thread.join()
            in_threads(enter)
        finally:
            stop.set()
            sys.setswitchinterval(interval)
        assert not errors and entered and all("under compress already" in words for words in refused)
        assert model.config._attn_implementation == get_model("llama").config._attn_implementation
        assert not any("_fathom_binding" in vars(module) or module._forward_pre_hooks for module in model.modules())
        torch.testing.assert_close(model(ids).logits, expected)


def test_threads_generate(ids, llama):
    options = {"do_sample": False, "max_new_tokens": 12}
    with compress(llama, make("treekv", SMALL)):
        alone = [llama.generate(ids[:, i:], **options) for i in range(4)]
        together = in_threads(lambda i: llama.generate(ids[:, i:], **options))
    assert all(torch.equal(a, b) for a, b in zip(alone, together))


def test_inference_mode_then_training(method_name, ids):
    """What is kept between calls (rotations, resampling matrices, codebooks) is no inference tensor."""
    model = build("llama")
    resampler.cache_clear()
    with torch.inference_mode():
        context = compress(model, make(method_name, SMALL))
        context.__enter__()
        model(ids)
    try:
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
    finally:
        context.__exit__(None, None, None)
    assert model.model.embed_tokens.weight.grad.isfinite().all()


@pytest.mark.parametrize("band", ["low", "high", "mean"])
def test_resampling_matrices_serve_training(band, ids):
    model = build("llama")
    resampler.cache_clear()
    with compress(model, FreqKV(budget=16, n_sink=2, band=band)):
        with torch.inference_mode():
            model(ids)
        model(ids, labels=ids).loss.backward()
    assert model.model.embed_tokens.weight.grad.isfinite().all()


def test_codebooks_loaded_in_inference_mode_serve_training(ids, tmp_path):
    model = build("llama")
    sizes = CodebookTraining(key_stages=2, key_entries=8, value_stages=2, value_entries=8, steps=1, batch=64)
    train_codebooks(model, ids, sizes).save(tmp_path / "books.safetensors")
    with torch.inference_mode():
        method = make("vqkv", SMALL, codebooks=tmp_path / "books.safetensors")
        context = compress(model, method)
        context.__enter__()
    try:
        cache = build_cache(model, method)
        for part in ids.split(10, 1):
            loss = model(part, labels=part, **{CACHE_NAME: cache}).loss
        loss.backward()
    finally:
        context.__exit__(None, None, None)
    assert model.model.embed_tokens.weight.grad.isfinite().all()


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


copies_are_stock = pytest.mark.skipif(not TRACED, reason="PyTorch before 2.13 cannot trace the names that copies need")


@copies_are_stock
@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_made_in_the_context_leaves_compression_behind(copied, ids, llama):
    """A copy is the stock model, may itself go under `compress`, and its keys are what the stock cache holds."""
    mask, method = torch.ones_like(ids), make("treekv", SMALL)
    mask[0, :5] = 0
    with compress(llama, method):
        twin, compressed = copied(llama), llama(ids, attention_mask=mask).logits
        assert torch.equal(twin(ids, attention_mask=mask).logits, copied(twin)(ids, attention_mask=mask).logits)
    stock = llama(ids, attention_mask=mask)
    for _ in range(2):
        found = twin(ids, attention_mask=mask, use_cache=True)
        assert torch.equal(found.logits, stock.logits) and type(found[CACHE_NAME]) is DynamicCache
        assert twin.config._attn_implementation == llama.config._attn_implementation == "sdpa"
        with compress(twin, method):
            assert torch.equal(twin(ids, attention_mask=mask).logits, compressed)


@copies_are_stock
def test_a_model_saved_or_built_in_the_context_is_stock(ids, llama, tmp_path):
    with compress(llama, make("treekv", SMALL)):
        llama.save_pretrained(tmp_path)
        loaded = type(llama).from_pretrained(tmp_path, config=llama.config)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loaded(ids).logits, llama(ids).logits)


@pytest.mark.parametrize("name", ["treekv", *(pytest.param(n, marks=pytest.mark.slow) for n in ("full", "freqkv"))])
def test_a_compiled_model(name, ids):
    """torch.compile of a model without a cache; attention_mask says that nothing is packed."""
    model = copy.deepcopy(get_model("llama"))
    mask = torch.ones_like(ids)
    with compress(model, make(name, LARGE)), torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        compiled = torch.compile(model, backend="eager")
        got = compiled(ids, attention_mask=mask, use_cache=False).logits
    assert relative(got, expected) < 1e-5


COMPILED = ("full", "h2o", "tova", "snapkv", "streaming_llm", "weightedkv")  # each takes seconds in the compiler


@pytest.mark.parametrize("name", ["treekv", "kivi", *(pytest.param(n, marks=pytest.mark.slow) for n in COMPILED)])
def test_compiled_decoding_is_a_few_graphs(name, ids):
    """One whole graph for the first step, one with dynamic lengths for the others: not one a token."""
    model, method, graphs = copy.deepcopy(get_model("llama")), make(name, SMALL), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    ids, mask = ids[:1], torch.ones(1, 60, dtype=torch.long)
    with compress(model, method), torch.no_grad():
        caches = [prefill(model, ids[:, :34])[CACHE_NAME] for _ in range(2)]
        compiled = torch.compile(model, backend=count, fullgraph=True)
        for step in range(12):
            known = {"input_ids": ids[:, step : step + 1], "attention_mask": mask[:, : 35 + step]}
            got, expected = (f(**known, **{CACHE_NAME: held}).logits for f, held in zip((compiled, model), caches))
            assert relative(got, expected) < 1e-5
    assert len(graphs) <= (3 if TRACED else 5)  # before, hooks are compiled by themselves: two small graphs more

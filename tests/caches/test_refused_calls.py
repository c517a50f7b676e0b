"""A refused call leaves a cache as it was: its numbers, its counts, and what comes next."""

from __future__ import annotations

import copy

import pytest
import torch
from cache_cases import SIZES, SMALL, get_model, make, method_of, randomize
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from fathom.caches import (
    FourierAttention,
    Scored,
    TreeKV,
    build_cache,
    compress,
    prefill,
    register_scorer,
)
from fathom.caches.base import CompressedLayer
from fathom.caches.methods.scorer import SCORERS
from fathom.caches.versions import CACHE_NAME


def content(cache):
    """All that a cache holds, copied."""
    layers = [
        (
            [(state.seen, state.stored, {name: x.clone() for name, x in state.tensors()}) for state in layer.states],
            (layer.seen, layer.batch_size, layer.is_initialized, layer.groups_version),
        )
        if isinstance(layer, CompressedLayer)
        else (layer.get_seq_length(), copy.deepcopy(vars(layer)))
        for layer in cache.layers
    ]
    return layers, copy.deepcopy(vars(cache.groups))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture(scope="module")
def one_layer():
    torch.manual_seed(0)
    config = LlamaConfig(num_key_value_heads=2, **{**SIZES, "num_hidden_layers": 1})
    return randomize(LlamaForCausalLM(config)).eval()


def refused(ids, mask):
    """Calls on a cache of 24 tokens, row 1 with five pads, that are refused."""
    hole, hidden, new = torch.ones(2, 28).long(), mask.clone(), ids[:, 24:28]
    hole[1, 26] = 0
    hidden[0, :3] = 0
    positions = torch.tensor([[24, 25, 0, 1], [19, 20, 21, 22]])
    yield "rows", {"input_ids": new[:1]}
    yield "2-D padding mask", {"input_ids": new, "attention_mask": torch.ones(2, 1, 4, 28, dtype=torch.bool)}
    yield "pad after a token|shows other pads", {"input_ids": new, "attention_mask": hole}
    yield "shows other pads", {"input_ids": new, "attention_mask": hidden[:, :28]}
    yield "packed documents", {"input_ids": new, "position_ids": positions}
    yield "pass input_ids", {"use_cache": True}
    yield "index out of range", {"input_ids": new + 1000}


@torch.no_grad()
@pytest.mark.parametrize("depth", ["one layer", "three"])
def test_calls_that_are_refused(method_name, depth, one_layer, ids, llama):
    model, mask = one_layer if depth == "one layer" else llama, torch.ones_like(ids)
    if model is one_layer and method_of(method_name).calibration is not None:
        pytest.skip("made for another model, or by a rule that compresses nothing of a single layer")
    mask[1, :5] = 0
    with compress(model, make(method_name, SMALL)):
        cache, fresh = (prefill(model, ids[:, :24], attention_mask=mask[:, :24])[CACHE_NAME] for _ in range(2))
        before = content(cache)
        for words, call in refused(ids, mask):
            with pytest.raises((ValueError, IndexError), match=words):
                model(**call, **{CACHE_NAME: cache})
            assert same(content(cache), before), words
        for t in range(24, 30):
            found, expected = (model(ids[:, t : t + 1], **{CACHE_NAME: c}).logits for c in (cache, fresh))
            assert torch.equal(found, expected)


@torch.no_grad()
def test_calls_that_are_refused_on_an_empty_cache(method_name, ids, llama):
    """The cache takes any rows afterwards; an empty DynamicCache of the caller's is still one."""
    hole = torch.ones_like(ids)
    hole[1, 30:] = 0
    method = make(method_name, SMALL)
    with compress(llama, method):
        expected = llama(ids[:1]).logits
        for cache in (build_cache(llama, method), DynamicCache(config=llama.config)):
            kind = type(cache)
            for _ in range(2):
                with pytest.raises(ValueError, match="pad after a token"):
                    llama(ids, attention_mask=hole, **{CACHE_NAME: cache})
                with pytest.raises(IndexError):
                    llama(ids + 1000, **{CACHE_NAME: build_cache(llama, method)})
                assert type(cache) is kind and cache.get_seq_length() == 0
            assert torch.equal(llama(ids[:1], **{CACHE_NAME: cache}).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("depth", ["one layer", "three"])
def test_plain_caches_outside_the_context(method_name, depth, one_layer, ids, llama):
    """Two rows of unknown padding, or a method that needs the context: refused, and one row or the context go on."""
    model = one_layer if depth == "one layer" else llama
    if model is one_layer and method_of(method_name).calibration is not None:
        pytest.skip("made for another model")
    method = make(method_name, SMALL, positions="original")
    cache = build_cache(model, method)
    for held in (0, 20):
        before = content(cache)
        with pytest.raises(ValueError, match=r"equal_rows=True|inside `with|input_ids has 2 rows"):
            model(ids, **{CACHE_NAME: cache})
        assert same(content(cache), before)
        if not held and not method.plain:
            with compress(model, method):
                model(ids[:1, :20], **{CACHE_NAME: cache})
        elif not held:
            model(ids[:1, :20], **{CACHE_NAME: cache})
    with compress(model, method):
        fresh = prefill(model, ids[:1, :20])[CACHE_NAME]
        found, expected = (model(ids[:1, 20:21], **{CACHE_NAME: c}).logits for c in (cache, fresh))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("held", [20, 34])  # before the prompt is compressed, and after
@pytest.mark.parametrize("flush", [1, 3])
def test_a_full_window(padded, held, flush, ids, llama):
    """Refused for the longest row, before any layer or any group of rows slides; fewer tokens still fit."""
    options = {"n_sink": 2, "n_local": 4, "frequencies": 8, "window": 30, "flush_every": flush}
    method, mask = FourierAttention(reconstruction="projection", **options), torch.ones(2, 60).long()
    mask[1, : 7 * padded] = 0
    text = torch.cat((ids, ids), dim=1)
    with compress(llama, method):
        cache, fresh = (prefill(llama, text[:, :held], attention_mask=mask[:, :held])[CACHE_NAME] for _ in range(2))
        before = content(cache)
        assert cache.layers[0].states[0].compressed == (held == 34)
        with pytest.raises(ValueError, match="do not fit the window of 30"):
            llama(text[:, held : held + 20], attention_mask=mask[:, : held + 20], **{CACHE_NAME: cache})
        assert same(content(cache), before)
        for t in range(held, 36):
            found, expected = (llama(text[:, t : t + 1], **{CACHE_NAME: c}).logits for c in (cache, fresh))
            assert torch.equal(found, expected)
        with pytest.raises(ValueError, match="do not fit the window of 30"):
            for t in range(36, 40):  # 36 tokens fill it; up to two more wait in full until three slide together
                before = content(cache)
                llama(text[:, t : t + 1], attention_mask=mask[:, : t + 1], **{CACHE_NAME: cache})
        assert same(content(cache), before)


@torch.no_grad()
@pytest.mark.parametrize("depth", ["one layer", "three"])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("fault", ["shape", "error"])
def test_a_scorer_that_fails(depth, plain, fault, one_layer, ids, llama):
    """Put right, it goes on with the cache as it was."""
    model = one_layer if depth == "one layer" else llama
    right = SCORERS["keydiff"]

    def wrong(keys, values):
        if fault == "error":
            raise ZeroDivisionError("scorer")
        return right(keys, values)[..., 1:]

    register_scorer("of_this_test")(right)
    method = Scored(budget=16, scorer="of_this_test")
    context = compress(model, method) if not plain else torch.no_grad()
    with context:
        cache, fresh = (build_cache(model, method, equal_rows=True) for _ in range(2))
        for held in (cache, fresh):
            model(ids[:, :24], **{CACHE_NAME: held})
        before = content(cache)
        register_scorer("of_this_test")(wrong)
        with pytest.raises((ValueError, ZeroDivisionError), match="scorer"):
            model(ids[:, 24:30], **{CACHE_NAME: cache})
        assert same(content(cache), before) and cache.nbytes() == fresh.nbytes()
        register_scorer("of_this_test")(right)
        found, expected = (model(ids[:, 24:30], **{CACHE_NAME: c}).logits for c in (cache, fresh))
        assert torch.equal(found, expected)
    del SCORERS["of_this_test"]


@torch.no_grad()
@pytest.mark.parametrize("where", ["after the last layer", "inside the first"])
def test_a_forward_that_failed_with_its_tokens_read_is_refused(method_name, where, ids, llama):
    """The same tokens again would be read twice: the next call says so, and reset() helps. With a single layer too."""
    method = make(method_name, SMALL)
    module = llama.lm_head if where == "after the last layer" else llama.model.layers[0].self_attn.o_proj

    def stop(*args):
        raise torch.OutOfMemoryError("no room")

    with compress(llama, method):
        cache = prefill(llama, ids[:, :20])[CACHE_NAME]
        hook = module.register_forward_pre_hook(stop)
        with pytest.raises(torch.OutOfMemoryError):
            llama(ids[:, 20:24], **{CACHE_NAME: cache})
        hook.remove()
        for _ in range(2):
            with pytest.raises(ValueError, match=r"failed midway.*reset"):
                llama(ids[:, 20:24], **{CACHE_NAME: cache})
        cache.reset()
        assert torch.equal(llama(ids, **{CACHE_NAME: cache}).logits, llama(ids).logits)


@torch.no_grad()
def test_sliding_layers_stay_too(ids):
    """A crop that our layers refuse is refused before a sliding layer has dropped tokens."""
    model = get_model("qwen3_sliding")
    with compress(model, TreeKV(budget=16, n_recent=4, block=2)):
        cache = prefill(model, ids[:, :20])[CACHE_NAME]
        before = content(cache)
        with pytest.raises(ValueError, match="cannot take tokens back"):
            cache.crop(-3)
        with pytest.raises(ValueError, match="rows"):
            model(ids[:1, 20:22], **{CACHE_NAME: cache})
        assert same(content(cache), before)


def test_a_cache_may_be_copied(method_name, ids, llama):
    """deepcopy, as transformers' guides do with a prompt that is read once: two ways on, neither disturbs the other."""
    with compress(llama, make(method_name, SMALL)), torch.no_grad():
        cache = prefill(llama, ids[:, :30])[CACHE_NAME]
        twin = copy.deepcopy(cache)
        first = llama(ids[:, 30:34], **{CACHE_NAME: cache}).logits
        assert torch.equal(llama(ids[:, 30:34], **{CACHE_NAME: twin}).logits, first)


@pytest.mark.parametrize("name", ["kivi", "vqkv", "fourier_attention"])
def test_dropout_over_compressed_tokens_is_refused(name):
    """In training. The prompt drops the weights of its own tokens; after eval() the cache goes on."""
    model = copy.deepcopy(get_model("llama"))
    model.config.attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    text = torch.randint(3, 90, (1, 44), generator=torch.Generator().manual_seed(3))
    with compress(model, make(name, SMALL)), torch.no_grad():
        cache = model.eval()(text[:, :40], use_cache=True)[CACHE_NAME]
        before = content(cache)
        with pytest.raises(ValueError, match=r"attention_dropout=0.5: \w+ attends to compressed tokens without"):
            model.train()(text[:, 40:], **{CACHE_NAME: cache})
        assert same(content(cache), before)
        model.eval()(text[:, 40:], **{CACHE_NAME: cache})
        assert cache.get_seq_length() == 44
        dropped, whole = model.train()(text).logits, model.eval()(text).logits
        assert not torch.allclose(dropped, whole)

"""What every method promises, on every model family. A method in the registry is in this suite."""

from __future__ import annotations

import json

import pytest
import torch
from cache_cases import LARGE, SMALL, get_model, make, method_of, needed_file, relative, token_by_token
from transformers import DynamicCache

from fathom.caches import METHODS, build_cache, cache_shape, compress, compression_report, from_dict, prefill
from fathom.caches.base import CompressedLayer
from fathom.caches.budgets import NotReachable
from fathom.caches.token_budget import TokenBudget
from fathom.caches.versions import CACHE_NAME

GREEDY = {"do_sample": False, "max_new_tokens": 8}
STOCK: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}  # by family: logits, greedy and beam search


def test_room_for_every_token_is_the_stock_model(model, family, method_name, ids):
    """Logits within 1e-5, greedy and beam generation identical, whole or chunked prompt, continued conversations."""
    method = make(method_name, LARGE, family)
    if family not in STOCK:
        beams = model.generate(ids, num_beams=3, **GREEDY)
        STOCK[family] = model(ids).logits.detach(), model.generate(ids, **GREEDY), beams
    stock, stock_ids, stock_beams = STOCK[family]
    with compress(model, method):
        assert relative(model(ids).logits, stock) < 1e-5
        assert relative(model(ids, use_cache=False).logits, stock) < 1e-5
        assert torch.equal(model.generate(ids, **GREEDY), stock_ids)
        assert torch.equal(model.generate(ids, num_beams=3, **GREEDY), stock_beams)
        assert torch.equal(model.generate(ids, prefill_chunk_size=7, **GREEDY), stock_ids)
        assert relative(prefill(model, ids, chunk_size=9).logits, stock[:, -1:]) < 1e-5
        cache = build_cache_inside(model, method, ids[:, :20])
        assert torch.equal(model.generate(ids, **{CACHE_NAME: cache}, **GREEDY), stock_ids)
    assert torch.equal(model.generate(ids, **GREEDY), stock_ids)


def build_cache_inside(model, method, ids):
    return prefill(model, ids)[CACHE_NAME]


def test_bytes_are_the_closed_form_and_the_storages(method_name, ids, llama):
    """nbytes() = closed form = Σ distinct storages; seen tokens are counted, stored ones bounded."""
    method = make(method_name, SMALL)
    with compress(llama, method):
        for prompt, generated in ((3, 0), (12, 3), (16, 0), (17, 1), (40, 0), (40, 9), (25, 30)):
            cache = prefill(llama, ids[:, :prompt])[CACHE_NAME]
            for step in range(generated):
                llama(ids[:, step : step + 1], **{CACHE_NAME: cache})
            assert cache.get_seq_length() == prompt + generated
            assert cache.nbytes() == method.cache_bytes(cache_shape(llama, batch=2), prompt, generated)
            held = [t for layer in cache.layers for state in layer.states for _, t in state.tensors()]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
            assert cache.nbytes() == sum(storages.values())
            if hasattr(method, "budget") and method.shortest_call == 1:
                assert all(layer.states[0].stored <= method.budget for layer in cache.layers)
            report = compression_report(cache)
            assert report.compressed_bytes == cache.nbytes()
            assert report.full_bytes == METHODS["full"]().cache_bytes(cache_shape(llama, batch=2), prompt + generated)
            assert f"{cache.nbytes():,}" in str(report)


def test_left_padded_rows_equal_the_rows_alone(model, family, method_name, ids):
    method = make(method_name, SMALL, family)
    lengths = (40, 33, 40, 5)
    rows = [ids[i % 2, -length:] + 0 for i, length in enumerate(lengths)]
    batch = torch.stack([torch.cat((row.new_zeros(40 - len(row)), row)) for row in rows])
    mask = (batch != 0).long()
    for options in (GREEDY, dict(GREEDY, num_beams=2), dict(GREEDY, prefill_chunk_size=6)):
        with compress(model, method):
            together = model.generate(batch, attention_mask=mask, **options)
            if "prefill_chunk_size" in options:
                continue  # chunk borders lie elsewhere in a shorter row: only checked not to fail
            for i in (1, 3) if "num_beams" in options else (0, 1, 3):
                alone = model.generate(rows[i][None], **options)
                assert torch.equal(together[i, 40:], alone[0, len(rows[i]) :]), (i, options)
            assert torch.equal(together[2], together[0])  # the same row twice


def test_left_padded_logits_equal_the_rows_alone(model, family, method_name, ids):
    method = make(method_name, SMALL, family)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with compress(model, method):
        for use_cache in (True, False):
            together = model(ids, attention_mask=mask, position_ids=positions, use_cache=use_cache).logits
            alone = model(ids[:1, 7:], use_cache=use_cache).logits
            assert relative(together[:1, 7:], alone) < 1e-5


def test_padding_inside_a_row_is_refused(method_name, ids, llama):
    mask = torch.ones_like(ids)
    mask[1, -1] = 0
    with compress(llama, make(method_name, SMALL)):
        with pytest.raises(ValueError, match="pad on the left"):
            llama(ids, attention_mask=mask)
        out = llama(ids, attention_mask=mask, use_cache=False).logits  # nothing is kept: pads at the end see, unseen
        assert relative(out[1, :-1], llama(ids[1:, :-1], use_cache=False).logits[0]) < 1e-5


def test_later_tokens_do_not_change_earlier_outputs(method_name, ids, llama):
    method = make(method_name, SMALL)
    changed = ids.clone()
    changed[:, 30] = changed[:, 30] % 96 + 1
    with compress(llama, method):
        a, b = llama(ids).logits, llama(changed).logits
    assert torch.equal(a[:, :30], b[:, :30]) or relative(a[:, :30], b[:, :30]) < 1e-6
    assert relative(a[:, 30:], b[:, 30:]) > 1e-3


def test_rows_can_be_reordered_repeated_selected(method_name, ids, llama):
    """After reorder, the continuation of row i is that of the row it came from, also in a padded batch."""
    method = make(method_name, SMALL)
    batch = torch.cat((ids, ids.flip(1)))
    mask = torch.ones_like(batch)
    mask[0, :9] = 0
    chosen = torch.tensor([2, 0, 0, 3])
    following = torch.tensor([[5], [6], [7], [8]])

    def run(order, select):
        cache = prefill(llama, batch, attention_mask=mask)[CACHE_NAME]
        select(cache)
        steps = []
        full = torch.cat((mask[order], torch.ones(len(order), 1, dtype=torch.long)), 1)
        for _ in range(3):
            positions = full.sum(-1, keepdim=True) - 1
            call = {"attention_mask": full, "position_ids": positions}
            steps.append(llama(following[order], **call, **{CACHE_NAME: cache}).logits)
            full = torch.cat((full, torch.ones(len(order), 1, dtype=torch.long)), 1)
        return torch.cat(steps, 1)

    with compress(llama, method):
        plain = run(torch.arange(4), lambda cache: None)
        assert relative(run(chosen, lambda cache: cache.reorder_cache(chosen)), plain[chosen]) < 1e-5
        assert relative(run(chosen[:2], lambda cache: cache.batch_select_indices(chosen[:2])), plain[chosen[:2]]) < 1e-5
        twice = torch.arange(4).repeat_interleave(2)
        assert relative(run(twice, lambda cache: cache.batch_repeat_interleave(2)), plain[twice]) < 1e-5


def test_reset_is_a_fresh_cache(method_name, ids, llama):
    with compress(llama, make(method_name, SMALL)):
        cache = prefill(llama, ids)[CACHE_NAME]
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.nbytes() == 0
        again = prefill(llama, ids[:, :30], cache=cache).logits
        assert torch.equal(again, prefill(llama, ids[:, :30]).logits)


def test_first_logit_that_differs(method_name, ids, llama):
    """Fed token by token under budget M, the first logit that can differ from the full cache is at position M + 1, or M
    where room is made before the new token attends."""
    method = token_by_token(make(method_name, SMALL))
    if not method.sequential or not hasattr(method, "budget"):
        pytest.skip("no budget, or none that holds token by token")
    long = torch.cat((ids, ids.flip(1)), 1)[:1]
    stock = llama(long).logits
    with compress(llama, method):
        step = llama(long).logits
    error = ((step - stock).abs().amax(-1) / stock.abs().max())[0]
    first = method.budget + isinstance(method, TokenBudget)
    assert error[:first].max() < 1e-5 and error[first] > 1e-4, error[:20]


def test_one_call_equals_single_steps_where_the_method_is_sequential(method_name, ids, llama):
    method = token_by_token(make(method_name, SMALL))
    if not method.sequential:
        pytest.skip("a prompt is not its tokens one by one")
    with compress(llama, method):
        whole = llama(ids).logits
        cache = build_cache_inside(llama, method, ids[:, :1])
        steps = [llama(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(1, 40)]
    assert relative(torch.cat(steps, 1), whole[:, 1:]) < 1e-5


def test_a_fraction_of_the_bytes_is_kept_within(method_name, ids):
    """What `at_fraction` chooses holds at most that, in calls of the given length, or the method says its least."""
    cls, model, text, reached = method_of(method_name), get_model("wide"), ids.repeat(1, 5)[:1], 0
    shape = cache_shape(model)
    for fraction in (1.0, 0.5, 0.2, 0.001):
        method = cls.at_fraction(fraction, shape, 200, 32, **needed_file(cls, "wide"))
        if isinstance(method, NotReachable):
            assert fraction < method.minimum and "not reachable" in str(method)
            continue
        reached += 1
        with compress(model, method):
            cache = prefill(model, text, chunk_size=32)[CACHE_NAME]
        assert cache.nbytes() <= fraction * shape.full_bytes(200)
    assert reached and isinstance(method, NotReachable)


def test_turns_of_a_conversation_share_a_cache(method_name, ids, llama):
    """A cache made under `compress`: the second turn goes on from it, and equals one made before entering."""
    method, results = make(method_name, SMALL), []
    caches = [build_cache(llama, method)]
    with compress(llama, method):
        caches.append(build_cache(llama, method))
        for cache in caches:
            first = llama.generate(ids[:, :30], **{CACHE_NAME: cache}, **GREEDY)
            assert cache.get_seq_length() == first.shape[1] - 1
            text = torch.cat((first, ids[:, 30:]), dim=1)
            results.append(llama.generate(text, **{CACHE_NAME: cache}, **GREEDY))
            assert cache.get_seq_length() == results[-1].shape[1] - 1
    assert torch.equal(*results)


def test_context_restores_the_model(method_name, ids, llama):
    before = {id(m): (len(m._forward_hooks), len(m._forward_pre_hooks)) for m in llama.modules()}
    attention = llama.config._attn_implementation
    with pytest.raises(RuntimeError, match="stop"), compress(llama, make(method_name, SMALL)):
        llama.generate(ids, **GREEDY)
        raise RuntimeError("stop")
    assert {id(m): (len(m._forward_hooks), len(m._forward_pre_hooks)) for m in llama.modules()} == before
    assert llama.config._attn_implementation == attention
    assert not any("_fathom_binding" in m.__dict__ for m in llama.modules())


def test_two_models_do_not_interfere(method_name, ids, llama):
    other = get_model("qwen3")
    expected = other.generate(ids, **GREEDY)
    with compress(llama, make(method_name, SMALL)):
        alone = llama.generate(ids, **GREEDY)
        assert torch.equal(other.generate(ids, **GREEDY), expected)
        with compress(other, make("streaming_llm", SMALL)):
            other.generate(ids, **GREEDY)
            assert torch.equal(llama.generate(ids, **GREEDY), alone)


def test_sliding_layers_are_left_alone(method_name, ids):
    model = get_model("qwen3_sliding")
    with compress(model, make(method_name, SMALL, "qwen3_sliding")):
        cache = prefill(model, ids)[CACHE_NAME]
    kinds = [isinstance(layer, CompressedLayer) for layer in cache.layers]
    assert kinds == [True, True, False]
    report = compression_report(cache)
    assert report.untouched_layers == 1 and report.untouched_bytes > 0 and "sliding" in str(report)


def test_options_survive_json(method_name):
    for size in (SMALL, LARGE):
        method = make(method_name, size)
        assert from_dict(json.loads(json.dumps(method.to_dict()))) == method
        assert hash(method) == hash(from_dict(method.to_dict()))


def test_an_empty_dynamic_cache_is_filled_in_place(method_name, ids, llama):
    """A user who made a DynamicCache for a conversation holds the compressed one after the first call."""
    method = make(method_name, SMALL)
    with compress(llama, method):
        mine = DynamicCache(config=llama.config)
        first = llama.generate(ids, **{CACHE_NAME: mine}, **GREEDY)
        assert mine.get_seq_length() == first.shape[1] - 1
        turn = torch.cat((first, ids[:, :5]), 1)
        known = {"attention_mask": torch.ones_like(turn), **GREEDY}  # generated pad tokens were read, too
        second = llama.generate(turn, **{CACHE_NAME: mine}, **known)
        theirs = build_cache(llama, method) if False else DynamicCache(config=llama.config)
        again = llama.generate(ids, **{CACHE_NAME: theirs}, **GREEDY)
        assert torch.equal(again, first)
        assert torch.equal(llama.generate(turn, **{CACHE_NAME: theirs}, **known), second)


def test_sampling_and_pipeline(method_name, ids, llama):
    with compress(llama, make(method_name, SMALL)):
        torch.manual_seed(0)
        a = llama.generate(ids, do_sample=True, max_new_tokens=8)
        torch.manual_seed(0)
        assert torch.equal(a, llama.generate(ids, do_sample=True, max_new_tokens=8))


def test_taking_tokens_back_is_refused(method_name, ids, llama):
    with compress(llama, make(method_name, SMALL)):
        cache = prefill(llama, ids)[CACHE_NAME]
        assert not cache.is_croppable
        with pytest.raises(ValueError, match="cannot take tokens back"):
            cache.crop(-3)
        with pytest.raises(ValueError, match=r"crop|take tokens back"):
            llama.generate(ids[:1], prompt_lookup_num_tokens=3, **GREEDY)


def test_half_precision_stays_in_range(method_name, ids, llama):
    model = get_model("llama")
    half = type(model)(model.config).to(torch.bfloat16).eval()
    half.load_state_dict(model.state_dict())
    with compress(half, make(method_name, SMALL)):
        out = half(ids)
        assert out.logits.dtype == torch.bfloat16 and out.logits.isfinite().all()
        assert out[CACHE_NAME].nbytes() < compression_report(out[CACHE_NAME]).full_bytes or method_name == "full"


def test_every_token_budget_switch_runs(method_name, ids, llama):
    if not issubclass(method_of(method_name), TokenBudget):
        pytest.skip("not token-budgeted")
    switches = {"positions": ("slot", "original"), "granularity": ("kv_head", "layer"), "group_reduce": ("max", "sum")}
    for option, value in ((option, value) for option, values in switches.items() for value in values):
        method = make(method_name, SMALL, **{option: value})
        with compress(llama, method):
            out = llama(ids)
            assert out.logits.isfinite().all()
            assert out[CACHE_NAME].nbytes() == method.cache_bytes(cache_shape(llama, batch=2), 40)


def test_a_cache_moves_out_of_inference_mode(method_name, ids, llama):
    """Tensors made in inference mode may not be written to outside it."""
    method, logits = make(method_name, SMALL), []
    with compress(llama, method):
        for mode in (torch.no_grad, torch.inference_mode):
            cache = build_cache(llama, method)
            with mode():
                llama(ids[:, :20], **{CACHE_NAME: cache})
            with torch.no_grad():
                steps = [llama(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(20, 40)]
            logits.append(torch.cat(steps, dim=1))
    assert torch.equal(*logits)


def test_an_interrupted_forward_leaves_no_trace_but_its_cache(method_name, ids, llama):
    """An error or Ctrl-C between two layers: the next call is right, the half-filled cache is refused until reset."""

    def stop(error):
        def hook(*args):
            raise error

        return llama.model.layers[1].register_forward_pre_hook(hook)

    method = make(method_name, SMALL)
    with compress(llama, method), torch.no_grad():
        expected = llama(ids).logits
        for error in (RuntimeError("stop"), KeyboardInterrupt()):
            cache, hook = build_cache(llama, method), stop(error)
            with pytest.raises(type(error)):
                llama(ids, **{CACHE_NAME: cache})
            hook.remove()
            assert torch.equal(llama(ids).logits, expected)
            with pytest.raises(ValueError, match=r"failed midway.*reset"):
                llama(ids, **{CACHE_NAME: cache})
            cache.reset()
            with pytest.raises(IndexError):  # in the embedding: no layer was reached, the cache is as before
                llama(ids + 1000, **{CACHE_NAME: cache})
            mask = torch.ones_like(ids)
            mask[1, :20] = 0
            position = (mask.cumsum(-1) - 1).clamp(min=0)
            padded = llama(ids, attention_mask=mask, position_ids=position, **{CACHE_NAME: cache}).logits
            assert relative(padded[1, 20:], llama(ids[1:, 20:]).logits[0]) < 1e-5

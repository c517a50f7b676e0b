"""Rows of different lengths: what is fed how, with and without positions, and which rows go on."""

from __future__ import annotations

import pytest
import torch
from cache_cases import LARGE, SMALL, get_model, make, relative

from fathom.caches import FreqKV, Full, TreeKV, build_cache, compress, compression_report, prefill
from fathom.caches.versions import CACHE_NAME


def padded(ids: torch.Tensor, pads: int) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    return mask


def test_rows_selected_out_of_a_group(method_name, ids, llama):
    """Only the padded, or only the whole row goes on: the group of the other is empty."""
    method, mask, more = make(method_name, SMALL), padded(ids, 8), torch.tensor([[3, 4, 5, 6, 7]])
    with compress(llama, method), torch.no_grad():
        for row, first in ((0, 8), (1, 0)):
            cache = prefill(llama, ids, attention_mask=mask)[CACHE_NAME]
            cache.batch_select_indices(torch.tensor([row]))
            for _ in range(2):  # a call of several tokens, and the next
                whole = torch.cat((mask[row : row + 1], torch.ones(1, cache.get_seq_length() - 40 + 5)), 1).long()
                positions = (whole.cumsum(-1) - 1)[:, -5:].clamp(min=0)
                got = llama(more, attention_mask=whole, position_ids=positions, **{CACHE_NAME: cache}).logits
            alone = prefill(llama, ids[row : row + 1, first:])[CACHE_NAME]
            llama(more, **{CACHE_NAME: alone})
            assert relative(got, llama(more, **{CACHE_NAME: alone}).logits) < 1e-5
            assert compression_report(cache).compressed_bytes >= compression_report(alone).compressed_bytes
            cache.batch_repeat_interleave(2)
            again = llama(more.repeat(2, 1), **{CACHE_NAME: cache}).logits
            assert relative(again[:1], llama(more, **{CACHE_NAME: alone}).logits) < 1e-5


def test_prefill_goes_on_with_a_mask(model, family, method_name, ids):
    """A second text read on top of a padded first one: positions go on, too."""
    method, mask = make(method_name, LARGE, family), padded(ids, 8)
    with compress(model, method), torch.no_grad():
        whole = prefill(model, ids, attention_mask=mask).logits
        cache = prefill(model, ids[:, :25], attention_mask=mask[:, :25])[CACHE_NAME]
        got = prefill(model, ids[:, 25:], cache=cache, attention_mask=mask, chunk_size=6).logits
        assert relative(got, whole) < 1e-5
        cache = prefill(model, ids[:, :25], attention_mask=mask[:, :25])[CACHE_NAME]
        assert relative(prefill(model, ids[:, 25:], cache=cache, chunk_size=6).logits, whole) < 1e-5 or (
            family == "qwen3_sliding"  # its own layers need the mask
        )


def test_a_mask_of_another_length_is_refused(ids, llama):
    with compress(llama, Full()):
        cache = prefill(llama, ids)[CACHE_NAME]
        for mask in (torch.ones(2, 5), torch.ones(2, 46)):
            with pytest.raises(ValueError, match=r"cover the 40 tokens of the cache and the 5 new ones, \[rows, 45\]"):
                prefill(llama, ids[:, :5], cache=cache, attention_mask=mask)
        with pytest.raises(ValueError, match="attention_mask of shape"):
            prefill(llama, ids, attention_mask=torch.ones(2, 39))


def test_without_positions_a_padded_row_equals_the_row_alone(model, family, method_name, ids):
    """Direct forwards: keys are rotated at the row's own positions, so codes, coefficients and scores are its own."""
    method, mask = make(method_name, SMALL, family), padded(ids, 13)
    with compress(model, method), torch.no_grad():
        for use_cache in (True, False):
            together = model(ids, attention_mask=mask, use_cache=use_cache)
            alone = model(ids[:1, 13:], use_cache=use_cache)
            assert relative(together.logits[:1, 13:], alone.logits) < 1e-5
            assert relative(together.logits[1:], model(ids[1:], use_cache=use_cache).logits) < 1e-5
            if not use_cache:
                continue
            for step in range(3):  # with the mask of all tokens, or with none
                mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), 1)
                known = {} if step == 1 and family != "qwen3_sliding" else {"attention_mask": mask}
                a = model(ids[:, step : step + 1], **known, **{CACHE_NAME: together[CACHE_NAME]}).logits
                b = model(ids[:1, step : step + 1], **{CACHE_NAME: alone[CACHE_NAME]}).logits
                assert relative(a[:1], b) < 1e-5, step
            mask = mask[:, :40]


def test_embeddings_and_training_take_their_positions_too(ids, llama):
    mask, embeddings = padded(ids, 13), llama.get_input_embeddings()(ids)
    with compress(llama, make("scored", SMALL, prefill="chunked", chunk=7)):
        alone = llama(ids[:1, 13:], use_cache=False).logits
        for given in ({"inputs_embeds": embeddings}, {"input_ids": ids, "use_cache": False}):
            assert relative(llama(attention_mask=mask, **given).logits[:1, 13:], alone) < 1e-5


def test_a_mask_may_be_written_to_and_passed_again(method_name, ids, llama):
    mask = torch.ones_like(ids).bool()
    with compress(llama, make(method_name, SMALL)), torch.no_grad():
        llama(ids, attention_mask=mask, use_cache=False)
        mask[0, :7] = False
        got = llama(ids, attention_mask=mask, use_cache=False).logits
        assert relative(got[:1, 7:], llama(ids[:1, 7:], use_cache=False).logits) < 1e-5
        assert not hasattr(mask, "_fathom_groups")


def test_a_report_counts_rows_not_groups(ids, llama):
    """Rows of 4, 20 and 20 tokens: nothing was dropped under Full; under a budget, 4 + 8 + 8 of 44 are left."""
    rows = torch.cat((ids, ids[:1]))[:, :20]
    for method, ratio in ((Full(), 1.0), (TreeKV(budget=8, n_sink=1, n_recent=3, block=1), 20 / 44)):
        with compress(llama, method), torch.no_grad():
            report = compression_report(llama(rows, attention_mask=padded(rows, 16), use_cache=True)[CACHE_NAME])
        assert report.to_dict()["nominal_ratio"] == report.nominal_ratio == pytest.approx(ratio)
        assert f"{ratio:.4f} nominal" in str(report) and "20 (pads included; 14.6667 a row" in str(report)
        assert report.tokens_seen == 20 and report.rows == 3


def test_checkpointed_training_with_padding(ids):
    """Backward calls attention again, outside the forward: the padding is still that of the forward."""
    model = type(get_model("llama"))(get_model("llama").config).train()
    model.load_state_dict(get_model("llama").state_dict())
    gradients = []
    with compress(model, FreqKV(budget=16, n_sink=2)):
        for checkpointed in (False, True):
            model.zero_grad()
            (model.gradient_checkpointing_enable if checkpointed else model.gradient_checkpointing_disable)()
            mask = padded(ids, 9).bool()
            loss = model(ids, attention_mask=mask, labels=ids).loss
            mask.fill_(True)
            loss.backward()
            gradients.append(model.model.embed_tokens.weight.grad.clone())
    assert relative(*gradients) < 1e-5


def test_an_interrupted_prompt_does_not_shift_positions(ids, llama):
    """Pads of a forward that failed before its layers are not counted."""
    mask = padded(ids, 13)
    with compress(llama, TreeKV(budget=16, n_recent=4, block=2)), torch.no_grad():
        cache = build_cache(llama, TreeKV(budget=16, n_recent=4, block=2))
        with pytest.raises(IndexError):
            llama(ids + 1000, attention_mask=mask, **{CACHE_NAME: cache})
        got = llama(ids, attention_mask=mask, **{CACHE_NAME: cache}).logits
        assert relative(got[:1, 13:], llama(ids[:1, 13:]).logits) < 1e-5
        assert cache.groups.before == [0, 13] or cache.groups.before == [13, 0]


def test_a_mask_that_hides_tokens_of_the_cache_is_refused(ids, llama):
    """At the next call of several tokens; rows still running are right until then, and rows can be taken out."""
    mask, one = padded(ids, 8), torch.ones(2, 1, dtype=torch.long)
    with compress(llama, Full()), torch.no_grad():
        cache = prefill(llama, ids, attention_mask=mask)[CACHE_NAME]
        alone = prefill(llama, ids[:1, 8:])[CACHE_NAME]
        for step in range(3):  # row 1 has finished
            mask = torch.cat((mask, torch.tensor([[1], [0]])), 1)
            got = llama(ids[:, step : step + 1], attention_mask=mask, **{CACHE_NAME: cache}).logits[:1]
            assert relative(got, llama(ids[:1, step : step + 1], **{CACHE_NAME: alone}).logits) < 1e-5
        hole, unpadded = mask.clone(), torch.ones_like(mask)
        hole[0, 20] = 0
        for wrong in (mask, hole, unpadded):
            with pytest.raises(ValueError, match="other pads among the tokens of the cache"):
                llama(ids[:, :3], attention_mask=torch.cat((wrong, one, one, one), 1), **{CACHE_NAME: cache})
        cache.batch_select_indices(torch.tensor([0]))
        known = torch.cat((mask[:1], one[:1], one[:1], one[:1]), 1)
        got = llama(ids[:1, :3], attention_mask=known, **{CACHE_NAME: cache}).logits
        assert relative(got, llama(ids[:1, :3], **{CACHE_NAME: alone}).logits) < 1e-5

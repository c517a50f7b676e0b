"""Entering `compress` tries the model: whether it runs, and whether padded rows are the rows alone."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from cache_cases import SIZES, SMALL, VOCABULARY, get_model, make, randomize, relative

from fathom.caches import KIVI, TOVA, Full, TreeKV, build_cache, compress, prefill
from fathom.caches import trial as trial_module
from fathom.caches.versions import CACHE_NAME

DECODER = {"is_decoder": True, "d_model": 32, "decoder_layers": 2, "encoder_layers": 2}
DECODER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
COMMON = {**SIZES, "pad_token_id": 1, "num_hidden_layers": 2}
GQA = {"num_key_value_heads": 2, **COMMON}


def tiny(name: str, **fields):
    """The family's causal language model, where this transformers has it."""
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**fields))
    return randomize(model).eval()


def opt():
    return tiny("OPT", ffn_dim=48, word_embed_proj_dim=32, **COMMON)


OTHERWISE = {  # positions from padding_idx + 1, learned or not; and columns, whatever the mask says
    "roberta": lambda: tiny("Roberta", is_decoder=True, **COMMON),
    "camembert": lambda: tiny("Camembert", is_decoder=True, **COMMON),
    "data2vec": lambda: tiny("Data2VecText", is_decoder=True, **COMMON),
    "bart": lambda: tiny("Bart", **DECODER, vocab_size=VOCABULARY, pad_token_id=1, max_position_embeddings=64),
}
KEYS_FIRST = {
    "xglm": lambda: tiny("XGLM", num_layers=2, attention_heads=4, ffn_dim=48, **DECODER, vocab_size=VOCABULARY),
    "trocr": lambda: tiny("TrOCR", **DECODER, vocab_size=VOCABULARY),
    "mvp": lambda: tiny("Mvp", **DECODER, vocab_size=VOCABULARY),
    "jetmoe": lambda: tiny("JetMoe", kv_channels=8, num_local_experts=2, num_experts_per_tok=1, **GQA),
    "doge": lambda: tiny("Doge", **GQA),
}


@pytest.fixture
def ids():
    return torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("family", OTHERWISE)
def test_padded_rows_are_refused_where_positions_are_counted_otherwise(family, ids):
    """Rows of one length are the stock model's in every way of calling; padded ones are refused and leave no trace."""
    model, mask = OTHERWISE[family](), torch.ones_like(ids)
    stock = model(ids, attention_mask=mask).logits
    mask[1, :4] = 0
    with compress(model, Full()):
        for given in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(ids)}):
            assert relative(model(ids, **given).logits, stock) < 1e-5
        cache = prefill(model, ids[:, :8])[CACHE_NAME]
        for call in (
            lambda: model(ids, attention_mask=mask),
            lambda: model(ids, attention_mask=mask, use_cache=False),
            lambda: prefill(model, ids, attention_mask=mask, chunk_size=5),
        ):
            with pytest.raises(ValueError, match=r"pads on the left.*one at a time"):
                call()
        steps = [model(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(8, 12)]
        assert relative(torch.cat(steps, dim=1), stock[:, 8:]) < 1e-5
        right = torch.ones_like(ids)
        right[1, 9:] = 0  # pads after the text are harmless where nothing is kept
        assert relative(model(ids, attention_mask=right, use_cache=False).logits[1, :9], stock[1, :9]) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("build", [opt, lambda: get_model("gpt_neox"), lambda: tiny("BioGpt", **COMMON)])
def test_padded_rows_are_exact_where_they_are_taken(build, ids):
    model, mask = build(), torch.ones_like(ids)
    mask[1, :4] = 0
    alone = model(ids[1:, 4:]).logits
    with compress(model, Full()):
        assert relative(model(ids.masked_fill(mask == 0, 1), attention_mask=mask).logits[1:, 4:], alone) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("family", KEYS_FIRST)
def test_attention_that_touches_keys_first_is_refused_on_entry(family, ids):
    model = KEYS_FIRST[family]()
    stock, before = model(ids).logits, model.config._attn_implementation
    for _ in range(2):
        with pytest.raises(ValueError, match=r"does not run on a compressed cache.*full cache"):
            compress(model, TOVA(budget=8, positions="original")).__enter__()
    assert model.config._attn_implementation == before and torch.equal(model(ids).logits, stock)
    plain = model(ids, **{CACHE_NAME: build_cache(model, KIVI(bits=8, group=8, residual=8), equal_rows=True)})
    assert relative(plain.logits, stock) < 1e-5  # a plain cache returns tensors, and nothing of it was dropped


def test_full_layers_without_positions_beside_sliding_ones_with(ids):
    """Beam: `rope_parameters` has no entry for full attention, and slot positions leave those layers alone."""
    kinds = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 5}
    model = tiny("Beam", **{**GQA, "num_hidden_layers": 3, "num_local_experts": 2, "num_experts_per_tok": 1, **kinds})
    assert model.config.rope_parameters["full_attention"] is None
    stock, mask = model(ids).logits, torch.ones_like(ids)
    mask[1, :4] = 0
    with compress(model, TreeKV(budget=64)), torch.no_grad():
        cache = prefill(model, ids[:, :8])[CACHE_NAME]
        steps = [model(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(8, 12)]
        assert relative(torch.cat(steps, dim=1), stock[:, 8:]) < 1e-5
        padded = model(ids, attention_mask=mask).logits[1:, 4:]
        assert relative(padded, model(ids[1:, 4:]).logits) < 1e-5


def test_models_that_see_later_tokens_are_refused():
    model = transformers.BertLMHeadModel(transformers.BertConfig(is_decoder=False, **COMMON))
    with pytest.raises(ValueError, match="does not attend causally"), compress(model, Full()):
        pass


def test_a_model_is_tried_once_and_left_as_it_was(ids, monkeypatch):
    """In training mode too: no dropout falls, no random number is drawn, and the mode stays."""
    model = copy.deepcopy(get_model("llama")).train()
    model.model.layers[0].eval()
    modes, forwards = [module.training for module in model.modules()], []
    hook = model.register_forward_pre_hook(lambda *args: forwards.append(1))
    state = torch.get_rng_state()
    for method in (TreeKV(budget=8), Full()):
        with compress(model, method):
            pass
    hook.remove()
    assert torch.equal(torch.get_rng_state(), state) and len(forwards) == 2
    assert [module.training for module in model.modules()] == modes and model in trial_module.TRIED


def beam_scores(model, method, ids, mask, generated):
    """log p of each generated row, every row by itself, token by token, under the method."""
    scores = []
    for row, start in zip(generated, (mask == 0).sum(1).repeat_interleave(len(generated) // len(ids)).tolist()):
        with compress(model, method):
            out, total = prefill(model, row[None, start : ids.shape[1]]), 0.0
            for token in row[ids.shape[1] :]:
                total += out.logits[0, -1].log_softmax(-1)[token].item()
                out = model(token.view(1, 1), **{CACHE_NAME: out[CACHE_NAME]})
        scores.append(total)
    return torch.tensor(scores)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_beams_are_reordered_exactly(method_name, padded, llama):
    """The score of every beam is that of its tokens, fed alone to a cache of their own."""
    ids = torch.randint(1, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(3))
    method, mask = make(method_name, SMALL), torch.ones_like(ids)
    mask[0, : 5 * padded] = 0
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 7, "length_penalty": 0.0}
    options |= {"do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    with compress(llama, method):
        out = llama.generate(ids, attention_mask=mask, **options)
    expected = beam_scores(llama, method, ids, mask, out.sequences)
    torch.testing.assert_close(out.sequences_scores, expected, rtol=1e-4, atol=1e-4)

"""RASAT on T5: against transformers' T5 where they agree, and section 7 of the sheet."""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from fathom import FathomT5Config, FathomT5ForConditionalGeneration
from fathom.models.encoder_configs import FathomLongT5Config
from fathom.models.registry import build_options
from fathom.models.seq2seq_longt5 import FathomLongT5ForConditionalGeneration
from fathom.models.seq2seq_t5 import check_ids
from fathom.tables.rasat import RELATIONS, Rasat, count, ids
from fathom.tables.text.configuration import FathomTableT5Config
from fathom.tables.text.models import FathomTableT5ForConditionalGeneration
from tiny import assert_close, perturb

VOCABULARY = 61


@functools.cache
def stock() -> tuple[Path, T5ForConditionalGeneration]:
    """A tiny T5 as transformers saves it."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_decoder_layers=2, num_heads=3,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, dropout_rate=0.0,
        decoder_start_token_id=0, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    perturb(model)
    folder = Path(tempfile.mkdtemp())
    model.save_pretrained(folder)
    return folder, model.eval()


def rasat(attn: str = "sdpa", **options) -> FathomT5ForConditionalGeneration:
    torch.manual_seed(1)
    return FathomT5ForConditionalGeneration.from_pretrained(
        stock()[0], relations={"name": "rasat", **options}, attn_implementation=attn
    ).eval()


def batch(*lengths: int, rows: int = 46) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = max(lengths)
    real = torch.arange(size) < torch.tensor(lengths)[:, None]
    relations = torch.randint(0, rows, (len(lengths), size, size), generator=generator, dtype=torch.uint8)
    relations = relations.masked_fill(~(real[:, :, None] & real[:, None]), 0)
    return {
        "input_ids": torch.randint(3, VOCABULARY, (len(lengths), size), generator=generator),
        "attention_mask": real.long(),
        "labels": torch.randint(3, VOCABULARY, (len(lengths), 5), generator=generator),
        "relation_ids": relations,
    }


def only(given: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: given[name] for name in names}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_zero_tables_or_no_relations_are_t5(attn):
    given = batch(9, 6)
    expected = stock()[1](**only(given, "input_ids", "attention_mask", "labels"))
    zero = rasat(attn, init="zero")(**given)
    assert_close(zero.logits, expected.logits)
    assert_close(zero.loss, expected.loss)
    plain = rasat(attn)  # normal tables: row 0 alone is read
    given["relation_ids"] = torch.zeros_like(given["relation_ids"])
    assert_close(plain(**given).logits, expected.logits)
    assert_close(plain(**only(given, "input_ids", "attention_mask", "labels")).logits, expected.logits)
    with pytest.raises(AssertionError):
        assert_close(rasat(attn)(**batch(9, 6)).logits, expected.logits, 1e-2)


def test_the_encoder_is_the_sheets():
    """Every layer by transformers' parts and the equations with a vector of each pair, in float64."""
    model, given = rasat().double(), batch(7, rows=46)
    x = model.shared(given["input_ids"])
    keys, values = (table[given["relation_ids"].long()] for table in model.encoder.relations.tables())
    for block in model.encoder.block:
        attention = block.layer[0].SelfAttention
        h = block.layer[0].layer_norm(x)
        q, k, v = (f(h).view(1, 7, 3, 8) for f in (attention.q, attention.k, attention.v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) + torch.einsum("bihd,bijd->bhij", q, keys)
        weights = (scores + model.encoder.block[0].layer[0].SelfAttention.compute_bias(7, 7)).softmax(-1)
        mixed = torch.einsum("bhij,bjhd->bihd", weights, v) + torch.einsum("bhij,bijd->bihd", weights, values)
        x = block.layer[1](x + attention.o(mixed.flatten(2)))
    expected = model.encoder.final_layer_norm(x)
    got = model.encoder(**only(given, "input_ids", "attention_mask", "relation_ids")).last_hidden_state
    assert_close(got, expected, 1e-6)  # T5's norm squares in float32


def test_row_zero_gets_no_gradient_and_the_count_is_the_sheets():
    model = rasat()
    model(**batch(9, 6)).loss.backward()
    for table in (model.encoder.relations.keys, model.encoder.relations.values):
        assert not table.weight[0].any() and not table.weight.grad[0].any() and table.weight.grad[1:].any()
    size = sum(p.numel() for p in model.parameters())
    assert size == sum(p.numel() for p in stock()[1].parameters()) + 2 * 46 * 8


def test_a_row_in_a_padded_batch_is_the_row_alone():
    given, model = batch(9, 6), rasat()
    together = model(**given).logits[1]
    alone = {name: given[name][1:] for name in given}
    for name in ("input_ids", "attention_mask"):
        alone[name] = alone[name][:, :6]
    alone["relation_ids"] = alone["relation_ids"][:, :6, :6]
    assert_close(together, model(**alone).logits[0])
    given["relation_ids"][1, 6:] = 3  # of padding, which nobody reads
    given["relation_ids"][1, :, 6:] = 5
    assert_close(model(**given).logits[1], together)


def test_states_and_weights_of_the_encoder_are_told_apart():
    """transformers takes the second thing that an encoder says for its hidden states, whatever it is."""
    given, model = batch(9, 6), rasat("eager")
    encoder = model.encoder(**only(given, "input_ids", "attention_mask", "relation_ids"), output_attentions=True)
    said = model(**given, output_attentions=True)
    assert said.encoder_hidden_states is None and len(said.encoder_attentions) == len(encoder.attentions) > 0
    for ours, its in zip(said.encoder_attentions, encoder.attentions, strict=True):
        assert torch.equal(ours, its)


def test_beam_search_scores_are_those_of_the_sequence():
    given, model = batch(9, 6), rasat()
    source = only(given, "input_ids", "attention_mask", "relation_ids")
    for beams in (1, 3):
        out = model.generate(
            **source, num_beams=beams, max_new_tokens=6, do_sample=False, output_scores=True,
            return_dict_in_generate=True, length_penalty=0.0,
        )  # fmt: skip
        again = model.generate(**source, num_beams=beams, max_new_tokens=6, do_sample=False, use_cache=False)
        assert torch.equal(out.sequences, again)
        steps = model.compute_transition_scores(
            out.sequences, out.scores, getattr(out, "beam_indices", None), normalize_logits=True
        )
        logits = model(**source, decoder_input_ids=out.sequences[:, :-1]).logits.log_softmax(-1)
        taken = logits.gather(-1, out.sequences[:, 1:, None])[..., 0]
        real = (steps != 0) & torch.isfinite(steps)
        assert real.any()
        torch.testing.assert_close(steps[real], taken[:, : steps.shape[1]][real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (FathomT5Config, FathomT5ForConditionalGeneration),
        (FathomLongT5Config, FathomLongT5ForConditionalGeneration),
        (FathomTableT5Config, FathomTableT5ForConditionalGeneration),
    ],
)
def test_a_decoder_may_be_deeper_than_the_encoder_or_less_deep(config, model):
    for layers in (3, 1):
        torch.manual_seed(0)
        made = model(
            config(
                vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=layers, num_heads=2,
                dropout_rate=0.0, decoder_start_token_id=0,
            )
        ).eval()  # fmt: skip
        ids = torch.arange(3, 12)[None]
        cached, anew = (made.generate(ids, max_new_tokens=5, min_new_tokens=5, use_cache=use) for use in (True, False))
        assert torch.equal(cached, anew) and made.config.num_layers == 2


def test_saved_and_loaded_as_itself_and_as_stock(tmp_path):
    model, given = rasat(init="small", coreference=True), batch(9, 6)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
        assert torch.equal(again(**given).logits, model(**given).logits)
    assert isinstance(again, FathomT5ForConditionalGeneration)
    with pytest.raises(ValueError, match="relations='rasat': stock T5ForConditionalGeneration has no such relations"):
        model.save_stock_pretrained(tmp_path / "stock")
    plain = FathomT5ForConditionalGeneration.from_pretrained(stock()[0])
    plain.save_stock_pretrained(tmp_path / "stock")
    back = T5ForConditionalGeneration.from_pretrained(tmp_path / "stock").eval()
    text = only(given, "input_ids", "attention_mask", "labels")
    assert torch.equal(back(**text).logits, stock()[1](**text).logits)


def test_peft_adapts_it_and_keeps_its_relations(tmp_path):
    given, how = batch(9, 6), LoraConfig(r=2, target_modules=["q", "v"], modules_to_save=["relations"])
    model = get_peft_model(rasat(init="small"), how)
    model(**given).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[-3] for name in trained if "relations" in name} == {"default"} and any(
        "lora_" in name for name in trained
    )
    with torch.no_grad():
        for p in trained.values():
            p.sub_(p.grad)
    expected = model.eval()(**given).logits.detach()
    assert not torch.allclose(expected, rasat(init="small")(**given).logits)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(rasat(init="small"), tmp_path).eval()
    assert torch.equal(again(**given).logits, expected)
    source = only(given, "input_ids", "attention_mask", "relation_ids")
    assert torch.equal(
        again.generate(**source, max_new_tokens=4), again.merge_and_unload().generate(**source, max_new_tokens=4)
    )


def test_recomputed_layers_have_the_same_gradients():
    given, found = batch(9, 6), []
    for how in ("eager", "checkpointed"):
        model = rasat().train()
        if how == "checkpointed":
            model.gradient_checkpointing_enable()
        model(**given).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        assert_close(found[1][name], gradient)


@pytest.mark.slow
def test_compiled_layers_have_the_same_gradients():
    given, found = batch(9, 6), []
    for compiled in (False, True):
        model = rasat().train()
        if compiled:
            for block in model.encoder.block:
                block.compile(backend="aot_eager")
        loss = model(**given).loss
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()} | {"loss": loss.detach()})
    for name, gradient in found[0].items():
        assert_close(found[1][name], gradient)


def test_bf16_runs_and_is_near():
    given = batch(9, 6)
    expected = rasat(init="small")(**given).logits
    got = rasat(init="small").bfloat16()(**given).logits
    assert got.dtype == torch.bfloat16 and (got.float() - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize(
    ("options", "highest"),
    [
        ({}, 45), ({"coreference": True}, 47), ({"dependency": True}, 48),
        ({"coreference": True, "dependency": True}, 50), ({"edges": "minimal"}, 13),
        ({"edges": "minimal_syntax", "dependency": True}, 10), ({"edges": "without_schema_encoding"}, 24),
        ({"edges": "without_schema_linking"}, 29),
    ],
)  # fmt: skip
def test_ids_are_the_official_ones(options, highest):
    """The sheet's table (3.3), and for the smaller sets the counts of the official dictionary."""
    made = build_options("relations", {"name": "rasat", **options})
    numbers = ids(made)
    assert count(made) == highest and set(numbers.values()) - {0} == set(range(1, highest + 1))
    if options == {}:
        for number, name in {
            1: "q-q:-2", 3: "q-q:0", 5: "q-q:2", 6: "t-t:identity", 9: "t-t:fk-both", 10: "c-c:identity", 14: "t-c:pk",
            15: "c-t:pk", 16: "t-c:has", 18: "q-c:exact", 21: "q-c:value", 22: "c-q:exact", 26: "q-t:exact",
            29: "t-q:exact", 32: "q-q:generic", 36: "c-t:generic", 37: "*-*:identity", 43: "c-*:generic", 44: "c-v:has",
            45: "v-c:has",
        }.items():  # fmt: skip
            assert numbers[name] == number
    assert len(RELATIONS) == len(set(RELATIONS)) == 50


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"edges": "all"}, "rasat option edges='all': must be one of"),
        ({"edges": "minimal_syntax"}, "its relations are those of a parse; set dependency=True"),
        ({"symmetric": True}, "symmetric=True: there is no coreference"),
        ({"init": "xavier"}, "init='xavier': must be one of 'normal', 'small', 'zero'"),
        ({"edge": "default"}, r"no option 'edge' \(did you mean 'edges'\?\)"),
    ],
)
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        FathomT5Config(relations={"name": "rasat", **options})


def test_relations_that_do_not_fit_are_refused(tmp_path):
    model, given = rasat(), batch(9, 6)
    with pytest.raises(ValueError, match=r"shape \(2, 8, 8\): 9 tokens need \(2, 9, 9\)"):
        model(**{**given, "relation_ids": given["relation_ids"][:, :8, :8]})
    given["relation_ids"][0, 0, 0] = 46
    with pytest.raises(ValueError, match="the id 46: the tables of this model have 46 rows"):
        model(**given)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tables are of 45 relations, and these options have 48 or others"):
        FathomT5ForConditionalGeneration.from_pretrained(tmp_path, relations={"name": "rasat", "dependency": True})
    with pytest.raises(ValueError, match="relations='rasat' runs on t5, and this is bart"):
        other = copy.deepcopy(model.config)
        other.__class__ = type("Other", (FathomT5Config,), {"host": "bart"})
        other.__post_init__()


@pytest.mark.parametrize("options", [None, {"name": "rasat"}, {"name": "rasat", "edges": "minimal"}])
def test_flops_are_those_that_torch_counts(options):
    config = FathomT5Config(
        vocab_size=41, d_model=24, d_kv=16, d_ff=40, num_layers=2, num_decoder_layers=1, num_heads=3,
        decoder_start_token_id=0, relations=options,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = FathomT5ForConditionalGeneration(config).eval()
    relations = torch.zeros(1, 21, 21, dtype=torch.uint8)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.full((1, 21), 5), labels=torch.full((1, 7), 5), relation_ids=relations)
    assert counter.get_total_flops() == config.encoder_flops(21) + config.decoder_flops(7, 21, 7)


def test_it_is_a_method_of_its_section():
    assert Rasat.registry == "relations" and Rasat.wing == "tables"


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (torch.full((1, 2, 2), -1), "has the id -1: the tables of this model have 3 rows"),
        (torch.full((1, 2, 2), 3), "has the id 3: "),
        (torch.zeros(1, 2, 2), "of torch.float32: ids are whole numbers"),
        (torch.zeros(1, 2, 2, dtype=torch.bool), "of torch.bool: ids are whole numbers"),
    ],
)
def test_ids_that_are_none_are_refused(ids, match):
    with pytest.raises(ValueError, match=match):
        check_ids(ids, (1, 2), 3)

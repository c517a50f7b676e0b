"""Table to text: the invariants of AKG's and PromptMize's sheets, method by method."""

from __future__ import annotations

import copy
import dataclasses
import re
import sys

import numpy as np
import pytest
import torch
from peft import PeftModel, get_peft_model
from peft.utils import PeftType
from table_cases import CORPUS, FOODS, GRID, NAMES, host, pairs, tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutput

from fathom.data.bm25 import load_bm25s
from fathom.tables.text import (
    AKG,
    METHODS,
    P2G,
    CTRLSciTab,
    Grid,
    KnowledgeAdapterConfig,
    PromptMize,
    Table,
    TableGenerator,
    TablePlain,
)
from fathom.tables.text.base import from_dict, planner_for
from fathom.tables.text.generator import MODELS, TARGET_TOKENS, Stages
from fathom.tables.text.knowledge import knowledge_pairs, mask_entities, mask_fill, mask_runs, mask_spans
from fathom.tables.text.linearize import (
    CONTENT,
    CONTEXT,
    MASK,
    STOP_WORDS,
    TableLinearizer,
    read_csv,
    table_of_row,
    words,
)
from fathom.tables.text.prototypes import Candidates, PrototypeSelector
from fathom.tables.text.stages import Stage

VARIANTS = [{"name": name, **variant} for name, cls in METHODS.items() for variant in cls.variants]
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A stock checkpoint of every family, with its tokenizer."""
    found = {}
    for family in ("t5", "bart", "llama"):
        found[family] = str(tmp_path_factory.mktemp(family))
        host(family).save_pretrained(found[family])
        tokenizer().save_pretrained(found[family])
    return found


def is_knowledge(name: str) -> bool:
    return "knowledge_adapter" in name.split(".")


def unmask(masked: str, hidden: list[str]) -> str:
    return masked.replace("{", "{{").replace("}", "}}").replace(MASK, "{}").format(*hidden)


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 200, (2, 9), generator=draw)
    return {"input_ids": ids, "labels": torch.randint(5, 200, (2, 5), generator=draw)}


def test_a_line_is_read_back_and_a_second_key_is_numbered():
    table = Table((("a:b", "x : y\tz\\"), ("name", "Bo\nCy"), ("name", "Di"), ("t\\t", "")))
    assert Table.from_line(table.line()) == table and "\n" not in table.line()
    assert table.keys == ("a:b", "name", "name_2", "t\\t")
    assert Table.from_line("birth : 1 may\tname : Bo") == Table((("birth", "1 may"), ("name", "Bo")))
    for line in ("no colon", "a : b : c"):
        with pytest.raises(ValueError, match="needs exactly one ':'"):
            Table.from_line(line)


def test_a_source_is_table_plan_prototypes_each_within_its_length():
    lines = TableLinearizer(tokenizer(), table_tokens=15, prototype_tokens=7)
    table, text = pairs()[0]
    long = [f"{text} {text}"] * 3
    ids = lines.source(table, ["near", "name"], long)
    marks = {name: tokenizer().convert_tokens_to_ids(name) for name in (CONTENT, CONTEXT)}
    kinds = [next((name for name, mark in marks.items() if mark == token), "") for token in ids]
    assert kinds.count(CONTENT) == 2 and kinds.count(CONTEXT) == 3
    assert kinds.index(CONTENT) == 15  # the table is cut to 15
    assert [i for i, kind in enumerate(kinds) if kind == CONTEXT] == [len(ids) - 21, len(ids) - 14, len(ids) - 7]
    plan = ids[15 : len(ids) - 21]
    assert tokenizer().decode(plan).replace(" ", "") == f"{CONTENT}near{CONTENT}name" and len(plan) <= 10
    assert lines.table(table, ["stars"])[:3] != lines.table(table)[:3]  # planned slots are what is kept
    assert dataclasses.replace(lines, keep_planned_slots=False).table(table, ["stars"]) == lines.table(table)
    both = dataclasses.replace(lines, plan_item="key_value", plan_item_tokens=20).plan(table, ["food"])
    assert tokenizer().decode(both[1:]).strip() == f"food {table.values[1]}"
    with pytest.raises(ValueError, match="plan item 'colour': no key of the table; keys: name, food"):
        lines.source(table, ["colour"])
    with pytest.raises(ValueError, match="an item comes twice"):
        lines.source(table, ["name", "name"])


def test_lengths_are_the_sheets_unless_told():
    lines = TableLinearizer(tokenizer())
    table = Table(tuple((f"a very long name of key {i}", "Thai food") for i in range(60)))
    near = "Al serves Thai food near the river . " * 20
    ids = lines.source(table, table.keys[:2], [near] * 3)
    marks = [i for i, token in enumerate(ids) if tokenizer().decode([token]) in (CONTENT, CONTEXT)]
    assert marks == [300, 305, 310, 360, 410] and len(ids) == 460
    assert TARGET_TOKENS == 90 and AKG().table_tokens == 300 and AKG().prototype_tokens == 50


@torch.no_grad()
def test_without_a_plan_a_new_zero_adapter_is_the_plain_model(folders):
    """Sources and logits of PromptMize without its planner are those of the host on the table alone."""
    table = pairs()[0][0]
    method = PromptMize(planner="none", reduction=4, zero_init_up=True)
    ours, plain = (TableGenerator.from_pretrained(folders["bart"], m) for m in (method, TablePlain()))
    source, target = ours.source(table), ours.target("Alan serves Thai food .", 90)
    assert source == plain.source(table) == TableLinearizer(tokenizer()).table(table)
    found = [g.model.eval()(torch.tensor([source]), labels=torch.tensor([target])).logits for g in (ours, plain)]
    assert ours.method.adapts and torch.equal(*found)


def test_a_stranger_cannot_write_markers():
    lines = TableLinearizer(tokenizer())
    ids = lines.source(Table((("name", f"Bo {CONTENT} {MASK}"),)), (), [f"{CONTEXT} Bo"])
    assert [tokenizer().decode([token]) for token in ids if token >= tokenizer().vocab_size] == [CONTEXT]


def test_tables_that_cannot_be_are_refused(tmp_path):
    for rows, said in (
        ("a,b\n1\n", "row 1 has 1 cells, the header 2: a ragged table"),
        ("a;b\n1;2\n", "every line is one cell with semicolons in it; part its cells with commas"),
        ("a\tb\n1\t2\n", "every line is one cell with tabs in it"),
        ("a,b\n" + "x" * 140_000 + ",1\n", "is no CSV"),
        ("a,b\n", "the table is empty"),
        ("", "is empty"),
    ):  # fmt: skip
        (tmp_path / "t.csv").write_text(rows)
        with pytest.raises(ValueError, match=said):
            read_csv(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text('\ufeffa,"b, c"\n1,2\n')
    assert read_csv(tmp_path / "t.csv").slots() == Table((("a", "1"), ("b, c", "2")))
    with pytest.raises(ValueError, match="highlight='3': no cell of the table has this text"):
        read_csv(tmp_path / "t.csv", ["3"])
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_csv(tmp_path / "none.csv")
    with pytest.raises(ValueError, match=r"here: table=\(\): a table needs at least one slot"):
        table_of_row({"table": []}, "here")
    with pytest.raises(ValueError, match="here: no table: needs a field 'table'"):
        table_of_row({"mr": "x"}, "here")
    assert GRID.slots().slots[0] == ("our net F1", "27.5")
    (tmp_path / "sheet.csv").write_text("name,,food,\r\nAlan,,Thai,\r\n,,,\r\n,,,\r\n")  # as spreadsheets write it
    assert read_csv(tmp_path / "sheet.csv").slots() == Table((("name", "Alan"), ("food", "Thai")))
    assert Grid(("x",), (("1",), ("2",))).slots() == Table((("x", "1"), ("x_2", "2")))
    assert Grid(("", "b"), (("", "2"),)).slots() == Table((("column 1", ""), ("b", "2")))
    assert Grid(("", ""), (("", "2"), ("s", "3"))).slots() == Table((("column 2", "2"), ("s", "3")))


def test_masks_stand_for_the_tables_words():
    table = Table((("born", "New York, U.S."), ("voice", "Alan Oppenheimer of the Globe"), ("n", "3")))
    cases = {
        "He came from New York, U.S. with Alan.": f"He came from {MASK}, {MASK} with {MASK}.",
        "Oppenheimer, Alan of New York: 3": f"{MASK}, {MASK} of {MASK}: {MASK}",
    }
    for text, expected in cases.items():
        masked, hidden = mask_fill(text, table)
        assert masked == expected and unmask(masked, hidden) == text
        of_table = {w for value in table.values for w in words(value)} - STOP_WORDS
        assert of_table.isdisjoint(words(masked.replace(MASK, " ")))
        assert mask_fill(masked, table) is None  # nothing is left to mask
    assert mask_fill("New York", table) is None and mask_fill("Nothing of it", table) is None
    assert mask_fill("in New York", table, unit="word")[0] == f"in {MASK} {MASK}"
    assert mask_fill("born in spring", table) is None
    assert mask_fill("born in spring", table, source="values+keys")[0] == f"{MASK} in spring"
    assert mask_entities("The old Bo Di sang 3 songs")[0] == f"The old {MASK} sang {MASK} songs"
    random = np.random.default_rng(0)
    for text in ("a b c d e f g h i j k l m n o p q r s t", "one two"):
        masked, hidden = mask_spans(text, random)
        assert unmask(masked, hidden) == text
        assert len(text.split()) - len(masked.replace(MASK, "").split()) == max(1, round(0.3 * len(text.split())))
    assert mask_runs("a b", [False, False]) == ("a b", [])
    found = list(knowledge_pairs([(table, ["in New York", "in New York", "by sea"])]))
    assert [(masked, text) for _, masked, text in found] == [(f"in {MASK}", "in New York")]


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("placement", ["every_layer", "last_layer"])
def test_an_adapter_is_its_equation_and_peft_keeps_it(family, placement, tmp_path):
    """Against the stock layers with A written out; the count of the sheet; saved and loaded by peft alone."""
    stock, given = host(family), inputs()
    options = {"reduction": 4, "placement": placement}
    zero = get_peft_model(copy.deepcopy(stock), KnowledgeAdapterConfig(**options, zero_init_up=True)).eval()
    with torch.no_grad():  # frozen weights take another kernel where others have gradients
        assert torch.equal(zero(**given).logits, stock(**given).logits)
    model = get_peft_model(copy.deepcopy(stock), KnowledgeAdapterConfig(**options)).eval()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    places = 4 if placement == "every_layer" else 2
    assert all(is_knowledge(name) for name in trainable)
    assert sum(p.numel() for p in trainable.values()) == places * (2 * 32 * 8 + 32 + 8)
    for p in trainable.values():
        p.data.normal_(std=0.3, generator=torch.Generator().manual_seed(p.numel()))
    adapters = [m for m in model.modules() if type(m).__name__ == "Bottleneck"]
    hooked = copy.deepcopy(stock)
    if family == "t5":
        every = [b.layer[-1].DenseReluDense for s in (hooked.encoder, hooked.decoder) for b in s.block]
        last = [hooked.encoder.final_layer_norm, hooked.decoder.final_layer_norm]
    else:
        sides = (hooked.model.encoder, hooked.model.decoder)
        every = [layer.fc2 for side in sides for layer in side.layers]
        last = [side.layers[-1].final_layer_norm for side in sides]
    for module, a in zip(every if placement == "every_layer" else last, adapters, strict=True):

        def adapted(_, __, h, a=a):
            return h + torch.relu(h @ a.down.weight.T + a.down.bias) @ a.up.weight.T + a.up.bias

        module.register_forward_hook(adapted)
    torch.testing.assert_close(model(**given).logits, hooked(**given).logits, rtol=1e-5, atol=1e-5)
    assert not torch.equal(model(**given).logits, stock(**given).logits)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(**given).logits, stock(**given).logits)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(copy.deepcopy(stock), tmp_path).eval()
    assert torch.equal(again(**given).logits, model(**given).logits)


def test_the_papers_counts_and_a_decoder_alone():
    with torch.device("meta"):
        from transformers import BartConfig, BartForConditionalGeneration

        for config, count in (
            (
                BartConfig(d_model=768, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=64, decoder_ffn_dim=64),
                894_528,
            ),
            (BartConfig(encoder_layers=12, decoder_layers=12, encoder_ffn_dim=64, decoder_ffn_dim=64), 3_171_840),
        ):
            config.vocab_size = 100
            model = get_peft_model(BartForConditionalGeneration(config), KnowledgeAdapterConfig())
            assert sum(p.numel() for p in model.parameters() if p.requires_grad) == count
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 60,
    }
    llama = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    ids = torch.arange(1, 9)[None]
    expected = llama(ids).logits
    model = get_peft_model(llama, KnowledgeAdapterConfig(reduction=4))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 2 * (2 * 32 * 8 + 40)
    assert not torch.equal(model(ids).logits, expected)
    out = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(out[:, 8:9], model(ids).logits[:, -1:].argmax(-1))
    with pytest.raises(ValueError, match="a knowledge adapter has a ReLU and cannot be merged"):
        model.merge_and_unload()
    with pytest.raises(ValueError, match="reduction=64: the model has width 32"):
        get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), KnowledgeAdapterConfig(reduction=64))


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("section", VARIANTS, ids=lambda s: "-".join(map(str, s.values())))
def test_a_checkpoint_is_saved_and_loaded_under_any_method(section, family, folders, tmp_path):
    stock, given = host(family), inputs()
    kind = MODELS[family]
    model = kind.from_pretrained(folders[family], table=section).eval()
    assert model.config.method == from_dict(section)
    if not model.config.method.adapts and not model.config.method.prefixes:
        assert torch.equal(model(**given).logits, stock(**given).logits)
    else:
        assert not torch.equal(model(**given).logits, stock(**given).logits)
        frozen = {is_knowledge(n) for n, p in model.named_parameters() if not p.requires_grad}
        assert frozen == ({True} if model.config.method.adapts else set())
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(again) is kind and again.config.table == model.config.table
    assert torch.equal(again(**given).logits, model(**given).logits)
    plain = kind.from_pretrained(tmp_path, table="table_plain")  # an adapter is left out
    assert torch.equal(plain(**given).logits, stock(**given).logits)


def test_pefts_list_of_methods_has_the_adapter_as_every_python_asks_for_it():
    member = PeftType("KNOWLEDGE_ADAPTER")
    assert vars(PeftType)["KNOWLEDGE_ADAPTER"] is member is PeftType["KNOWLEDGE_ADAPTER"]  # by 3.12, and by 3.11
    assert copy.deepcopy(member) is member and member in list(PeftType)


def test_bm25s_is_imported_without_jax(tmp_path, monkeypatch):
    """Where it is installed, an import of bm25s would start it, and it holds most of a GPU."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise SystemExit('jax was started')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] in ("bm25s", "jax")]:
        monkeypatch.delitem(sys.modules, name)
    load_bm25s().BM25()
    assert "bm25s" in sys.modules and "jax" not in sys.modules


@pytest.mark.parametrize("family", ["t5", "bart", "llama"])
def test_a_new_model_starts_as_the_stock_one(family):
    stock = host(family)
    fields = {k: v for k, v in stock.config.to_dict().items() if k not in ("model_type", "architectures")}
    torch.manual_seed(0)
    found = MODELS[family](MODELS[family].config_class(**fields)).state_dict()
    assert found.keys() == stock.state_dict().keys()
    assert all(torch.equal(value, found[name]) for name, value in stock.state_dict().items())


def test_adapters_that_do_not_fit_are_refused(folders, tmp_path):
    kind = MODELS["t5"]
    kind.from_pretrained(folders["t5"], table={"name": "akg", "reduction": 4}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the width of its knowledge adapter is not what reduction=8"):
        kind.from_pretrained(tmp_path, table={"name": "akg", "reduction": 8})
    with pytest.raises(ValueError, match=r"its knowledge adapter is not where placement='last_layer' has it"):
        kind.from_pretrained(tmp_path, table={"name": "akg", "reduction": 4, "placement": "last_layer"})
    for table, said in (
        ("agk", r"table='agk': no such method \(did you mean 'akg'\?\)"),
        ({"name": "akg", "reducton": 4}, r"unknown key table.reducton \(did you mean 'reduction'\?\)"),
        ({"name": "akg", "prototypes": -1}, "akg option prototypes=-1: must be at least 0"),
        ({"name": "p2g", "trains": "knowledge"}, "p2g option trains='knowledge': it has no adapter"),
        ({"name": "p2g", "planner": "pointr"}, "planner"),
    ):
        with pytest.raises(ValueError, match=said):
            kind.from_pretrained(folders["t5"], table=table)


def test_candidates_are_the_nearest_sentences_and_never_the_reference():
    texts = [*CORPUS, CORPUS[0]]
    found = Candidates(texts)
    assert len(found.texts) == len(CORPUS)
    table = pairs()[0][0]
    first = found.find(table, 6)
    overlap = [len(set(words(text)) & {w for v in table.values for w in words(v)}) for text in first]
    assert overlap == sorted(overlap, reverse=True) and overlap[0] == 2
    assert first[0] not in found.find(table, 6, [first[0]]) and len(found.find(table, 100)) == len(CORPUS)
    with pytest.raises(ValueError, match="corpus="):
        Candidates([" "])


def test_a_selector_learns_which_sentences_look_like_descriptions():
    selector = PrototypeSelector(None, tokenizer(), dropped=("stars",), margin=0.1, **TINY)
    table, text = pairs()[0]
    ids, segments = selector.rows(table, [text])[0]
    assert "stars" not in tokenizer().decode(ids) and set(segments) == {0, 1} and segments == sorted(segments)
    with torch.no_grad():
        scores = selector.eval()(table, CORPUS[:6])
    order = selector.rank(table, CORPUS[:6])
    assert sorted(order) == sorted(CORPUS[:6])
    assert order == [CORPUS[i] for i in scores.argsort(descending=True, stable=True)]
    assert len(selector.rank(table, CORPUS)) == 20
    values = torch.tensor([1.0, 0.95, 0.5], requires_grad=True)
    selector.forward = lambda *_: values
    loss = selector.loss(table, text, ["x", "y"])
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(0.05 / 2))
    assert values.grad.tolist() == [-0.5, 0.5, 0.0]  # of the violated pair alone
    del selector.forward
    other = [(t, s, [c for c in CORPUS if words(t.values[0])[0] not in words(c)]) for t, s in pairs(8)]
    losses = selector.fit(other, Stage(steps=40, batch_size=4, lr=3e-3))
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5])


@pytest.mark.parametrize(
    ("family", "method"),
    [("t5", AKG(reduction=4)), ("bart", PromptMize(planner="oracle", reduction=4)), ("llama", AKG(reduction=4))],
    ids=["t5", "bart", "llama"],
)
def test_each_stage_changes_its_own_parameters_alone(family, method, folders):
    generator = TableGenerator.from_pretrained(folders[family], method, CORPUS)
    model = generator.model
    was = {name: p.detach().clone() for name, p in model.named_parameters()}

    def changed() -> set[bool]:
        found = {is_knowledge(name) for name, p in model.named_parameters() if not torch.equal(p, was[name])}
        was.update((name, p.detach().clone()) for name, p in model.named_parameters())
        return found

    few = pairs(6)
    generator.fit_knowledge([table for table, _ in few], Stage(steps=3, lr=1e-2, optimizer="adafactor"))
    assert changed() == {True}
    generator.fit_generator(few, Stage(steps=3, lr=1e-2))
    assert changed() == {False}
    with pytest.raises(ValueError, match="no sentence of it shares a word with a table"):
        generator.fit_knowledge([Table((("x", "zzz"),))], Stage(steps=1))


def test_a_generator_learns_and_describes_and_is_loaded_again(folders, tmp_path):
    """With every part: planner, adapter, prototypes. Then the same sources and texts from the saved folder."""
    method = PromptMize(prototypes=1, reduction=4)
    generator = TableGenerator.from_pretrained(folders["t5"], method, CORPUS)
    stages = Stages(
        planner=Stage(steps=3, lr=3e-3), knowledge=Stage(steps=3, lr=1e-3), generator=Stage(steps=25, lr=1e-2)
    )  # fmt: skip
    losses = generator.fit(pairs(), CORPUS, stages, rerank=False)
    assert set(losses) == {"planner", "knowledge", "generator"}
    assert losses["generator"][-1] < 0.7 * losses["generator"][0]
    tables = [table for table, _ in pairs(3)]
    said = generator.describe(tables, beams=2, max_new_tokens=8)
    # batches of any size, padded on either side
    assert said == [generator.describe(table, beams=2, max_new_tokens=8)[0] for table in tables]
    generator.save_pretrained(tmp_path)
    again = TableGenerator.from_pretrained(str(tmp_path), corpus=CORPUS)
    assert [again.source(t) for t in tables] == [generator.source(t) for t in tables]
    assert again.describe(tables, beams=2, max_new_tokens=8) == said
    plan = ["near", "name"]
    assert generator.source(tables[0], plan) != generator.source(tables[0], plan[::-1])
    with pytest.raises(ValueError, match="corpus=None: method 'promptmize' reads prototypes"):
        TableGenerator.from_pretrained(str(tmp_path)).describe(tables[0])
    with pytest.raises(ValueError, match=r"plan=\['name'\]: method 'p2g' reads none"):
        TableGenerator.from_pretrained(folders["t5"], P2G(), CORPUS).source(tables[0], ["name"])
    with pytest.raises(ValueError, match="method 'promptmize' has no planner here"):
        TableGenerator.from_pretrained(folders["t5"], PromptMize(reduction=4)).source(tables[0])


@torch.no_grad()
def test_a_decoder_alone_reads_source_cue_and_description_in_one_sequence(folders, tmp_path):
    generator = TableGenerator.from_pretrained(folders["llama"], P2G(prototypes=1), CORPUS)
    tables = [table for table, _ in pairs(3)]
    examples = [(generator.source(t), generator.target(text, 90)) for t, text in pairs(3)]
    assert all(tokenizer().decode(source).endswith("Text:") for source, _ in examples)
    stock, total, count = host("llama"), 0.0, 0  # every row alone, unpadded, by the stock class
    for source, target in examples:
        logits = stock(torch.tensor([source + target])).logits[0].log_softmax(-1)
        total -= float(sum(logits[len(source) - 1 + i, token] for i, token in enumerate(target)))
        count += len(target)
    assert float(generator.loss(examples)) == pytest.approx(total / count, rel=1e-5)
    said = generator.describe(tables, beams=1, max_new_tokens=6)
    assert said == [generator.describe(table, beams=1, max_new_tokens=6)[0] for table in tables]
    ids = torch.tensor([examples[0][0]])
    found = stock.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert said[0] == tokenizer().decode(found, skip_special_tokens=True).strip()
    model = MODELS["llama"].from_pretrained(folders["llama"], table={"name": "akg", "reduction": 4}).eval()
    assert not torch.equal(model(ids).logits, stock(ids).logits)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model) and torch.equal(again(ids).logits, model(ids).logits)
    plain = MODELS["llama"].from_pretrained(tmp_path, table="table_plain")
    assert torch.equal(plain(ids).logits, stock(ids).logits)
    with pytest.raises(ValueError, match=r"table.planner='free_prefix': a decoder alone has no cross-attention"):
        MODELS["llama"].from_pretrained(folders["llama"], table={"name": "promptmize", "planner": "free_prefix"})


def test_descriptions_of_rows_are_learned_with_background_that_is_given(folders):
    generator = TableGenerator.from_pretrained(folders["llama"], CTRLSciTab(source_tokens=64))
    seen: list[int] = []
    stage = Stage(steps=2, batch_size=2, lr=1e-3)
    few, given = [(GRID, "Scores rise."), (GRID, "Time falls.")], [["The base is a tree."], []]
    generator.fit_generator(few, stage, 12, seen.append, given)
    assert seen == [1, 2]
    source = generator.source(GRID, background=["The base is a tree."])
    assert "The base is a tree." in tokenizer().decode(source)
    with pytest.raises(ValueError, match="retriever=None"):
        generator.source(GRID)
    other = dataclasses.replace(GRID, highlights=("old",))
    said = generator.describe([GRID, other], beams=1, max_new_tokens=3, backgrounds=given)
    alone = zip((GRID, other), given, strict=True)
    assert said == [generator.describe(g, beams=1, max_new_tokens=3, backgrounds=[b])[0] for g, b in alone]


def test_a_cut_source_keeps_its_markers_where_they_have_room(folders):
    """The background is cut first, then the caption; <H> and <CAP> stand as long as what is before them fits."""
    whole = TableGenerator.from_pretrained(folders["t5"], CTRLSciTab()).source(GRID, background=GRID.background[:3])
    marks = [whole.index(tokenizer().convert_tokens_to_ids(mark)) for mark in ("<H>", "<CAP>", "<BKG>")]
    assert marks == sorted(marks)
    for room in (marks[1] + 1, marks[2], marks[2] + 3, len(whole)):
        generator = TableGenerator.from_pretrained(folders["t5"], CTRLSciTab(source_tokens=room))
        assert generator.source(GRID, background=GRID.background[:3]) == whole[:room]


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("planner", ["prefix", "free_prefix"])
def test_a_prefix_is_read_before_the_source_and_can_be_all_that_trains(planner, family, folders):
    """Against the stock model that is handed the same memory; generation with a cache is the full forward's."""
    section = {"name": "promptmize", "planner": planner, "adapter": False, "prefix_tokens": 3, "trains": "prefix"}
    model, given, stock = MODELS[family].from_pretrained(folders[family], table=section).eval(), inputs(), host(family)
    mask = torch.ones_like(given["input_ids"])
    mask[0, 6:] = 0
    prefix = dict(model.prefix.named_parameters())
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {f"prefix.{n}" for n in prefix}
    states = stock.get_encoder()(input_ids=given["input_ids"], attention_mask=mask).last_hidden_state
    mean = torch.stack([states[0, :6].mean(0), states[1].mean(0)])
    e = mean if planner == "prefix" else prefix["origin"].expand(2, -1)
    inner = torch.tanh(e @ prefix["inner.weight"].T + prefix["inner.bias"])
    before = (inner @ prefix["outer.weight"].T + prefix["outer.bias"]).view(2, 3, 32)
    memory = BaseModelOutput(last_hidden_state=torch.cat([before, states], 1))
    whole = torch.cat([torch.ones(2, 3, dtype=torch.long), mask], 1)
    expected = stock(encoder_outputs=memory, attention_mask=whole, labels=given["labels"]).logits
    found = model(**given, attention_mask=mask)
    torch.testing.assert_close(found.logits, expected, rtol=1e-5, atol=1e-5)
    found.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in prefix.values())
    ids = model.generate(given["input_ids"], attention_mask=mask, max_new_tokens=5, min_new_tokens=5)
    logits = model(given["input_ids"], mask, decoder_input_ids=ids[:, :-1]).logits.detach()
    logits[..., tokenizer().eos_token_id] = -torch.inf  # not before five tokens
    assert torch.equal(logits[:, :4].argmax(-1), ids[:, 1:5])
    wide = model.generate(given["input_ids"], attention_mask=mask, max_new_tokens=5, num_beams=2)
    assert len(wide) == 2


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_checkpointing_and_bf16_change_nothing_but_memory_and_digits(family, folders):
    kind, given = MODELS[family], inputs()
    torch.manual_seed(0)  # the checkpoint has no adapter
    model = kind.from_pretrained(folders[family], table={"name": "akg", "reduction": 4, "trains": "all"}).double()
    grads = []
    for checkpointing in (False, True):
        model.train().zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(0)
        model(**given).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert {is_knowledge(name) for name in grads[0]} == {True, False}
    for name, value in grads[0].items():
        torch.testing.assert_close(grads[1][name], value, rtol=1e-10, atol=1e-12)
    exact = model.float().eval()(**given).logits
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(**given).logits
    low = kind.from_pretrained(folders[family], table={"name": "akg", "reduction": 4}, dtype=torch.bfloat16)
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    assert low.eval()(**given).logits.isfinite().all()
    assert (mixed.float() - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_compiled_model_is_the_eager_one(family, folders):
    given = inputs()
    model = MODELS[family].from_pretrained(folders[family], table={"name": "akg", "reduction": 4}).eval()
    torch.testing.assert_close(
        torch.compile(model, backend="aot_eager")(**given).logits, model(**given).logits, rtol=1e-4, atol=1e-5
    )


def test_padding_on_either_side_changes_nothing(folders):
    model = MODELS["t5"].from_pretrained(folders["t5"], table={"name": "akg", "reduction": 4}).eval()
    ids, pad = inputs()["input_ids"], tokenizer().pad_token_id
    alone = model.generate(ids, max_new_tokens=6)
    mask = torch.ones_like(ids)
    for sides in ((3, 0), (0, 3)):
        padded = torch.nn.functional.pad(ids, sides, value=pad)
        out = model.generate(padded, attention_mask=torch.nn.functional.pad(mask, sides), max_new_tokens=6)
        # T5's positions are relative, so a source is the same wherever it stands
        assert torch.equal(out, alone)
    generator = TableGenerator.from_pretrained(folders["bart"], AKG(reduction=4, prototypes=0))
    tables = [pairs()[0][0], Table((("name", "Bo"),))]  # of two lengths; BART counts positions from the left
    said = generator.describe(tables, beams=2, max_new_tokens=6)
    assert said == [generator.describe(table, beams=2, max_new_tokens=6)[0] for table in tables]


def test_auto_means_pointer_for_few_pairs_and_crf_for_many():
    assert (planner_for("auto", 499), planner_for("auto", 500), planner_for("crf", 5)) == ("pointer", "crf", "crf")
    assert re.fullmatch(r"\w+", FOODS[0]) and NAMES  # the cases are words
    assert isinstance(GRID, Grid)


def test_a_key_that_comes_again_never_takes_anothers_name(tmp_path):
    assert Table((("a", "1"), ("a", "2"), ("a_2", "3"), ("a", "4"))).slots == (
        ("a", "1"), ("a_3", "2"), ("a_2", "3"), ("a_4", "4"),
    )  # fmt: skip
    (tmp_path / "latin.csv").write_bytes(b"a,b\n\xe9,1\n")
    with pytest.raises(ValueError, match=r"latin\.csv: is no UTF-8 .*; save it as UTF-8"):
        read_csv(tmp_path / "latin.csv")


def test_a_source_longer_than_barts_places_is_refused(tmp_path):
    host("bart", max_position_embeddings=40).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    long = Table(tuple((f"key{i}", "Thai food") for i in range(30)))
    generator = TableGenerator.from_pretrained(str(tmp_path), AKG(prototypes=0))
    with pytest.raises(
        ValueError, match=r"source of \d+ tokens: the model has max_position_embeddings=40; give .*'akg'"
    ):
        generator.describe(long)
    assert generator.describe(Table((("a", "b"),)), max_new_tokens=99)  # ends where there are no more places

"""The task table_to_text: what methods read of the same rows, the adapter's stage, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cases import recipe

from fathom.tables.text.generator import TableGenerator
from fathom.tables.text.linearize import BODY, CAPTION, GOLD_PLAN, HIGHLIGHTS, PLAN, PROTOTYPES, TABLE
from fathom.tables.text.models import FathomTableT5ForConditionalGeneration
from fathom.tables.text.retrieval import TfIdf
from fathom.tasks.table_to_text import NO_PART, unlikelihood
from fathom.train import load_recipe
from fathom.train.recipe import model_config
from fathom.train.trainer import train_run


def written(folder: Path, /, **sections: Any) -> Any:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe("table_to_text", folder, **sections)))
    return load_recipe(folder / "recipe.yaml")


def method(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "table": {"name": name, **options}}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    many = [
        method("table_plain"),
        method("p2g", prototypes=1, content_aware=0.5),
        method("akg", prototypes=1, reduction=4),
    ]
    many += [
        method("promptmize", planner="auto", reduction=4),
        {**method("promptmize", planner="oracle"), "name": "oracle"},
    ]
    prefixed = method("promptmize", planner="prefix", prefix_tokens=2, adapter=False)
    many += [{**prefixed, "name": "prefix"}]
    loaded = written(folder, methods=many)
    return loaded, loaded.task.prepare(loaded.data, folder / ".data")


READ = {
    "table_plain": ((TABLE,), (TABLE,)), "p2g": ((TABLE, PROTOTYPES),) * 2, "akg": ((TABLE, PROTOTYPES),) * 2,
    "promptmize": ((TABLE, GOLD_PLAN), (TABLE, PLAN)), "oracle": ((TABLE, GOLD_PLAN),) * 2, "prefix": ((TABLE,),) * 2,
}  # fmt: skip


def test_a_recipe_is_priced_before_its_tokenizer_is_trained(tmp_path):
    loaded = written(tmp_path, methods=[method("table_plain")])
    config = model_config(loaded, loaded.methods[0], None)
    assert loaded.task.sizes(config, 64, torch.float32).flops_per_token > 0


@pytest.mark.parametrize("name", READ)
def test_a_method_reads_its_parts_as_if_there_were_no_others(prepared, name):
    loaded, data = prepared
    task = loaded.task
    (entry,) = [m for m in loaded.methods if m.name == name]
    config = model_config(loaded, entry, data.tokenizer)
    torch.manual_seed(0)
    model = task.model_class.from_config(config).eval()
    batch = task.collate([data.validation[i] for i in range(3)])
    for training, parts in zip((True, False), READ[name], strict=True):
        found = task.selected(batch, config, training)
        assert found["input_ids"].shape == (3, task.room(config))
        for row in range(3):
            keep = torch.isin(batch["parts"][row], torch.tensor(parts))
            kept = found["attention_mask"][row].bool()
            assert found["input_ids"][row][kept].tolist() == batch["input_ids"][row][keep].tolist()
            assert found["parts"][row][kept].tolist() == sorted(found["parts"][row][kept].tolist())  # in their order
    with torch.no_grad():  # the loss of a row alone, without what its method does not read
        losses = []
        for row in range(3):
            keep = torch.isin(batch["parts"][row], torch.tensor(READ[name][1]))
            labels = batch["labels"][row]
            out = model(input_ids=batch["input_ids"][row][keep][None], labels=labels[None])
            losses.append(float(out.loss) * int((labels >= 0).sum()))
        whole = task.forward(model, **batch).loss * task.targets(batch)
    assert float(whole) == pytest.approx(sum(losses), rel=1e-5)
    sizes = task.sizes(config, loaded.data.block_size, torch.float32)
    assert sizes.parameters == sum(p.numel() for p in model.parameters())


def test_noise_on_plans_and_words_that_the_reference_lacks(prepared):
    loaded, data = prepared
    batch = loaded.task.collate([data.train[i] for i in range(20)])
    config = model_config(loaded, loaded.methods[3], data.tokenizer)
    config.table = {**config.table, "plan_noise": 0.5}
    torch.manual_seed(0)
    found = loaded.task.selected(batch, config, training=True)
    kinds = [set(row.tolist()) - {NO_PART, TABLE} for row in found["parts"]]
    assert {GOLD_PLAN} in kinds and all(len(kind) <= 1 for kind in kinds)
    logits = torch.randn(1, 2, 9, generator=torch.Generator().manual_seed(0))
    given = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "parts": torch.tensor([[0, 3, 3, 3]])}
    p = logits[0].softmax(-1)
    expected = -((1 - p[:1, [5, 6]]).log().mean(1)).sum()  # 4 is a target; the second place is padding
    torch.testing.assert_close(unlikelihood(logits, torch.tensor([[4, -100]]), given), expected)


def test_the_adapters_stage_leaves_the_host_and_its_checkpoint_serves_every_method(tmp_path):
    """From a trained model: knowledge, then AKG and plain from what that left."""
    folder = tmp_path
    short = {"training": {"examples": 8}, "task": {"candidates": 3, "answers": 2}}
    base = written(folder, methods=[method("table_plain")], **short)
    data = base.task.prepare(base.data, folder / ".data")
    start = train_run(base, base.methods[0], seed=0, folder=folder / "base", data=data)
    whole = recipe("table_to_text", folder, **short)
    known = {"name": "akg", "prototypes": 1, "reduction": 4}
    data_section = {**whole["data"], "tokenizer": str(start.model)}
    stages = {}
    for stage, checkpoint, table in (
        ("knowledge", start.model, {**known, "trains": "knowledge"}),
        ("describe", None, known),
        ("plain", None, "table_plain"),
    ):  # fmt: skip
        checkpoint = checkpoint or stages["knowledge"].model
        task = {**whole["task"], "stage": stage if stage == "knowledge" else "describe"}
        text = {**whole, "task": task, "model": {"checkpoint": str(checkpoint)}, "data": data_section}
        text |= {"methods": [{"name": stage, "table": table}]}
        (folder / f"{stage}.yaml").write_text(yaml.safe_dump(text))
        loaded = load_recipe(folder / f"{stage}.yaml")
        rows = loaded.task.prepare(loaded.data, folder / ".data")
        stages[stage] = train_run(loaded, loaded.methods[0], seed=0, folder=folder / stage, data=rows)
    load = FathomTableT5ForConditionalGeneration.from_pretrained

    def weights(run: Any) -> dict[str, torch.Tensor]:
        return {name.replace(".base_layer.", "."): p for name, p in load(run.model).state_dict().items()}

    first, second, third = weights(start), weights(stages["knowledge"]), weights(stages["describe"])
    assert all(torch.equal(second[name], value) for name, value in first.items())
    adapter = [name for name in second if "knowledge_adapter" in name]
    assert adapter and all(torch.equal(third[name], second[name]) for name in adapter)
    assert any(not torch.equal(third[name], value) for name, value in first.items())
    assert stages["knowledge"].scores["bleu"] is None and stages["knowledge"].scores["target_bits_per_byte"] > 0
    assert not [name for name in weights(stages["plain"]) if "knowledge" in name]


GRID = {
    "header": ["model", "F1"],
    "rows": [["ours", "27.5"], ["base", "21"]],
    "caption": "Scores.",
    "highlights": ["27.5"],
}


def test_tables_of_rows_have_their_own_parts(tmp_path):
    rows = [
        {**GRID, "background": f"We train on {i}. A base is a tree. Old.", "references": ["Ours has 27.5.", f"A {i}."]}
        for i in range(6)
    ]  # fmt: skip
    for name, some in (("train", rows[:4]), ("held-out", rows[4:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    whole = recipe("table_to_text", tmp_path)
    for name, some in (("train", rows[:4]), ("held-out", rows[4:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    whole["task"] |= {"retriever": "tfidf", "sentences": 2, "corpus": None, "prefix": "Table to text: "}
    whole["data"] |= {"block_size": 400}
    whole["methods"] = [
        method("ctrlscitab", retriever="tfidf", sentences=2),
        {"name": "neither", "table": {"name": "ctrlscitab", "highlights": False, "background": False}},
    ]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(whole))
    loaded = load_recipe(tmp_path / "recipe.yaml")
    data = loaded.task.prepare(loaded.data, tmp_path / ".data")
    assert len(data.train) == 8 and len(data.validation) == 2  # a row for each reference, of held-out ones the first
    batch = loaded.task.collate([data.validation[i] for i in range(2)])
    texts = []
    for entry in loaded.methods:
        found = loaded.task.selected(batch, model_config(loaded, entry, data.tokenizer), False)
        ids = found["input_ids"][0][found["attention_mask"][0].bool()]
        texts.append(" ".join(data.tokenizer.decode(ids).split()))
        assert not {HIGHLIGHTS, BODY} <= set(found["parts"][0].tolist()) and CAPTION in found["parts"][0]
    assert texts[0].startswith("Table to text: 27.5 <H> <R> <C> model <C> F1 <CAP> Scores. <BKG>")
    assert texts[1] == "Table to text: <R> <C> ours <C> 27.5 <R> <C> base <C> 21 <CAP> Scores."
    run = train_run(loaded, loaded.methods[0], seed=0, folder=tmp_path / "run", data=data)
    generator = TableGenerator.from_pretrained(str(run.model))  # which knows the recipe's retriever
    assert isinstance(generator.retriever, TfIdf)
    found = loaded.task.selected(batch, generator.model.config, False)
    assert generator.source(data.rows[0].table) == found["input_ids"][0][found["attention_mask"][0].bool()].tolist()
    assert 0 <= run.scores["off_target"] <= 1 and run.scores["parent_f"] is not None


def test_what_a_recipe_trained_describes_with_the_sources_of_its_rows(tmp_path):
    options = {"answers": 1, "prefix": "Say: ", "selector": "trained", "selector_steps": 2}
    short = {"training": {"examples": 8}, "task": options}
    planned = method("promptmize", planner="auto", prototypes=1, adapter=False)
    loaded = written(tmp_path, methods=[planned], **short)
    data = loaded.task.prepare(loaded.data, tmp_path / ".data")
    run = train_run(loaded, loaded.methods[0], seed=0, folder=tmp_path / "run", data=data)
    corpus = [json.loads(line)["text"] for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    generator = TableGenerator.from_pretrained(str(run.model), corpus=corpus)
    assert generator.planner is not None and generator.selector is not None
    batch = loaded.task.collate([data.validation[i] for i in range(4)])
    found = loaded.task.selected(batch, generator.model.config, training=False)
    for i in range(4):
        expected = found["input_ids"][i][found["attention_mask"][i].bool()].tolist()
        assert generator.source(data.rows[i].table, without=data.rows[i].references) == expected
    assert len(generator.describe([row.table for row in data.rows[:2]], beams=1, max_new_tokens=4)) == 2


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"task": {"stage": "knowlege"}}, "task.stage='knowlege': use describe, knowledge"),
        ({"task": {"stage": "knowledge", "corpus": None}}, "task.corpus=null: the stage 'knowledge' learns from"),
        ({"task": {"corpus": None}, "methods": [method("p2g", prototypes=1)]}, "task.corpus=null: method 'p2g' reads"),
        ({"methods": [method("p2g", prototypes=5)]}, "table.prototypes=5 of method 'p2g'.*task.prototypes=1; make"),
        ({"methods": [method("promptmize", planner="crf")]}, "table.planner='crf'.*task.planner='auto'; make"),
        ({"methods": [method("ctrlscitab", retriever="random")]}, "table.retriever='random'.*task.retriever='tsdae'"),
        ({"methods": [method("pg2")]}, r"table='pg2': no such method \(did you mean 'p2g'"),
        ({"data": {"block_size": 20}}, "its source and all that may be read beside it have .* data.block_size=20"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(sections, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        loaded = written(tmp_path, **sections)
        data = loaded.task.prepare(loaded.data, tmp_path / ".data")
        model_config(loaded, loaded.methods[0], data.tokenizer)


def test_held_out_descriptions_leave_the_corpus(tmp_path):
    whole = recipe("table_to_text", tmp_path)
    held = json.loads((tmp_path / "held-out.jsonl").read_text().splitlines()[0])["text"]
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.write(json.dumps({"text": held.upper()}) + "\n")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(whole))
    loaded = load_recipe(tmp_path / "recipe.yaml")
    data = loaded.task.prepare(loaded.data, tmp_path / ".data")
    assert "1 sentences of the corpus are held-out descriptions and were left out." in data.notes

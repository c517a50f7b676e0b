"""A recipe of growths: Innovator's four stages beside cheaper ways, at equal training FLOPs, what a stage leaves."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import TrainerCallback

from fathom import FathomConfig, FathomForCausalLM
from fathom.cost import training_flops_per_token
from fathom.report import growing
from fathom.report.growing import model_of, run_growths, show
from fathom.report.growths import Unit, load_growths, plan, price
from tiny import tiny_model
from tiny_checkpoint import run_cli, save_fathom

RECIPES = Path(__file__).parents[2] / "recipes"
TEXTS = {"sky": "star moon orbit comet planet. ", "sea": "wave fish salt reef tide. "}
STEP = 2 * 8  # tokens
BRANCHES = {"branches": ["sky", "sea"], "trains": "feed_forward", "share": 0.4}
LOSS = {"discipline": 0.1, "discipline_anneals": True, "selection": "expert"}
FRESH = {"grow": {"name": "moe_scratch", "disciplines": 2, "slices": 4}}
ROWS = {"task": {"name": "sft", "template": "react"}, "data": {"train": "rows.jsonl"}, "share": 1}
SURGERY = {"grow": {"name": "innovator", "disciplines": 2, "slices": 4}}


def recipe(folder, **changes):
    """A recipe over two sources, as a file."""
    for name, words in TEXTS.items():
        (folder / f"{name}.txt").write_text(words * 60)
        (folder / f"{name}-held-out.txt").write_text(words * 9)
    (folder / "all.txt").write_text("".join(TEXTS.values()) * 60)
    data = {"block_size": 8, "num_proc": 1}
    raw = {
        "name": "growths",
        "base": {
            "model": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
            "methods": [{"name": "base", "feed_forward": {"name": "dense"}}],
            "data": {"train": str(folder / "all.txt"), "tokenizer": {"bpe": 280}, **data},
            "training": {"tokens": 6 * STEP, "sequences": 2, "lr": 1e-2},
        },
        "data": {"train": {name: {"text": str(folder / f"{name}.txt")} for name in TEXTS}, **data},
        "held_out": {name: {name: str(folder / f"{name}-held-out.txt")} for name in TEXTS},
        "training": {"tokens": 30 * STEP, "sequences": 2, "lr": 1e-2},
        "methods": [
            {"name": "continued", "stages": [{"share": 1}]},
            {"name": "innovator", "stages": [
                BRANCHES, SURGERY,
                {"trains": "router", "share": 0.2, "feed_forward": LOSS},
                {"share": 0.4, "weights": {"sea": 1}, "feed_forward": {"discipline": 0.0}},
            ]},
            {"name": "merge", "stages": [BRANCHES, {"grow": {"name": "merge"}}]},
        ],
        **changes,
    }  # fmt: skip
    (folder / "growths.yaml").write_text(yaml.safe_dump(raw))
    return folder / "growths.yaml"


def test_every_way_spends_the_same_and_its_stages_chain(tmp_path, monkeypatch, capsys):
    loaded, folder = load_growths(recipe(tmp_path)), tmp_path / "runs" / "growths"
    results = run_growths(loaded, tmp_path / "runs", say=lambda words: None)
    runs = {run["method"]: run for run in results["runs"]}
    assert not results["failures"] and list(runs) == ["base", "continued", "innovator", "merge"]

    # FLOPs, counted again from the trained folders: what every stage read, times what its model costs
    def spent(units):
        total = 0.0
        for unit in units:
            config = FathomConfig.from_pretrained(model_of(loaded, folder, unit))
            total += results["stages"][unit]["tokens"] * training_flops_per_token(config, 8, False)
        return total

    trained = {name for name, stage in results["stages"].items() if stage["kind"] == "train"}
    branches = [name for name in trained if name.startswith("feed_forward-")]
    assert len(branches) == 2  # one a source, shared by the two methods that begin with them
    (router,) = (name for name in trained if name.startswith("router-"))
    whole = [point["stage"] for point in runs["innovator"]["path"]]
    assert runs["innovator"]["train_flops"] == pytest.approx(spent([*branches, router, whole[-1]]))
    budget = runs["continued"]["train_flops"]
    assert budget == pytest.approx(30 * STEP * training_flops_per_token(FathomConfig.from_pretrained(
        model_of(loaded, folder, "base")), 8, False))  # fmt: skip
    assert 0.8 * budget < runs["innovator"]["train_flops"] <= budget
    assert 0.35 * budget < runs["merge"]["train_flops"] <= 0.4 * budget
    priced = price(loaded)
    assert {row["name"]: row["train_flops"] for row in priced["methods"]} == {
        name: pytest.approx(run["train_flops"]) for name, run in runs.items()
    }
    once = {name: stage["train_flops"] for name, stage in results["stages"].items() if stage["kind"] == "train"}
    assert priced["train_flops"] == pytest.approx(sum(once.values()))

    weights = [FathomForCausalLM.from_pretrained(model_of(loaded, folder, name)).state_dict() for name in whole]
    for name, tensor in weights[1].items():  # the router alone has trained
        assert torch.equal(tensor, weights[0][name]) != (".mlp.gate." in name), name
    assert not torch.equal(*(one["model.layers.0.mlp.experts.down_proj"] for one in weights[1:]))
    assert runs["innovator"]["sky"] == runs["innovator"]["texts"]["sky"]["sky"] == runs["innovator"]["path"][-1]["sky"]
    assert FathomConfig.from_pretrained(model_of(loaded, folder, whole[-1])).feed_forward["discipline"] == 0.0
    assert show(results, tmp_path / "growths.png").stat().st_size > 5000

    def refuse(*given, **named):
        raise AssertionError("trained again")

    monkeypatch.setattr(growing, "grow", refuse)
    monkeypatch.setattr(growing, "scores", refuse)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")}
    given = ("grow", tmp_path / "growths.yaml", "-o", tmp_path / "runs")
    code, out, _ = run_cli(monkeypatch, capsys, *given, "--json")
    assert code == 0 and json.loads(out) == json.loads((folder / "growths.json").read_text())
    assert json.loads(out) == json.loads(json.dumps(results))
    code, out, _ = run_cli(monkeypatch, capsys, *given)
    assert code == 0 and (folder / "growths.png").exists()
    assert f"{runs['innovator']['sky']:.4f} {runs['innovator']['sky'] - runs['base']['sky']:+.4f}" in out
    code, _, err = run_cli(monkeypatch, capsys, *given, "--method", "btx")
    assert code == 2 and "is a recipe, which names methods" in err
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")}

    shutil.rmtree(folder / whole[-1])  # as if its time had been over before it began
    said: list[str] = []
    cut = run_growths(loaded, tmp_path / "runs", say=said.append, minutes=0)
    assert [run["method"] for run in cut["runs"]] == ["base", "continued", "merge"]
    assert said[-1] == "2 stages did not begin: 0 minutes were over. Rerun the command to resume."


@pytest.mark.slow
def test_stages_that_were_killed_end_as_those_that_were_not(tmp_path, monkeypatch):
    """Every stage is killed at its fifth step, two after its checkpoint, and goes on when the command runs again."""
    router = {"trains": "router", "share": 0.2, "feed_forward": LOSS}
    ways = [SURGERY, router, {"share": 0.3}, {"trains": "lora", "share": 0.3}]
    training = {"tokens": 60 * STEP, "sequences": 2, "lr": 1e-2, "save_every": 3, "log_every": 1}
    loaded = load_growths(recipe(tmp_path, methods=[{"name": "way", "stages": ways}], training=training))
    whole = run_growths(loaded, tmp_path / "whole", say=lambda words: None)
    begun, train = set(), growing.train_run

    class Dies(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise KeyboardInterrupt

    def once(*given, folder, **named):
        callbacks = [] if folder in begun else [Dies()]
        begun.add(folder)
        return train(*given, folder=folder, callbacks=callbacks, **named)

    monkeypatch.setattr(growing, "train_run", once)
    deaths = 0
    while True:
        try:
            resumed = run_growths(loaded, tmp_path / "killed", say=lambda words: None)
            break
        except KeyboardInterrupt:
            deaths += 1
    assert deaths == len(begun) == 4
    for stage in whole["stages"]:
        models = [model_of(loaded, tmp_path / side / "growths", stage) for side in ("whole", "killed")]
        one, other = (FathomForCausalLM.from_pretrained(model).state_dict() for model in models)
        assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one), stage
    assert resumed["runs"][-1]["sky"] == pytest.approx(whole["runs"][-1]["sky"], abs=1e-6)


def test_a_checkpoint_may_be_the_base_and_texts_point_its_router(tmp_path):
    """Nothing trains: the start of a mixture is scored beside the base."""
    base = save_fathom(tmp_path / "checkpoint")
    start = {"grow": {"name": "innovator", "disciplines": 2, "slices": 4, "router": "prompt"}, "texts": ["sky", "sea"]}
    exact = {**start, "grow": {**start["grow"], "shared_gate": 0.5, "routed_scaling": "match"}}
    ways = [{"name": name, "stages": [stage]} for name, stage in (("start", start), ("exact", exact))]
    results = run_growths(
        load_growths(recipe(tmp_path, base={"checkpoint": str(base)}, methods=ways)),
        tmp_path / "runs",
        say=lambda words: None,
    )
    assert not results["failures"]
    scored = {row["method"]: row["sky"] for row in results["methods"]}
    assert scored["exact"] == pytest.approx(scored["base"], abs=1e-5) and scored["start"] != scored["base"]
    for row in results["methods"]:
        assert row["train_flops"] == 0.0 and row["sea_deviation"] is None


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ([{"name": "a", "stages": [{"share": 0.7}, {"share": 0.7}]}], "methods.a: the shares of its stages sum to 1.4"),
        ([{"name": "a", "stages": [{"share": 0}]}], "needs a share above 0"),
        ([{"name": "a", "stages": [{"share": 1, "branches": ["skye"]}]}], "skye.*did you mean 'sky'"),
        ([{"name": "a", "stages": [{"share": 1, "grow": {"name": "btx"}}]}], "surgery trains nothing"),
        ([{"name": "a", "stages": [{"share": 1, "texts": ["sky"]}]}], "only surgery reads texts"),
        ([{"name": "a", "stages": [{"share": 1, "sequences": 0}]}], r"stages\[0\].sequences=0: must be at least 1"),
        ([{"name": "a", "stages": [{**BRANCHES, "weights": {"sky": 1}}]}], "a branch reads its own source alone"),
        ([{"name": "a", "stages": [{"share": 1}]}] * 2, "methods.a: two methods have this name"),
        ([{"name": "a", "spends_base": True, "stages": [{"share": 1}]}], "it starts from the base, whose training"),
        (
            [{"name": "a", "stages": [{"share": 0.5}, FRESH, {"share": 0.5}]}],
            "what earlier stages trained would be lost",
        ),
        ([{"name": "a", "stages": [{"share": 1, "task": "masked_diffusion"}]}], "stages learn 'causal_lm' or 'sft'"),
        ([{"name": "a", "stages": [{"share": 1, "task": "sft"}]}], r"stages\[0\].data.train is missing"),
        ([{"name": "a", "stages": [{"share": 1, "data": {"tokenizer": "x"}}]}], r"stages\[0\].data.tokenizer"),
        ([{"name": "a", "stages": [{**ROWS, "weights": {"sky": 1}}]}], "weights: data.train='rows.jsonl' names one"),
    ],
)
def test_recipes_that_say_nonsense_are_refused(methods, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        load_growths(recipe(tmp_path, methods=methods))


@pytest.mark.parametrize(
    ("section", "changes", "said"),
    [
        (
            "training",
            {"tokens": None, "examples": 9},
            "training.examples=9: methods share the FLOPs of training.tokens",
        ),
        ("training", {"trains": "lora"}, "training.trains='lora': each stage says what trains"),
        ("training", {"lr": [1e-3, 1e-2]}, "growths sweep no rates"),
        ("training", {"lora": {"rank": 2}}, "training.lora: no stage trains 'lora'"),
        ("training", {"eval_every": 5}, "training.eval_every=5: held_out is scored after a stage"),
        ("data", {"atoms": "scientific"}, "give base.data.atoms"),
        ("data", {"tokenizer": {"bpe": 300}}, "growths do not read it, but base.data.tokenizer"),
        ("data", {"validation": "sky.txt"}, "growths do not read it, but held_out"),
        ("base", {"budgets": ["tokens"]}, "unknown key base.budgets"),
        ("base", {"seeds": [0, 1]}, r"base.seeds=\[0, 1\]: the base is one model"),
        ("base", {"task": {"name": "sft"}, "data": {"train": "r.jsonl", "validation": None}}, "a base learns running"),
        ("asked", {"tools": "t.py", "questions": {"q": "q.jsonl"}}, "no stage learns answers"),
    ],
)
def test_settings_that_nothing_reads_are_refused(section, changes, said, tmp_path):
    path = recipe(tmp_path)
    raw = yaml.safe_load(path.read_text())
    raw[section] = {key: value for key, value in {**raw.get(section, {}), **changes}.items() if value is not None}
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(ValueError, match=said):
        load_growths(path)


def test_stages_may_learn_answers_and_are_asked_questions(tmp_path, monkeypatch, capsys):
    """Text, then rows, in two ways; who has learnt rows is asked, with a tool and without."""
    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    row = {"prompt": "How far is the moon?", "answer": "far"}
    files = {"rows.jsonl": [row] * 9, "asked.jsonl": [{"question": row["prompt"], "answer": "far"}]}
    for name, rows in files.items():
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / "tools.py").write_text(
        'def near(thing: str):\n    """Near.\n\n    Args:\n        thing: it.\n    """\n'
    )
    rows = {**ROWS, "data": {"train": str(tmp_path / "rows.jsonl")}}
    data = {"block_size": 64, "num_proc": 1}
    path = recipe(
        tmp_path,
        base={
            "model": {**tiny, "max_position_embeddings": 1024},
            "data": {"train": str(tmp_path / "all.txt"), "tokenizer": {"bpe": 280}, **data},
            "training": {"tokens": 128, "sequences": 1, "lr": 1e-2},
        },
        data={"train": {name: {"text": str(tmp_path / f"{name}.txt")} for name in TEXTS}, **data},
        training={"tokens": 640, "sequences": 1, "lr": 1e-2},
        methods=[
            {"name": "text", "stages": [{"share": 1}]},
            {"name": "rows", "stages": [rows]},
            {"name": "both", "stages": [{"share": 0.4}, {**rows, "trains": "lora", "share": 0.6}]},
        ],
        asked={
            "tools": str(tmp_path / "tools.py"), "questions": {"far": str(tmp_path / "asked.jsonl")},
            "rounds": 1, "new_tokens": 2,
        },
    )  # fmt: skip
    code, out, err = run_cli(monkeypatch, capsys, "grow", path, "-o", tmp_path / "runs")
    assert code == 0, err
    results = json.loads((tmp_path / "runs" / "growths" / "growths.json").read_text())
    runs = {run["method"]: run for run in results["runs"]}
    assert [name for name, run in runs.items() if "asked" in run] == ["rows", "both"]
    assert runs["rows"]["tokens"] == runs["both"]["tokens"] == runs["text"]["tokens"] == 640
    assert runs["rows"]["asked"]["far"]["answer"]["n"] == 1 and runs["rows"]["asked"]["far"]["answer"]["error"] is None
    (row,) = [row for row in results["methods"] if row["method"] == "both"]
    assert row["asked"]["far"] == {key: runs["both"]["asked"]["far"][key]["share"] for key in row["asked"]["far"]}
    assert "questions answered right" in out and "with the tools, and without any" in out
    loaded = load_growths(path)
    folder = model_of(loaded, tmp_path / "runs" / "growths", runs["rows"]["path"][-1]["stage"])
    assert "Final Answer" in (folder / "chat_template.jinja").read_text()
    code, out, _ = run_cli(monkeypatch, capsys, "cost", path)
    assert code == 0 and "all 256, lora sft 384" in out and "640" in out

    # other questions, or another held-out text, are asked of the same models
    before = {file: file.stat().st_mtime_ns for file in folder.parent.parent.glob("*/*.json*")}
    judges = [file for file in before if file.name == "judged_by.json"]
    judged = next(file for file in judges if not json.loads(file.read_text())["asked"])  # of a model without questions
    noted = judged.read_text()
    judged.unlink()  # of a version that noted nothing
    asked = [{"question": f"{i}?", "answer": "far"} for i in "ab"]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    again = {run["method"]: run for run in run_growths(loaded, tmp_path / "runs", say=lambda words: None)["runs"]}
    assert [again[name]["asked"]["far"]["answer"]["n"] for name in ("rows", "both")] == [2, 2]
    assert again["text"] == runs["text"] and not judged.exists()
    judged.write_text(noted)
    (tmp_path / "sea-held-out.txt").write_text(TEXTS["sky"] * 9)
    again = {run["method"]: run for run in run_growths(loaded, tmp_path / "runs", say=lambda words: None)["runs"]}
    assert again["text"]["sea"] == again["text"]["sky"] == runs["text"]["sky"] != runs["text"]["sea"]
    trained = [file for file in before if file.name in ("metrics.jsonl", "result.json")]
    assert trained and all(file.stat().st_mtime_ns == before[file] for file in trained)


def test_what_starts_from_nothing_may_spend_what_the_base_cost(tmp_path):
    fresh = {"stages": [{"grow": {"name": "moe_scratch", "disciplines": 2, "slices": 4}}, {"share": 1, "sequences": 4}]}
    ways = [{"name": name, "spends_base": spends, **fresh} for name, spends in (("less", False), ("more", True))]
    loaded = load_growths(recipe(tmp_path, methods=ways))
    base = Unit("base", "train", FathomConfig(**loaded.base["model"]), flops=1e9)
    less, more = (plan(loaded, way, 0, base)[-2] for way in loaded.methods)
    step = less.flops / (less.tokens // (2 * STEP))
    assert less.sequences == 4 and more.flops - less.flops == pytest.approx(1e9, abs=step)
    with pytest.raises(ValueError, match=r"methods.more.spends_base=True: base.checkpoint does not say"):
        load_growths(recipe(tmp_path, methods=ways, base={"checkpoint": "BASE"}))


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([{"grow": {"name": "inovator"}}, {"share": 1}], "grow.name='inovator': no such method"),
        ([BRANCHES, {"share": 0.6}], "branches that no surgery takes"),
        (
            [BRANCHES, {"grow": {"name": "sparse_upcycling"}}],
            r"stages\[1\].grow='sparse_upcycling': it takes no branches",
        ),
        ([{"grow": {"name": "btx"}}], r"stages\[0\].grow='btx': it needs branches"),
        ([{**BRANCHES, "trains": "all"}, SURGERY], "branches that train: feed_forward alone, and these train 'all'"),
        ([SURGERY, {"share": 0.5}, SURGERY], r"stages\[2\].grow='innovator': it starts from feed_forward='moe'"),
        ([{"share": 0.001}], r"stages\[0\].share=0.001: less than one step of 16 tokens"),
    ],
)
def test_stages_that_do_not_fit_are_refused_before_anything_trains(stages, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        run_growths(load_growths(recipe(tmp_path, methods=[{"name": "a", "stages": stages}])), tmp_path / "runs")
    assert not list((tmp_path / "runs").glob("*/base"))


@pytest.mark.parametrize("name", ["discipline", "slices"])
def test_options_of_a_grown_model_may_change_where_its_tensors_do_not(name, tmp_path):
    """A stage sets losses; another number of experts is another model."""
    tiny_model(feed_forward={"name": "moe", "experts": 4, "slices": 2, "width": 16}).save_pretrained(tmp_path)
    options = {"name": "moe", name: 0.5 if name == "discipline" else 4}
    model = FathomForCausalLM.from_pretrained(tmp_path, feed_forward=options)
    assert model.config.feed_forward[name] == options[name] and model.config.feed_forward["width"] == 16
    with pytest.raises(ValueError, match="tensors have other shapes"):
        FathomForCausalLM.from_pretrained(tmp_path, feed_forward={"name": "moe", "experts": 6})


@pytest.mark.parametrize("name", ["growth_small", "growth_ways", "growth_cpu", "growth_ways_cpu", "specialist"])
def test_shipped_recipes_fit(name):
    loaded = load_growths(RECIPES / f"{name}.yaml")
    base = Unit("base", "train", FathomConfig(**loaded.base["model"]))
    for way in loaded.methods:
        assert sum(unit.flops for unit in plan(loaded, way, 0, base)) > 0, way.name


def test_the_same_specialist_starts_from_a_checkpoint():
    """Its methods are specialist.yaml's, with the shares of a smaller budget; they spend what those of one base do."""
    ours, theirs = (load_growths(RECIPES / f"specialist{name}.yaml") for name in ("", "_smollm2"))
    stages = {way.name: [(stage.task, stage.data, stage.weights) for stage in way.stages] for way in ours.methods}
    base = Unit("base", "given", FathomConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2))
    for way in theirs.methods:
        assert [(stage.task, stage.data, stage.weights) for stage in way.stages] == stages[way.name]
        planned = plan(theirs, way, 0, base)
        step = theirs.training.sequences * theirs.data.block_size
        assert 0 <= theirs.training.tokens - sum(unit.tokens for unit in planned) <= 3 * step

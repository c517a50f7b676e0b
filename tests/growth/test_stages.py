"""A recipe of growths: Innovator's four stages beside cheaper ways, at equal training FLOPs, what a stage leaves."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from fathom import FathomConfig, FathomForCausalLM
from fathom.cost import training_flops_per_token
from fathom.report import growing
from fathom.report.growing import Unit, load_growths, model_of, plan, run_growths, show
from tiny import tiny_model
from tiny_checkpoint import run_cli, save_fathom

TEXTS = {"sky": "star moon orbit comet planet. ", "sea": "wave fish salt reef tide. "}
STEP = 2 * 8  # tokens
BRANCHES = {"branches": ["sky", "sea"], "trains": "feed_forward", "share": 0.4}
LOSS = {"discipline": 0.1, "discipline_anneals": True, "selection": "expert"}
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
    ],
)
def test_recipes_that_say_nonsense_are_refused(methods, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        load_growths(recipe(tmp_path, methods=methods))


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


@pytest.mark.parametrize("name", ["small", "ways", "cpu", "ways_cpu"])
def test_shipped_recipes_fit(name):
    loaded = load_growths(Path(__file__).parents[2] / f"recipes/growth_{name}.yaml")
    base = Unit("base", "train", FathomConfig(**loaded.base["model"]))
    for way in loaded.methods:
        assert sum(unit.flops for unit in plan(loaded, way, 0, base)) > 0, way.name

"""`fathom train` from the command line."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml

import fathom_cli as cli
from fathom.evaluate.downstream import Accuracy, Downstream


@pytest.fixture
def recipe_file(text, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    recipe = {
        "name": "tiny",
        "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "methods": ["vanilla", {"name": "loop-2", "depth": {"name": "loop", "passes": 2}}],
        "data": {**text, "tokenizer": {"bpe": 270}, "block_size": 16, "num_proc": 1},
        "training": {"tokens": 320, "sequences": 4, "lr": [1e-6, 1e-2], "sweep_fraction": 0.4},
        "seeds": [7],
    }
    path.write_text(yaml.safe_dump(recipe))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fathom", "train", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


def test_trains_with_the_best_rate_and_says_where_the_model_is(monkeypatch, capsys, tmp_path, recipe_file) -> None:
    assert run(monkeypatch, recipe_file, "--method", "loop-2", "--output", tmp_path / "runs") == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "tiny" / "loop-2-seed7"
    assert f"Model: {folder}/model" in out and (folder / "model" / "config.json").exists()
    assert "lr 1e-06: validation loss" in out and "The best, 0.01, is at the edge" in out
    assert re.search(r"loop-2: 320 tokens, .* FLOPs, [\d,]+ tokens/s, train loss", out)  # one stretch: no spread


def test_a_sweep_is_run_once_for_all_seeds_and_for_compare(monkeypatch, capsys, tmp_path, recipe_file) -> None:
    from fathom.report.compare import compare

    runs = tmp_path / "runs"
    compare(recipe_file, runs, say=lambda line: None)
    trials = {path: path.stat().st_mtime_ns for path in (runs / "tiny").rglob("sweep/*/result.json")}
    assert len(trials) == 4
    for seed in (7, 8):
        assert run(monkeypatch, recipe_file, "--method", "vanilla", "--seed", seed, "--output", runs) == 0
        assert "lr 1e-06: validation loss" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (runs / "tiny").rglob("lr-*/result.json")} == trials


def test_every_step_is_shown_once(monkeypatch, capsys, tmp_path, recipe_file) -> None:
    monkeypatch.setattr("fathom.train.progress._SECONDS_BETWEEN_LINES", 0.0)
    assert run(monkeypatch, recipe_file, "--method", "vanilla", "--output", tmp_path / "runs") == 0
    shown = [line.split("  loss ")[0] for line in capsys.readouterr().out.splitlines() if "  step " in line]
    assert [line for line in shown if shown.count(line) > 1] == []
    assert "vanilla seed 7 lr 1e-06  step 2/2" in shown and "vanilla seed 7 lr 0.01  step 5/5" in shown


def test_interrupt(monkeypatch, capsys, tmp_path, recipe_file) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fathom.train.sweep_lr", interrupted)
    assert run(monkeypatch, recipe_file, "--method", "vanilla", "--output", tmp_path / "runs") == 130
    assert "resume from the last complete checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--method is missing: {file} lists vanilla, loop-2; choose one (`fathom compare` trains all)"),
        (["--method", "lop-2"], "method 'lop-2' is not in the recipe (did you mean 'loop-2'?); it has vanilla, loop-2"),
    ],
)
def test_which_method(monkeypatch, capsys, recipe_file, arguments, message) -> None:
    assert run(monkeypatch, recipe_file, *arguments) == 2
    assert capsys.readouterr().err == f"fathom: {message.format(file=recipe_file)}\n"


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_a_wrong_option_is_refused_before_the_text_is_read(monkeypatch, capsys, tmp_path, recipe_file, verb) -> None:
    recipe = yaml.safe_load(recipe_file.read_text())
    recipe["methods"] = [{"name": "loop", "depth": {"name": "loop", "pases": 2}}]
    recipe["data"]["train"] = str(tmp_path / "absent.txt")
    recipe_file.write_text(yaml.safe_dump(recipe))
    monkeypatch.setattr(sys, "argv", ["fathom", verb, str(recipe_file), "--output", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "'loop' has no option 'pases' (did you mean 'passes'?)" in capsys.readouterr().err


def change(recipe_file: Path, **sections: object) -> None:
    recipe_file.write_text(yaml.safe_dump({**yaml.safe_load(recipe_file.read_text()), **sections}))


def test_sections_of_a_comparison_are_said_and_a_methods_own_seed_is_taken(monkeypatch, capsys, tmp_path, recipe_file):
    methods = [{"name": "vanilla", "seeds": [5], "lr": 1e-2}]
    change(recipe_file, methods=methods, budgets=["tokens", "train_flops"], retrain=1)
    assert run(monkeypatch, recipe_file, "--output", tmp_path / "runs") == 0
    said = capsys.readouterr()
    assert "Only `fathom compare` reads budgets and retrain: this run has the length of `training`." in said.err
    assert f"Model: {tmp_path}/runs/tiny/vanilla-seed5/model" in said.out
    change(recipe_file, budgets=["tokens"], retrain=0)
    assert run(monkeypatch, recipe_file, "--output", tmp_path / "runs") == 0  # finished: only told again
    assert "fathom compare" not in capsys.readouterr().err


def test_downstream_tasks_are_asked_after_the_training(monkeypatch, capsys, tmp_path, recipe_file) -> None:
    """What lm_eval says of them, tests/report/test_compare.py asks."""
    asked: list[str] = []

    def load(section: Downstream) -> dict:
        if section.tasks == ("shure",):
            raise ValueError("no task is named shure")
        return {}

    def measured(section: Downstream, model: object, tokenizer: object) -> dict[str, Accuracy]:
        asked.append(type(model).__name__)
        return {"sure": Accuracy("acc", 0.75, 0.25, 0.5, 4)}

    monkeypatch.setattr(Downstream, "load", load)
    monkeypatch.setattr(Downstream, "measure", measured)
    change(recipe_file, methods=[{"name": "vanilla", "lr": 1e-2}], downstream={"tasks": ["shure"]})
    assert run(monkeypatch, recipe_file, "--output", tmp_path / "runs") == 2  # before anything trains
    assert "shure" in capsys.readouterr().err and not (tmp_path / "runs" / "tiny").exists()
    change(recipe_file, downstream={"tasks": ["sure"]})
    for _ in range(2):  # the second time from the file that the first one left
        assert run(monkeypatch, recipe_file, "--output", tmp_path / "runs") == 0
        assert "sure: acc 0.7500 ± 0.2500, guessing 0.5000 (4 documents)" in capsys.readouterr().out
    assert asked == ["FathomForCausalLM"]


def test_a_recipe_that_is_not_there(monkeypatch, capsys, tmp_path) -> None:
    assert run(monkeypatch, tmp_path / "absent.yaml") == 2
    assert capsys.readouterr().err == f"fathom: {tmp_path}/absent.yaml: No such file or directory\n"


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_an_extra_that_is_not_installed_is_named_before_the_text_is_read(
    monkeypatch, capsys, tmp_path, recipe_file, verb
) -> None:
    recipe = yaml.safe_load(recipe_file.read_text())
    recipe["methods"] = ["vanilla"]
    recipe["training"]["tensorboard"] = True
    recipe["data"]["train"] = str(tmp_path / "absent.txt")
    recipe_file.write_text(yaml.safe_dump(recipe))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "tensorboard" else find(name, *rest)
    )
    monkeypatch.setattr(sys, "argv", ["fathom", verb, str(recipe_file), "--output", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2 and "pip install 'fathom-lm[tensorboard]'" in capsys.readouterr().err

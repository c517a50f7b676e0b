"""What every task is: its case, its page of a comparison, its section of the guide, and what recipes cannot say."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
import yaml
from cases import CASES, recipe

from fathom.data import DataConfig
from fathom.report.compare import compare
from fathom.report.results import Results
from fathom.tasks import Task, tasks
from fathom.train import load_recipe


def test_every_task_has_a_case_and_says_what_it_is():
    assert set(CASES) == set(tasks())
    for name, task in tasks().items():
        assert task.name == name and issubclass(task, Task) and dataclasses.is_dataclass(task)
        assert task.scores and {score.better for score in task.scores} <= {"lower", "higher"}
        assert set(task.invariants) <= {"padding", "packing"}


def fields_read(kind, monkeypatch):
    """The fields of a dataclass that anything asks of any instance from here on; not those that it checks or copies."""
    names, read = {field.name for field in dataclasses.fields(kind)}, set()

    def asked(self, name):
        if name in names:
            caller = sys._getframe(1).f_code
            if not caller.co_filename.endswith("dataclasses.py") and caller.co_name not in ("__post_init__", "check"):
                read.add(name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(kind, "__getattribute__", asked, raising=False)
    return read


@pytest.mark.parametrize("task", tasks())
def test_sweep_budget_results_and_page_show_every_score(task, tmp_path, monkeypatch):
    """Over `examples`; the learning rate is chosen by the headline score. Every field of `data` is read or refused."""
    read = fields_read(DataConfig, monkeypatch)
    written = recipe(task, tmp_path, training={"lr": [1e-5, 1e-2], "sweep_fraction": 0.5})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(written))
    said: list[str] = []
    results = compare(tmp_path / "recipe.yaml", tmp_path, say=said.append)
    (run,) = results.runs
    everything = {field.name for field in dataclasses.fields(DataConfig)}
    assert everything - read - set(tasks()[task].unused) <= {"shuffle_buffer", "num_proc"}  # streaming; changes nothing
    loaded = load_recipe(tmp_path / "recipe.yaml")
    per_sequence = loaded.task.prepare(loaded.data, tmp_path / ".data").examples_per_sequence
    steps = math.floor(40 / per_sequence + 1e-9) // 2
    assert run.budget == "examples" and run.train_tokens == steps * 2 * loaded.data.block_size
    assert run.train_examples == pytest.approx(steps * 2 * per_sequence)
    names = [score.name for score in loaded.task.scores]
    assert list(run.scores) == names and run.answer_flops > 0 and len(results.trials) == 2
    headline = loaded.task.headline
    best = min(results.trials, key=lambda trial: (headline.loss(trial.scores[headline.name]), trial.validation_loss))
    assert best.chosen and best.lr == run.lr == 1e-2
    assert all(f"{run.scores[s.name]:.3f} {s.unit}" in said[-1] for s in loaded.task.scores)
    assert Results.load(tmp_path / "tiny" / "results.json") == results
    file = json.loads((tmp_path / "tiny" / "results.json").read_text())
    assert [(s["name"], s["better"]) for s in file["scores"]] == [(s.name, s.better) for s in loaded.task.scores]
    assert (
        file["task"] == loaded.task.section
        and file[f"{loaded.task.reference_name}_{headline.name}"] == results.reference
    )
    page = (tmp_path / "tiny" / "report.html").read_text()
    for score in loaded.task.scores:
        assert f'data-name="{score.name}"' in page
        assert f"On {loaded.task.held_out}, {score.better} is better" in page
        assert f"<b>{score.heading}</b> ({score.better} is better)" in page
        assert page.count(f'title="{score.better} is better">{score.heading}<') == 2  # the sweep, every run
    for note in results.notes:
        assert note.replace("'", "&#39;") in page


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "causal_ml",
            r"task: task 'causal_ml' does not exist \(did you mean 'causal_lm'\?\); available: .*, causal_lm, .*, sft",
        ),
        ({"name": "sftt"}, r"'sftt' does not exist \(did you mean 'sft'\?\)"),
        (
            {"packing": True},
            r"task={'packing': True}: give a task's name, or a mapping with `name`; tasks: .*, causal_lm, .*, sft, .*",
        ),
        (
            {"name": "sft", "paking": True},
            r"unknown key task.paking \(did you mean 'packing'\?\); task 'sft' has the opt",
        ),
        ({"name": "causal_lm", "packing": True}, "unknown key task.packing; task 'causal_lm' has the options: none"),
        ({"name": "sft", "packing": "no"}, "task.packing='no': must be of type bool"),
        ({"name": "sft", "questions": 0}, "task sft option questions=0: must be an integer of at least 1"),
    ],
)
def test_a_task_that_cannot_be_is_refused_by_name(section, message, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**recipe("sft", tmp_path), "task": section}))
    with pytest.raises(ValueError, match=message):
        load_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize("task", tasks())
def test_the_guide_lists_options_and_scores(task):
    guide = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    section = guide[guide.index("## Tasks") : guide.index("## Run it")]
    names = [field.name for field in dataclasses.fields(tasks()[task])] + [score.name for score in tasks()[task].scores]
    assert f"**`{task}`**" in section and not [name for name in names if f"`{name}`" not in section]

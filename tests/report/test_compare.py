"""The comparison itself, on models of a few thousand parameters."""

import json
import math
import random
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from fathom.data import PreparedData, prepare
from fathom.inspect import DepthMap
from fathom.report import compare as engine
from fathom.report import measure
from fathom.report.compare import compare
from fathom.report.plan import inference_flops, plan
from fathom.report.processes import devices_of
from fathom.report.results import Results
from fathom.train import load_recipe, model_config

WORDS = ["the", "sea", "was", "calm", "and", "old", "men", "sat", "by", "it", "in", "silence"]
RECIPE = """
name: tiny
model: {backbone: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2}
methods:
  - {name: vanilla, lr: [1.0e-3, 1.0e-2]}
  - {name: loop, depth: {name: loop, passes: 2}, mixer: {name: depth_attention}}
data: {train: FOLDER/train.txt, validation: FOLDER/held-out.txt, tokenizer: {bpe: 300}, block_size: 32, num_proc: 1}
training: {tokens: 768, sequences: 4, lr: 1.0e-2, log_every: 1}
seeds: [0, 1]
budgets: [tokens, train_flops, inference_flops]
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A comparison that was interrupted after its first run, and then run to its end."""
    folder = tmp_path_factory.mktemp("compare")
    words = random.Random(0).choices(WORDS, k=3000)
    (folder / "train.txt").write_text(" ".join(words[:2500]))
    (folder / "held-out.txt").write_text(" ".join(words[2500:]))
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.replace("FOLDER", str(folder)))
    said = []

    def interrupt(line):
        said.append(line)
        if line.startswith("vanilla/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(path, folder, say=interrupt)
    first = next(folder.glob("tiny/vanilla/tokens-*/result.json"))
    written = first.stat().st_mtime_ns
    partly = {run.folder for run in Results.load(folder / "tiny" / "results.json").runs}
    results = compare(path, folder, say=said.append)
    assert partly < {run.folder for run in results.runs}
    assert first.stat().st_mtime_ns == written  # skipped
    return folder, path, results, said


@pytest.fixture
def no_page(monkeypatch):
    """The page's plots take longer than the runs, and every comparison that ends draws them."""
    monkeypatch.setattr(engine, "write_report", lambda results, folder: None)


def recipe_and_plan(finished):
    folder, path, _, _ = finished
    recipe = load_recipe(path)
    data = prepare(recipe.data, folder / ".data")
    return recipe, data, plan(recipe, data)


def test_every_method_and_seed_under_every_budget(finished):
    folder, _, results, said = finished
    wanted = [
        (b, m, s) for b in ("tokens", "train_flops", "inference_flops") for m in ("vanilla", "loop") for s in (0, 1)
    ]
    assert [(run.budget, run.method, run.seed) for run in results.runs] == wanted
    assert Results.load(folder / "tiny" / "results.json") == results
    assert (folder / "tiny" / "report.html").stat().st_size > 100_000
    assert not results.failures
    assert said[0].startswith("Unigram baseline: ")


def test_runs_hold_what_was_measured(finished):
    for run in finished[2].runs:
        assert 0 < run.scores["bits_per_byte"] < 8 and run.answer_flops == run.inference_flops_per_token
        assert run.train_flops > 0 and run.tokens_per_second > 0 and run.interruptions == 0
        low, high = run.tokens_per_second_interval or (0.0, 1e9)
        assert low <= run.tokens_per_second <= high and (run.tokens_per_second_interval is None) == (
            run.train_tokens < 6 * 128
        )
        assert [point["tokens"] for point in run.history] == sorted(point["tokens"] for point in run.history)
        assert [set(sample) for sample in run.samples] == [{"prompt", "text"}] * 2
        assert run.versions["torch"] and run.commit and run.device


def test_pictures_of_the_held_out_text_are_in_the_report(finished):
    folder, _, results, _ = finished
    assert [list(run.pictures) for run in results.runs] == [
        [] if run.method == "vanilla" else ["depth_map"] for run in results.runs
    ]
    found = DepthMap(**results.runs[-1].pictures["depth_map"])
    blocks = prepare(load_recipe(finished[1]).data, folder / ".data").validation
    assert found.tokens == min(len(blocks) * 32, measure.PICTURE_TOKENS) - 1 and found.window == 32
    assert {row["index"] for row in found.rows} == {1, 2, 3}
    page = (folder / "tiny" / "report.html").read_text()
    assert page.count(DepthMap.title + ": ") == 1
    assert (folder / "tiny" / "plots" / "loop_depth_map.png").stat().st_size > 10_000


def test_a_run_keeps_the_commit_it_began_with(finished, monkeypatch, no_page):
    folder, path, results, _ = finished
    (folder / "tiny" / results.runs[0].folder / "measured.json").unlink()
    monkeypatch.setattr(measure, "provenance", lambda runs: {"versions": {}, "commit": "later", "device": "other"})
    assert compare(path, folder, say=lambda line: None) == results


def test_a_run_that_starts_again_is_signed_again(finished, tmp_path, monkeypatch, no_page):
    """Killed before its first checkpoint: metrics of the first attempt are there, nothing to go on from."""
    folder, path, results, _ = finished
    shutil.copytree(folder, tmp_path / "runs")
    where = tmp_path / "runs" / "tiny" / results.runs[0].folder
    for left in where.iterdir():
        if left.name not in ("metrics.jsonl", "run.json", "provenance.json"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    signed = json.loads((where / "provenance.json").read_text())
    monkeypatch.setattr(measure, "provenance", lambda runs: {**signed, "commit": "later"})
    again = compare(path, tmp_path / "runs", say=lambda line: None)
    assert {run.folder for run in again.runs if run.commit == "later"} == {results.runs[0].folder}


def test_a_run_measured_before_there_were_pictures_is_measured_again(finished, no_page):
    folder, path, results, _ = finished
    file = folder / "tiny" / results.runs[-1].folder / "measured.json"
    measured = json.loads(file.read_text())
    assert measured.pop("pictures")
    file.write_text(json.dumps(measured))
    assert compare(path, folder, say=lambda line: None) == results


def test_the_same_run_is_trained_once(finished):
    runs = finished[2].runs
    first = {run.budget: run.folder for run in runs if run.method == "vanilla" and run.seed == 0}
    assert first["tokens"] == first["train_flops"] != first["inference_flops"]
    dearest = {run.budget: run.folder for run in runs if run.method == "loop" and run.seed == 0}
    assert dearest["tokens"] == dearest["inference_flops"] != dearest["train_flops"]


def test_budgets_of_the_same_steps_share_a_run(tmp_path):
    """ponderlm3's router costs a little: without whole steps it would train ponderlm2 and itself twice."""
    text = (Path(__file__).parents[2] / "recipes" / "latent_thoughts.yaml").read_text()
    path = tmp_path / "both_calls.yaml"
    path.write_text(text.replace("# - {name", "- {name"))
    recipe = load_recipe(path)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({str(i): i for i in range(8192)}, unk_token="0"))
    )
    tokens = {}
    for run in plan(recipe, PreparedData(None, None, tokenizer, 0, 0)):
        tokens.setdefault(run.method.name, []).append(run.tokens)
    assert tokens["ponderlm2"] == tokens["ponderlm3-1"] == [40960000, 40960000]
    assert all(n % (64 * 512) == 0 for both in tokens.values() for n in both)
    assert 270e6 < tokens["vanilla"][1] < 280e6 and 14e6 < tokens["ponderlm3-3"][1] < 15e6


def test_train_flops_are_equal_to_a_step(finished):
    runs = [run for run in finished[2].runs if run.budget == "train_flops" and run.seed == 0]
    assert len({run.train_tokens for run in runs}) == 2
    step = max(run.train_flops / run.train_tokens * 4 * 32 for run in runs)
    assert abs(runs[0].train_flops - runs[1].train_flops) <= step


def test_inference_flops_are_matched_by_whole_layers(finished):
    recipe, data, planned = recipe_and_plan(finished)
    matched = {p.method.name: p for p in planned if p.budget == "inference_flops"}
    assert (matched["vanilla"].layers, matched["loop"].layers) == (4, 2)
    costs = {
        n: inference_flops(model_config(recipe, p.method, data.tokenizer), recipe, data) for n, p in matched.items()
    }
    assert matched["loop"].residual_percent == 0
    assert matched["vanilla"].residual_percent == pytest.approx(100 * (costs["vanilla"] / costs["loop"] - 1))
    assert abs(matched["vanilla"].residual_percent) <= 3


def test_the_sweep_is_kept_and_its_best_rate_used(finished):
    results = finished[2]
    for layers in (2, 4):
        trials = [trial for trial in results.trials if (trial.method, trial.layers) == ("vanilla", layers)]
        best = min(trials, key=lambda trial: trial.validation_loss)
        assert len(trials) == 2 and best.chosen
        assert {run.lr for run in results.runs if (run.method, run.layers) == ("vanilla", layers)} == {best.lr}
    assert not [trial for trial in results.trials if trial.method == "loop"]


def test_several_processes_give_the_same_results(finished, no_page):
    folder, path, results, _ = finished
    lost = folder / "tiny" / results.runs[0].folder / "result.json"
    before = json.loads(lost.read_text())
    lost.unlink()  # as if killed before the run was reported
    again = compare(path, folder, jobs=2, say=lambda line: None)
    assert json.loads(lost.read_text())["bits_per_byte"] == before["bits_per_byte"]
    assert again == results
    assert list((folder / "tiny" / "logs").glob("*.log"))


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "the sea was"
doc_to_target: gold
doc_to_choice: ["calm", "calm and old men sat by it in silence and the sea was calm"]
metric_list: [{{metric: acc}}]
"""


def test_finished_runs_are_asked_downstream_tasks_and_not_trained_again(finished, monkeypatch):
    """The shorter of two choices is always likelier: right in every document of one task, in half of the other's."""
    pytest.importorskip("lm_eval", reason="lm_eval is the optional extra [eval]")
    folder, path, before, _ = finished
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, golds in (("sure", [0] * 8), ("even", [0, 1] * 4)):
        (tasks / f"{name}.jsonl").write_text("".join(json.dumps({"gold": gold}) + "\n" for gold in golds))
        (tasks / f"{name}.yaml").write_text(TASK.format(name=name, file=tasks / f"{name}.jsonl"))
    asked = folder / "asked.yaml"
    recipe = (
        path.read_text()
        .replace("seeds: [0, 1]", "seeds: [0]")
        .replace("[tokens, train_flops, inference_flops]", "[tokens]")
    )
    asked.write_text(recipe + f"downstream: {{tasks: [sure, even], task_dir: {tasks}}}\n")
    monkeypatch.setattr(measure, "_describe", None)  # nothing is trained or measured again
    results = compare(asked, folder, say=lambda line: None)
    assert {run.folder for run in results.runs} < {run.folder for run in before.runs}
    error = {"sure": 0.0, "even": pytest.approx(math.sqrt(0.25 / 7))}  # lm_eval's has n - 1
    for run in results.runs:
        assert run.downstream == {
            name: {"metric": "acc", "value": value, "error": error[name], "chance": 0.5, "documents": 8}
            for name, value in (("sure", 1.0), ("even", 0.5))
        }
    found = Results.load(folder / "tiny" / "results.json").downstream["tokens"]
    assert (found["no_signal"], found["in_mean"]) == (["even"], ["sure"])
    assert {name: method["mean"] for name, method in found["methods"].items()} == {"vanilla": 1.0, "loop": 1.0}
    page = (folder / "tiny" / "report.html").read_text()
    assert "even (no signal)" in page and "within two standard errors of guessing on even" in page

    monkeypatch.setattr("fathom.evaluate.downstream.evaluate_tasks", None)  # nor asked again
    monkeypatch.setattr(engine, "write_report", lambda results, folder: None)
    assert compare(asked, folder, say=lambda line: None).downstream == results.downstream


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{tasks: []}", "downstream.tasks=.*must name a task"),
        ("{tasks: [sure], limit: 0}", "downstream.limit=0: must be at least 1"),
        ("{tasks: [sure], folder: x}", "unknown key downstream.folder"),
        ("{tasks: [sure]}\ntask: {name: classification}", "lm_eval cannot ask models of task 'classification'"),
    ],
)
def test_downstream_options_are_checked(finished, tmp_path, section, message):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(finished[1].read_text() + f"downstream: {section}\n")
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe)


def test_a_task_without_an_accuracy_is_refused_before_anything_trains(finished, tmp_path):
    pytest.importorskip("lm_eval", reason="lm_eval is the optional extra [eval]")
    (tmp_path / "documents.jsonl").write_text(json.dumps({"gold": 0}) + "\n")
    task = TASK.format(name="likely", file=tmp_path / "documents.jsonl").replace("multiple_choice", "loglikelihood")
    (tmp_path / "likely.yaml").write_text(task.replace("{metric: acc}", "{metric: perplexity}"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(finished[1].read_text() + f"downstream: {{tasks: [likely], task_dir: {tmp_path}}}\n")
    with pytest.raises(ValueError, match="'likely' has no accuracy"):
        compare(recipe, tmp_path, say=lambda line: None)


def test_a_row_is_finished_before_the_next_is_swept(finished, tmp_path, monkeypatch, no_page):
    done = []
    trial, run = engine.try_lr, engine.measure
    monkeypatch.setattr(
        engine, "try_lr", lambda r, method, lr, **k: done.append(method.name) or trial(r, method, lr, **k)
    )
    monkeypatch.setattr(engine, "measure", lambda planned, *a: done.append(planned.folder) or run(planned, *a))
    path = tmp_path / "swept.yaml"
    text = (
        finished[1].read_text().replace("[0, 1]", "[0]").replace("[tokens, train_flops, inference_flops]", "[tokens]")
    )
    path.write_text(text.replace("{name: loop, depth", "{name: loop, lr: [1.0e-3, 1.0e-2], depth"))
    compare(path, tmp_path, say=lambda line: None)
    assert [name.split("/")[0] for name in done] == ["vanilla"] * 3 + ["loop"] * 3
    assert [name for name in done if "/" in name] == [done[2], done[5]]


def test_a_failed_run_is_reported_and_stops_no_other(finished, monkeypatch):
    folder, path, results, _ = finished
    train_run = measure.train_run

    def fail_loop(recipe, method, **arguments):
        if method.name == "loop":
            raise OSError("no space left on device")
        return train_run(recipe, method, **arguments)

    monkeypatch.setattr(measure, "train_run", fail_loop)
    partly = compare(path, folder, say=lambda line: None)
    assert {run.method for run in partly.runs} == {"vanilla"}
    assert len(partly.failures) == 4 and "no space left on device" in partly.failures[0]
    monkeypatch.undo()
    monkeypatch.setattr(engine, "write_report", lambda results, folder: None)
    assert compare(path, folder, say=lambda line: None) == results


def test_bad_arguments_name_the_remedy(finished, tmp_path, monkeypatch):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("validation: FOLDER/held-out.txt", "validation: null"))
    with pytest.raises(ValueError, match=r"data\.validation is null; a comparison needs held-out text"):
        compare(path, tmp_path)
    with pytest.raises(ValueError, match="--jobs 0: must be at least 1"):
        compare(finished[1], tmp_path, jobs=0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices_of(3) == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert devices_of(3) == ["4", "6", "4"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="run it without torchrun and give --jobs"):
        compare(finished[1], tmp_path)


def test_layers_of_a_checkpoint_cannot_be_matched(finished):
    folder, path, results, _ = finished
    _, data, _ = recipe_and_plan(finished)
    model = folder / "tiny" / results.runs[0].folder / "model"
    fixed = path.with_name("fixed.yaml")
    text = RECIPE.replace(
        RECIPE[RECIPE.index("model:") : RECIPE.index("methods:")], f"model: {{checkpoint: {model}}}\n"
    )
    fixed.write_text(text.replace("tokenizer: {bpe: 300}, ", ""))
    with pytest.raises(ValueError, match=r"inference_flops adds layers .* model\.checkpoint fixes them"):
        plan(load_recipe(fixed), data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("budgets: [tokens", "budgets: [{tokens: 100}"), r"budgets\.tokens=100: leaves vanilla 100 tokens"),
        (("train_flops, ", "{train_flops: 1.0e6}, "), r"budgets\.train_flops=1e\+06: leaves vanilla \d+ tokens"),
        (
            ("tokens: 768, sequences: 4, lr: 1.0e-2", "tokens: 768, sequences: 20, lr: 1.0e-2"),
            "training.tokens=768: leaves loop",
        ),
    ],
)
def test_a_budget_of_less_than_a_step_is_refused(finished, changes, message):
    """The last: twice the FLOPs a token leave half the tokens."""
    path = finished[1].with_name("short.yaml")
    path.write_text(finished[1].read_text().replace(*changes).replace("lr: [1.0e-3, 1.0e-2]", "lr: 1.0e-2"))
    _, data, _ = recipe_and_plan(finished)
    with pytest.raises(ValueError, match=message):
        plan(load_recipe(path), data)

"""One finished run of every task: its batches, its scores, its card, and that it ends as one that was stopped."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import yaml
from cases import load
from independent_scores import independent_scores
from transformers import AutoConfig, TrainerCallback

from fathom.audiovideo.pipeline import MovaPipeline
from fathom.data import PreparedData
from fathom.tasks import lookup, tasks
from fathom.train import MethodConfig, Recipe, TrainResult, train_run

VANILLA = MethodConfig("vanilla")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, tuple[Recipe, PreparedData, TrainResult]]:
    """A finished run of every task that is asked for."""

    class Runs(dict):
        def __missing__(self, task):
            folder = tmp_path_factory.mktemp(task)
            loaded, data = load(task, folder)
            self[task] = loaded, data, train_run(loaded, VANILLA, seed=0, folder=folder / "run", data=data)
            return self[task]

    return Runs()


@pytest.mark.parametrize("task", tasks())
def test_a_batch_is_its_examples_and_its_targets_are_counted(trained, task):
    loaded, data, _ = trained[task]
    blocks = [data.validation[i] for i in range(2)]
    batch = loaded.task.collate(blocks)
    for row, block in enumerate(blocks):
        for name, value in block.items():
            assert torch.equal(batch[name][row], value if value.is_floating_point() else value.long())
    targets = sum(int(loaded.task.targets(loaded.task.collate([block]))) for block in data.validation)
    assert targets == data.validation_targets and data.validation_bytes > 0


@pytest.mark.parametrize("task", tasks())
def test_scores_are_those_of_the_files(trained, task):
    loaded, data, result = trained[task]
    model = loaded.task.model_class.from_pretrained(result.model).eval()
    with torch.no_grad():
        expected = independent_scores(task, loaded, data, model, result.model)
    # gaps are differences of losses in fp32
    assert {name: result.scores[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert set(result.scores) == {score.name for score in loaded.task.scores}
    written = json.loads((result.folder / "result.json").read_text())
    assert (
        written["scores"] == result.scores
        and set(expected.items())
        and all(written[n] == v for n, v in result.scores.items())
    )
    assert TrainResult.load(result.folder) == result


@pytest.mark.parametrize("task", tasks())
def test_the_card_of_a_trained_model_tells_recipe_and_scores(trained, task):
    loaded, _, result = trained[task]
    card = (result.model / "README.md").read_text()
    facts = json.loads((result.model / "fathom.json").read_text())
    assert facts["scores"][0]["value"] == result.scores[loaded.task.headline.name]
    assert f"| {loaded.task.headline.name} | {facts['scores'][0]['value']:.4g} |" in card
    assert f"{result.tokens:,} tokens" in card and str(result.folder.parent) not in card + json.dumps(facts)
    told = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert told["task"]["name"] == task and told["training"]["tokens"] == result.tokens


@pytest.mark.parametrize("task", tasks())
def test_every_kind_of_checkpoint_goes_to_the_hub_with_its_card(trained, task, hub):
    """Loaded as its card says, and pushed: recipe, numbers and licence are those of the training."""
    loaded, _, result = trained[task]
    model = AutoConfig.from_pretrained(result.model) if task != "audiovideo" else None
    kind = MovaPipeline if model is None else loaded.task.class_of(model)
    kind.from_pretrained(result.model).push_to_hub("me/model")
    pushed, facts = hub / "me" / "model", json.loads((result.model / "fathom.json").read_text())
    card, trained_card = ((folder / "README.md").read_text() for folder in (pushed, result.model))
    assert json.loads((pushed / "fathom.json").read_text()) == facts and list(pushed.rglob("*.safetensors"))
    for part in ("## Training", "## Measured", "## Licence"):
        assert card.split(part)[1].split("\n## ")[0] == trained_card.split(part)[1].split("\n## ")[0]
    assert "Its weights have changed" not in card and facts["recipe"]["data"]["train"]


@pytest.mark.parametrize("task", tasks())
def test_a_run_that_was_stopped_ends_as_one_that_was_not(trained, task, tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                raise KeyboardInterrupt

    loaded, data, whole = trained[task]
    arguments: Any = {"seed": 0, "folder": tmp_path / "run", "data": data}
    with pytest.raises(KeyboardInterrupt):
        train_run(loaded, VANILLA, **arguments, callbacks=[Stop()])
    resumed = train_run(loaded, VANILLA, **arguments)
    assert resumed.interruptions == 1 and resumed.scores == pytest.approx(whole.scores, abs=1e-6)
    assert resumed.train_loss == pytest.approx(whole.train_loss, abs=1e-6)
    options: Any = {
        "sft": {"questions": 3},
        "seq2seq": {"answers": 3},
        "classification": {"label_field": "kind"},
        "text_to_sql": {"databases": "other"},
        "table_to_text": {"answers": 3},
        "audiovideo": {"made": 3},
        "latent_diffusion": {"draws": 3},
        "contextual_decoder": {"examples": 4},
        "vqa": {"trains": "language"},
    }
    if task == "audiovideo":
        changed: Any = dataclasses.replace(loaded.task, **options[task])
    else:
        changed = lookup(task if task in options else "sft")(**options.get(task, {}))
    other = dataclasses.replace(loaded, task=changed)
    with pytest.raises(ValueError, match="holds another run: its task"):
        train_run(other, VANILLA, **arguments)

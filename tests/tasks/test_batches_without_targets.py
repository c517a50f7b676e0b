"""A batch whose labels are all cut off or masked: 0/0 would make every weight NaN, and a held-out loss with it."""

from __future__ import annotations

import pytest
import torch
from cases import load

from fathom.ops import cudnn_attention
from fathom.tasks import tasks
from fathom.train import trainer
from fathom.train.order import ShuffledBlocks
from fathom.train.recipe import model_config

EVERY_EXAMPLE = ("classification", "audiovideo")  # is predicted: they have no labels of −100
LOSSES = {task.forward: name for name, task in tasks().items() if name not in EVERY_EXAMPLE}  # a task for each


@pytest.mark.parametrize("task", LOSSES.values())
def test_its_loss_is_zero_and_so_are_its_gradients(task, tmp_path):
    loaded, data = load(task, tmp_path)
    method = loaded.methods[0]
    model = trainer._make_model(loaded, method, model_config(loaded, method, data.tokenizer), data, None)
    for training in (True, False):
        rows = ShuffledBlocks(data.train, 0, 2, loaded.task.numbered) if training else data.validation
        batch = loaded.task.collate([rows[i] for i in range(2)])
        batch["labels"] = torch.full_like(batch["labels"], -100)
        assert loaded.task.targets(batch) == 0
        loss = loaded.task.forward(model.train(training), **batch).loss
        assert float(loss.detach()) == 0
        if training:
            loss.backward()
            found = [weight.grad for weight in model.parameters() if weight.grad is not None]
            assert found and not any(gradient.any() for gradient in found)


def test_training_goes_without_an_attention_whose_gradients_are_nan(tmp_path, monkeypatch):
    seen = []

    def forward(self, model, **batch):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return model(**batch)

    before = torch.backends.cuda.cudnn_sdp_enabled()
    for name, faulty in (("sft", True), ("sft", False), ("causal_lm", True)):  # packed blocks have no padding
        loaded, data = load(name, tmp_path, training={"examples": 8})
        monkeypatch.setattr(type(loaded.task), "forward", forward)
        monkeypatch.setattr(cudnn_attention, "is_faulty", lambda faulty=faulty: faulty)
        trainer.train_run(loaded, loaded.methods[0], seed=0, folder=tmp_path / f"{name}-{faulty}", data=data)
        assert seen and set(seen) == {before and (name == "causal_lm" or not faulty)}
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
        seen.clear()

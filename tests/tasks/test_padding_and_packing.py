"""Rows beside others: padded or packed, they have the loss and the predictions that they have alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import load

from fathom import FathomConfig, FathomForCausalLM
from fathom.models.registry import REGISTRIES
from fathom.tasks import tasks
from tiny import SIZES, perturb


def tiny(vocabulary: int, **fields: Any) -> FathomForCausalLM:
    torch.manual_seed(0)
    model = FathomForCausalLM(
        FathomConfig(**{**SIZES, "vocab_size": vocabulary, "max_position_embeddings": 96, **fields})
    )
    perturb(model)
    return model.eval()


def alone(block: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, labels) of every row of a block, by the position ids that start again; padding is left out."""
    positions = block.get("position_ids")
    if positions is None:
        kept = int((block["labels"] != -100).nonzero().max()) + 1
        return [(block["input_ids"][:kept], block["labels"][:kept])]
    starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
    rows = [(block["input_ids"][a:b], block["labels"][a:b]) for a, b in pairwise(starts)]
    return [(ids, labels) for ids, labels in rows if (labels != -100).any()]


@pytest.mark.parametrize("task", [name for name, task in tasks().items() if "padding" in task.invariants])
def test_padded_rows_have_the_loss_that_they_have_alone(task, tmp_path):
    loaded, data = load(task, tmp_path, task={"packing": False})
    assert len(data.validation) == 20 and "position_ids" not in data.validation.column_names
    model = tiny(len(data.tokenizer))
    blocks = [data.validation[i] for i in range(len(data.validation))]
    batch = loaded.task.collate(blocks)
    together = loaded.task.forward(model, **batch).loss * loaded.task.targets(batch)
    rows = [row for block in blocks for row in alone(block)]
    assert len({len(ids) for ids, _ in rows}) > 1
    each = [
        model(ids[None].long(), labels=labels[None].long()).loss * (labels[1:] != -100).sum() for ids, labels in rows
    ]
    torch.testing.assert_close(together, sum(each), rtol=1e-5, atol=0)


DEPTHS = [{"name": name, **cls.variants[0]} for name, cls in REGISTRIES["depth"].items()]


@pytest.mark.parametrize("depth", DEPTHS, ids=lambda depth: depth["name"])
@pytest.mark.parametrize("task", [name for name, task in tasks().items() if "packing" in task.invariants])
def test_packed_rows_are_predicted_as_alone(task, depth, tmp_path_factory, request):
    """Under every depth method: those with slots and steps read documents from the same position ids."""
    if not hasattr(request.module, "_packed"):
        request.module._packed = load(task, tmp_path_factory.mktemp("packed"))
    loaded, data = request.module._packed
    model = tiny(len(data.tokenizer), depth=depth)
    batch = loaded.task.collate([data.validation[i] for i in range(2)])
    with torch.no_grad():
        # with a cache, position ids that start again are positions and no documents
        logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    read, expected = [], []
    for index in range(2):
        rows = alone(data.validation[index])
        assert len(rows) > 1
        start = 0
        for ids, labels in rows:
            places = (labels[1:] != -100).nonzero().flatten()
            with torch.no_grad():
                expected.append(model(ids[None].long()).logits[0, places])
            read.append(logits[index, start + places])
            start += len(ids)
    read, expected = torch.cat(read), torch.cat(expected)
    assert (read - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_packing_changes_no_loss_in_training(tmp_path):
    losses = []
    for packing in (True, False):
        loaded, data = load("sft", tmp_path / str(packing), task={"packing": packing})
        model = tiny(len(data.tokenizer)).train()
        batch = loaded.task.collate([data.train[i] for i in range(len(data.train))])
        losses.append((loaded.task.forward(model, **batch).loss, loaded.task.targets(batch)))
    (packed, targets), (unpacked, same) = losses
    assert targets == same
    torch.testing.assert_close(packed, unpacked, rtol=1e-5, atol=0)

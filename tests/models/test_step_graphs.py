"""Layers as CUDA graphs (`StepGraphs`) against the same model without: batches of which other numbers go on."""

from __future__ import annotations

import copy

import pytest
import torch

from fathom.train.trainer import compile_layers
from tiny import VOCABULARY, assert_close, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
COT = {"name": "adaptive_latent_cot", "steps": 3, "threshold": 0.3, "penalty": 0.1, "correctness_from": "mixture"}
ADA = {"name": "adaponderlm", "steps": 3, "threshold": 0.5}


def pair(depth):
    """The same weights twice, the second model with CUDA graphs."""
    models = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = tiny_model(depth=depth, max_position_embeddings=256, hidden_size=128)
        for name, parameter in model.depth.named_parameters():
            if name.endswith("weight"):
                torch.nn.init.normal_(parameter, std=0.3)
        model.cuda()
        if graphs:
            compile_layers(model, graphs=True)
        models.append(model)
    return models


def batches(rounds=3):
    """Three batches, again and again: recorded, then replayed."""
    torch.manual_seed(1)
    three = [torch.randint(3, VOCABULARY, shape, device="cuda") for shape in ((4, 256), (6, 200), (2, 256))]
    return three * rounds


@pytest.mark.parametrize("depth", [COT, ADA], ids=lambda depth: depth["name"])
def test_prefill_is_the_same(depth):
    plain, graphed = (model.eval() for model in pair(depth))
    steps = []
    graphed.depth.register_forward_hook(lambda module, given, out: steps.append((given[0].graphs, out.trace["passes"])))
    for tokens in batches():
        with torch.no_grad():
            wanted, found = plain(tokens, use_cache=True), graphed(tokens, use_cache=True)
        assert steps[-1][0] is not None and len(steps[-1][1].unique()) > 1
        assert_close(found.logits, wanted.logits, 1e-4)
        keys = zip(wanted.past_key_values.layers, found.past_key_values.layers, strict=True)
        for one, other in keys:
            assert_close(other.keys, one.keys, 1e-4)


def test_training_is_the_same():
    plain, graphed = (model.train() for model in pair(COT))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, graphed)]
    for tokens in batches():
        losses = []
        for model in (plain, graphed):
            losses.append(model(tokens, labels=tokens, use_cache=False).loss)
            losses[-1].backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
        for one, other in zip(plain.parameters(), graphed.parameters(), strict=True):
            assert_close(other.grad, one.grad, 1e-3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(plain.parameters(), graphed.parameters(), strict=True):
        assert_close(other, one, 1e-4)


def test_training_under_autocast_is_as_near_as_its_rounding():
    """Against fp32: not farther than twice what the model without graphs is."""
    exact, graphed = (model.train() for model in pair({**COT, "threshold": 0.0}))  # no decision to fall otherwise
    plain = copy.deepcopy(exact)
    for tokens in batches():
        for model, low in ((exact, False), (plain, True), (graphed, True)):
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=low, cache_enabled=False):
                model(tokens, labels=tokens, use_cache=False).loss.backward()
        for one, two, three in zip(exact.parameters(), plain.parameters(), graphed.parameters(), strict=True):
            assert (three.grad - one.grad).norm() <= 2 * (two.grad - one.grad).norm() + 1e-3 * one.grad.norm()

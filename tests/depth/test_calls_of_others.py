"""Calls of the layers that only other processes need (`Stack.needed`) change nothing: against a process by itself.

That processes ask equally often, and gather and reduce the same, `tests/tasks/test_wings_on_two_processes.py` shows.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from fathom.models.decoder import Stack
from fathom.models.steps.stack import StepStack
from tiny import assert_close, tiny_model, tokens

COT = {"name": "adaptive_latent_cot", "steps": 3, "threshold": 0.7, "router_bias": 0.0, "penalty": 0.3}
ADA = {"name": "adaponderlm", "steps": 3, "threshold": 0.6}
ACT = {"name": "act", "steps": 3, "threshold": 0.6, "router_bias": 0.0}
GATE = {"name": "exit_gate", "steps": 3, "threshold": 0.5, "router_bias": 0.0}
PER_STEP = {"router_per_step": True, "detach_between_steps": True, "beta": 0.0}
SLOTS = {"name": "ponderlm3", "prefill": "sequential", "threshold": 0.75}
MOE = {"feed_forward": {"name": "moe", "experts": 4, "active": 2, "width": 16, "z": 0.01}}
MIXER = {"mixer": {"name": "depth_attention"}}
STEPS = ("by row", "flat", "ranged")


def each(*cases):
    """Cases of how tokens are laid, what is trained, the depth section and others."""
    return pytest.mark.parametrize(("laid", "training", "depth", "others"), cases)


@each(
    *[(laid, True, depth, {}) for laid in STEPS for depth in (COT, {**COT, **PER_STEP}, ACT)],
    *[(laid, False, depth, {}) for laid in STEPS for depth in (COT, GATE, ADA)],
    ("by row", True, {**COT, "correctness_from": "mixture"}, {}),
    ("by row", True, COT, MOE),
    ("flat", True, COT, MOE),
    ("by row", True, COT, MIXER),
    ("by row", False, ADA, MIXER),
    ("by row", False, {"name": "ponderlm2"}, {}),
    ("by row", False, {"name": "ponderlm3"}, {}),
    ("by row", False, SLOTS, {}),
)
def test_they_change_nothing(laid, training, depth, others, monkeypatch) -> None:
    monkeypatch.setattr(StepStack, "flat_pays", lambda stack: laid != "by row")
    monkeypatch.setattr(StepStack, "ranges_served", lambda stack: laid == "ranged")
    model = tiny_model(depth=depth, **others).double().train(training)
    learn_or_read = learned if training else read
    alone, calls = learn_or_read(model)
    # another process goes on four times as far as a token can, until it has no tokens left
    more = [4] * 12
    monkeypatch.setattr(Stack, "needed", lambda stack, number: max(number, more.pop() if more else 0))
    beside, of_all = learn_or_read(model)
    assert of_all > calls
    assert alone.keys() == beside.keys()
    for name, expected in alone.items():
        assert beside[name].shape == expected.shape, name
        if expected.any():
            assert_close(beside[name].double(), expected.double(), 1e-10)
        else:
            assert not beside[name].any(), name


def learned(model):
    """Loss, gradients and what layers say, of a batch with padding; and how often layers ran."""
    x, real = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    real[0, :4] = 0
    model.zero_grad()
    with counted(model) as calls:
        out = model(x, attention_mask=real, labels=x.where(real > 0, -100), output_auxiliary=True)
    out.loss.backward()
    said = {f"said {name}": value for name, value in (out.auxiliary | out.trace | out.losses).items()}
    return {"loss": out.loss, **{name: weight.grad for name, weight in model.named_parameters()}, **said}, len(calls)


def read(model):
    """Logits of a text and of two more tokens, from the cache; and how often layers ran."""
    x, cache, said = tokens(3, 9), DynamicCache(), []
    with counted(model) as calls, torch.no_grad():
        for part in x.split([7, 1, 1], 1):
            said.append(model(part, past_key_values=cache, output_auxiliary=True))
    found = {f"logits {n}": out.logits for n, out in enumerate(said)}
    return found | {f"{name} {n}": value for n, out in enumerate(said) for name, value in out.trace.items()}, len(calls)


class counted:
    """Calls of the first layer."""

    def __init__(self, model) -> None:
        self.calls: list[int] = []
        self.hook = model.model.layers[0].register_forward_hook(lambda *_: self.calls.append(1))

    def __enter__(self) -> list[int]:
        return self.calls

    def __exit__(self, *_) -> None:
        self.hook.remove()

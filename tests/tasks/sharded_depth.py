"""Tokens that stop on their own, in fp64 under FSDP2 or DDP: torchrun starts it on two processes, whose rows stop at
different steps. Losses and gradients are those of one model without shards on all rows, held-out outputs those on the
same rows.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from fathom.train.devices import leave_together
from sharded_on_cpu import allow_fsdp_on_cpu
from tiny import assert_close, tiny_model

COT = {"name": "adaptive_latent_cot", "steps": 3, "threshold": 0.6, "router_bias": 0.0, "penalty": 0.3}
CASES = [
    (COT, {}),
    (COT, {"tie_word_embeddings": True}),
    ({**COT, "router_per_step": True, "detach_between_steps": True, "beta": 0.0}, {}),
    (COT, {"feed_forward": {"name": "moe", "experts": 4, "active": 2, "width": 16}}),
    ({"name": "act", "steps": 3, "threshold": 0.5, "router_bias": 0.0}, {}),
    ({"name": "exit_gate", "steps": 3, "threshold": 0.5, "router_bias": 0.0}, {}),
    ({"name": "adaponderlm", "steps": 3, "threshold": 0.6}, {}),
    ({"name": "ponderlm2"}, {}),
    ({"name": "ponderlm3"}, {"tie_word_embeddings": True}),
    ({"name": "ponderlm3", "prefill": "sequential", "threshold": 0.75}, {}),
]

allow_fsdp_on_cpu()
accelerator = Accelerator()
mine = slice(2 * accelerator.process_index, 2 * accelerator.process_index + 2)


def steps(out, of_each_token: bool):
    """The most that a token of any row ran, at each place or at all."""
    found = out.trace["sweeps" if "sweeps" in out.trace else "passes"].amax(0)
    return found.tolist() if of_each_token else found.max()


def differing(depth, fields, training: bool):
    """A model and four tokens' rows, of which the first two need other numbers of steps than the last two."""
    # in training these run all steps, or as many sweeps
    alike = training and depth["name"] in ("adaponderlm", "exit_gate", "ponderlm2", "ponderlm3")
    for seed in range(40):
        model = tiny_model(depth=depth, seed=seed, **fields).double().train(training)
        x = torch.randint(3, 97, (4, 9), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            outs = [model(part, output_auxiliary=True) for part in (x[:2], x[2:])]
            first, last = (steps(out, depth.get("prefill") == "sequential") for out in outs)
        if alike or first != last:
            return model, x
    raise AssertionError(f"{depth}: the rows of no seed differ")


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    if expected.any():
        assert_close(found.double(), expected.double(), 1e-10)
    else:
        assert not found.any()


for depth, fields in CASES:
    for training in (True, False):
        model, x = differing(depth, fields, training)
        whole = copy.deepcopy(model)
        leave_together(model, None)
        sharded, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        rows = x if training else x[mine]
        torch.manual_seed(0)
        expected = whole(rows, labels=rows, output_auxiliary=True)
        torch.manual_seed(0)
        out = sharded(x[mine], labels=x[mine], output_auxiliary=True)
        if training:
            expected.loss.backward()
            accelerator.backward(out.loss)
            mean = out.loss.detach() / 2
            dist.all_reduce(mean)
            assert_equal(mean, expected.loss.detach())
            for (name, weight), one in zip(sharded.named_parameters(), whole.parameters(), strict=True):
                assert (weight.grad is None) == (one.grad is None), name
                if one.grad is not None:
                    gradient = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
                    assert_equal(gradient, one.grad)
        else:
            assert_equal(out.logits, expected.logits)
            for name, value in expected.trace.items():
                assert_equal(out.trace[name], value)
print(f"{len(CASES)} equal")

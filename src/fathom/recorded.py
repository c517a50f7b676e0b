"""An optimiser step recorded once as a CUDA graph: a small model has computed it before Python has launched it again.

The step reads and writes the same tensors every time, and decides nothing on the CPU. So a batch and a learning rate
are tensors, filled before each replay, and the optimiser is made with `capturable=True`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fathom.decoding.graphs import warm_and_record


def recorded(step: Callable[[], object], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A function that replays `step` without Python. Afterwards weights and optimiser state are as before.

    `step` computes gradients from None, which it sets itself. Raises RuntimeError where it waits for the GPU.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    before = [weight.detach().clone() for weight in weights]
    states = {weight: {k: v.clone() for k, v in optimizer.state[weight].items()} for weight in [*optimizer.state]}
    replay = warm_and_record(step, warm=3)  # the optimiser makes its state, too
    with torch.no_grad():
        torch._foreach_copy_(weights, before)
        for weight, state in optimizer.state.items():
            for name, value in state.items():
                value.zero_() if weight not in states else value.copy_(states[weight][name])
    return replay

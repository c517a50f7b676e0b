"""Two ranks of torchrun: FSDP2 trains a MOVA as one process does, also compiled. Prints the largest differences."""

from __future__ import annotations

import copy

import mova_tiny as tiny
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def differences(compiled: bool) -> tuple[float, float]:
    """Relative differences of losses, and differences of weights after three steps."""
    rank = dist.get_rank()
    model = tiny.model(bridge_dropout=0.5)
    alone = copy.deepcopy(model)
    if compiled:
        model.compile_blocks(backend="eager")
    for module in list(model.modules()):
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model.activation_checkpointing_enable()
    losses = []
    for step in range(3):  # one expert, the other, the first again
        batch = tiny.batch(model.config, 4, seed=step)
        found = []
        for trained, rows in ((model, slice(2 * rank, 2 * rank + 2)), (alone, slice(None))):
            trained.train().on_step(step, 3)
            loss = trained(**{name: value[rows] for name, value in batch.items()}).loss
            loss.backward()
            torch.optim.SGD([p for p in trained.parameters() if p.grad is not None], 1e-3).step()
            trained.zero_grad(set_to_none=True)
            found.append(loss.detach().clone())
        dist.all_reduce(found[0])
        losses.append(float(abs(found[0] / 2 - found[1]) / found[1]))
    gathered = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in model.state_dict().items()}
    return max(losses), max(float((x - gathered[name]).abs().max()) for name, x in alone.state_dict().items())


dist.init_process_group("gloo")
found = [difference for compiled in (False, True) for difference in differences(compiled)]
if dist.get_rank() == 0:
    print("differences", *found)
dist.destroy_process_group()

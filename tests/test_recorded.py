"""A recorded step does what the step does."""

from __future__ import annotations

import copy

import pytest
import torch

from fathom.recorded import recorded


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_replays_are_the_steps_they_were_recorded_from():
    torch.manual_seed(0)
    first = torch.nn.Linear(8, 8).cuda()
    batches = torch.randn(5, 4, 8, device="cuda")

    def trained(model, graph):
        rate = torch.zeros((), device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
        held = batches[0].clone()

        def step():
            optimizer.zero_grad(set_to_none=True)
            model(held).square().mean().backward()
            optimizer.step()

        run = recorded(step, optimizer) if graph else step
        for number, batch in enumerate(batches):
            rate.fill_(0.01 * (number + 1))
            held.copy_(batch)
            run()
        return model.weight

    plain, replayed = (trained(copy.deepcopy(first), graph) for graph in (False, True))
    assert not torch.allclose(plain, first.weight, atol=1e-3) and torch.allclose(plain, replayed, atol=1e-6)

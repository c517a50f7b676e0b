"""The balance loss of several processes is that of their batches together."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fathom import FathomConfig
from fathom.feed_forward.base import TokenFacts
from fathom.feed_forward.moe import MixtureOfExperts

OPTIONS = {"name": "moe", "experts": 4, "active": 2, "width": 8, "balance": 1.0}


def layer_and_batch() -> tuple[MixtureOfExperts, torch.Tensor, torch.Tensor]:
    config = FathomConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, feed_forward=OPTIONS)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    options = {key: value for key, value in OPTIONS.items() if key != "name"}
    layer = MixtureOfExperts(config, MixtureOfExperts.Options(**options))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    real = torch.ones(4, 6, dtype=torch.bool)
    real[0, :4] = False  # the first process has fewer tokens that count
    return layer.train(), torch.randn(4, 6, 16), real


def one_process(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    layer, x, real = layer_and_batch()
    rows = slice(2 * rank, 2 * rank + 2)
    loss = layer(x[rows], TokenFacts(real[rows]))[1]["balance_loss"]
    loss.backward()
    gradient = layer.gate.weight.grad
    for value in (loss := loss.detach(), gradient):
        dist.all_reduce(value)
        value /= 2
    if rank == 0:
        torch.save((loss, gradient), os.path.join(folder, "found.pt"))
    dist.destroy_process_group()


@pytest.mark.slow
def test_processes_balance_together(tmp_path):
    mp.spawn(one_process, (str(tmp_path),), nprocs=2)
    found, gradient = torch.load(tmp_path / "found.pt")
    layer, x, real = layer_and_batch()
    loss = layer(x, TokenFacts(real))[1]["balance_loss"]
    loss.backward()
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(gradient, layer.gate.weight.grad)

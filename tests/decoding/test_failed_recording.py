"""What a recording needs of CUDA is kept: on a CPU with pretended graphs, which refuse what CUDA refuses, and on a GPU.

A recording that fails leaves the device as it was: random numbers go on, and the next recording works.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fathom.decoding.graphs import CudaGraphs, warm_and_record
from recording import Pretended, PretendedGraph

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
DEVICES = [pytest.param(Pretended, "cpu", id="cpu"), pytest.param(CudaGraphs, "cuda", id="cuda", marks=on_gpu)]


def has_no_memory(device: str) -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device=device)


WAITS: dict[str, Callable[[str], Any]] = {
    "item": lambda device: torch.ones(2, device=device).sum().item(),
    "branch": lambda device: bool(torch.ones(1, device=device) > 0),
    "nonzero": lambda device: torch.ones(2, device=device).nonzero(),
    "mask": lambda device: torch.arange(4, device=device)[torch.ones(4, dtype=torch.bool, device=device)],
    "to_the_host": lambda device: torch.ones(2, device=device).to("cpu"),
    "list": lambda device: torch.ones(2, device=device).tolist(),
    "from_the_host": lambda device: torch.tensor([1.0, 2.0], device=device),
}


@pytest.mark.parametrize(("recorder", "device"), DEVICES)
@pytest.mark.parametrize("fails", [*WAITS.values(), has_no_memory], ids=[*WAITS, "no_memory"])
def test_a_failed_recording_breaks_nothing_after_it(fails: Callable[[str], Any], recorder: Any, device: str) -> None:
    record = recorder().record
    x, y = torch.ones(8, device=device), torch.zeros(8, device=device)
    torch.manual_seed(0)
    first = torch.randn(4, device=device)
    expected = torch.randn(4, device=device)
    torch.manual_seed(0)
    assert torch.equal(torch.randn(4, device=device), first)

    def broken() -> None:
        x.add_(torch.rand(8, device=device))
        fails(device)

    with pytest.raises(RuntimeError):
        record(broken)
    assert torch.equal(torch.randn(4, device=device), expected)  # as if nothing had been tried
    assert torch.equal(x, torch.ones(8, device=device)) and gc.isenabled()

    replay = record(lambda: y.copy_(x * 2))
    assert not y.any()  # recorded, not run
    replay()
    assert torch.equal(y, x * 2)


@pytest.mark.parametrize(("recorder", "device"), DEVICES)
def test_a_tensor_of_a_graph_that_is_gone_does_not_hinder_the_next(recorder: Any, device: str) -> None:
    """torch refuses the pool of that graph: "use_count > 0 INTERNAL ASSERT FAILED"."""
    x, y, kept, recordings = torch.ones(4, device=device), torch.zeros(4, device=device), [], recorder()

    def step() -> None:
        kept.append(x * 2)
        y.copy_(kept[-1])

    first = recordings.record(step)
    of_both = recordings.pool
    recordings.record(step)
    assert recordings.pool == of_both  # of graphs that live at once
    del first
    gc.collect()
    recordings.record(step)()
    assert y.tolist() == [2] * 4 and len(kept) == 3


def test_a_function_runs_as_often_as_asked_before_it_is_recorded() -> None:
    x, calls = torch.zeros(2), []

    def step() -> None:
        calls.append(x.add_(1))

    with Pretended.cuda():
        replay = warm_and_record(step, warm=3)
    assert x.tolist() == [3, 3] and len(calls) == 4
    replay()
    assert x.tolist() == [4, 4] and len(calls) == 4


@pytest.mark.parametrize(("recorder", "device"), DEVICES)
def test_replays_draw_new_numbers_and_read_what_lies_there_now(recorder: Any, device: str) -> None:
    x, y, drawn = torch.ones(4, device=device), torch.zeros(4, device=device), torch.zeros(4, device=device)

    def step() -> None:
        y.copy_(x * 2)
        drawn.copy_(torch.rand(4, device=device))

    torch.manual_seed(0)
    step()
    expected = torch.rand(4, device=device)
    torch.manual_seed(0)
    step()
    replay = recorder().record(step)
    x.fill_(3)
    replay()
    assert y.tolist() == [6] * 4 and torch.equal(drawn, expected)


def test_a_graph_that_nothing_holds_is_not_freed_while_another_one_is_recorded() -> None:
    """Python's collector, which looks for such at any moment, is held off until the recording is done."""
    x = torch.zeros(4)

    def step() -> None:
        cycle: list[Any] = [Pretended().record(lambda: x.add_(1))]
        cycle.append(cycle)

    def many_objects() -> None:
        gc.set_threshold(1)  # as eager as it gets
        for _ in range(50):
            x.add_(1)
            [[] for _ in range(50)]

    collects = gc.get_threshold()
    gc.collect()
    try:
        gc.set_threshold(10_000)
        step()
        lost = len(PretendedGraph.alive)
        replay = Pretended().record(many_objects)
    finally:
        gc.set_threshold(*collects)
    assert lost and gc.isenabled()
    replay()
    assert x.tolist() == [50] * 4

    with pytest.raises(RuntimeError, match="a graph was freed while another one was captured"):
        lost_graph = [Pretended().record(lambda: x.add_(1))]
        Pretended().record(lost_graph.clear)  # by its last reference, which nothing holds off


def test_the_pretended_graph_shows_what_a_replay_would_get_wrong() -> None:
    x, total, made, dropped = torch.ones(4), torch.zeros(4), [], [torch.ones(4)]
    number = 1

    def step() -> None:
        total.add_(x * number)
        made.append(x + 1)

    replay = Pretended().record(step)
    assert not total.any() and made[0].isnan().all()
    number = 5
    replay()
    assert total.tolist() == [1] * 4 and made[0].tolist() == [2] * 4 and len(made) == 1

    replay = Pretended().record(lambda: total.add_(dropped[0]))
    dropped[0] = torch.ones(4)
    with pytest.raises(RuntimeError, match="freed since the capture"):
        replay()

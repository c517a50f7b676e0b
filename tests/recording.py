"""A pretended CUDA graph for a CPU: `CudaGraphs` records and replays with it as on a GPU.

A capture notes every operation with the places of its tensors, and takes back what the operations did. A replay runs
the same operations at the same places. So what a CUDA graph would get wrong comes out wrong here, or is refused:

    a number of Python's that changes from step to step    the replay has the old one
    a tensor that was dropped after the capture            the replay finds its memory freed
    a result of the capture read before a replay           it holds no number
    waiting for a value, sizes that depend on values       refused while capturing
    tensors made of the host's numbers                     refused while capturing
    a graph freed, or a pool used, at a wrong time         refused, as CUDA and PyTorch do: also a pool whose graphs are
                                                           all gone while a tensor of theirs is left

What it cannot show: whether a library's kernels may be captured, and what they cost.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fathom.decoding.graphs import CudaGraphs

WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
MASKABLE = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
TO_HOST = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu}
OF_HOST = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer}


def waits(function: Any, arguments: list[Any]) -> bool:
    """Whether an operation reads values on the host. Indices wait where they are masks, which numbers are picked by."""
    if function._schema.name in MASKABLE:
        return any(x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(arguments[1]) if x is not None)
    return bool(WAITING & {*function.tags})


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor lies. storage: the graph's own memory, or a weak reference to what was there before."""

    storage: Any
    dtype: torch.dtype
    layout: tuple[Any, ...]  # offset, size, strides
    conjugate: bool

    def tensor(self) -> Tensor:
        storage = self.storage
        if isinstance(storage, StorageWeakRef):
            if storage.expired():
                raise RuntimeError("a replay reads memory that has been freed since the capture")
            storage = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
        x = torch.empty(0, dtype=self.dtype).set_(storage, *self.layout)
        return x.conj() if self.conjugate else x


class OnTheHost(TorchFunctionMode):
    """Refuses what no operation shows: on a CPU these only look at memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in TO_HOST or (function is Tensor.to and "cpu" in args[1:]):
            raise RuntimeError(f"{function.__name__} waits for the device")
        if function in OF_HOST and not isinstance(args[0], Tensor):
            raise RuntimeError(f"{function.__name__} copies numbers of the host to the device")
        return function(*args, **(kwargs or {}))


class PretendedGraph:
    """Stands for torch.cuda.CUDAGraph. alive: all that have not been freed.   replayed: operations, of all graphs."""

    alive: ClassVar[weakref.WeakSet[PretendedGraph]] = weakref.WeakSet()
    replayed = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any]] = []
        self.alive.add(self)

    def replay(self) -> None:
        for function, given, made in self.calls:
            PretendedGraph.replayed += 1
            args, kwargs = tree_map(lambda x: x.tensor() if isinstance(x, Place) else x, given)
            results = tree_leaves(function(*args, **kwargs))
            for place, new in zip(made, results, strict=True):
                if isinstance(place, Place):
                    to = place.tensor()
                    assert to.shape == new.shape, f"{function} gives other shapes than in the capture"
                    if to.data_ptr() != new.data_ptr():
                        to.copy_(new)

    def __del__(self) -> None:
        capture = Capture.under_way
        if capture is not None and capture.thread == threading.get_ident():
            capture.spoiled = True


class Capture(TorchDispatchMode):
    """Stands for torch.cuda.graph(graph, pool, capture_error_mode)."""

    under_way: Capture | None = None
    generator_captured = False  # by a capture that failed, until the generator gets another state
    freed: ClassVar[set[int]] = set()  # pools of captures that failed
    pools: ClassVar[dict[int, tuple[Any, list[StorageWeakRef]]]] = {}  # graphs that live, and memory given out

    def __init__(self, graph: PretendedGraph, pool: int, capture_error_mode: str):
        super().__init__()
        assert capture_error_mode == "thread_local", "another thread may allocate meanwhile"
        assert pool not in Capture.freed, "the pool of a capture that failed"
        assert not Capture.generator_captured, "the generator believes that it is captured"
        self.graph, self.pool, self.spoiled, self.host = graph, pool, False, OnTheHost()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # memory from outside: now, and as it was
        self.own: dict[int, torch.UntypedStorage] = {}

    def __enter__(self) -> Capture:
        graphs, given = self.pools.setdefault(self.pool, (weakref.WeakSet(), []))
        if given and not graphs and not all(storage.expired() for storage in given):
            raise RuntimeError("use_count > 0: the pool's graphs are gone, and a tensor of theirs is left")
        Capture.under_way, Capture.generator_captured = self, True
        self.thread = threading.get_ident()
        self.numbers = torch.get_rng_state()
        self.host.__enter__()
        return super().__enter__()

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)
        self.host.__exit__(kind, *error)
        Capture.under_way = None
        for now, before in self.before.values():
            now.copy_(before)
        for storage in self.own.values():
            storage.fill_(255)  # nothing has run: no float of it is a number
        torch.set_rng_state(self.numbers)
        self.before, failed = {}, kind is not None or self.spoiled
        if failed:
            Capture.freed.add(self.pool)
        else:
            Capture.generator_captured = False
            graphs, given = self.pools[self.pool]
            graphs.add(self.graph)
            given += map(StorageWeakRef, self.own.values())
        if kind is None and self.spoiled:
            raise RuntimeError("a graph was freed while another one was captured")

    def place(self, x: Any, made: bool) -> Any:
        if not isinstance(x, Tensor):
            return x
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.own and key not in self.before:
            if made:
                self.own[key] = storage
            else:
                now = torch.empty(0, dtype=torch.uint8).set_(storage)
                self.before[key] = now, now.clone()
        where = self.own[key] if key in self.own else StorageWeakRef(storage)
        return Place(where, x.dtype, (x.storage_offset(), x.size(), x.stride()), x.is_conj())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if waits(function, args):
            raise RuntimeError(f"{function} waits for the device")
        given = tree_map(lambda x: self.place(x, made=False), (args, kwargs))
        out = function(*args, **kwargs)
        self.graph.calls.append((function, given, [self.place(x, made=True) for x in tree_leaves(out)]))
        return out


class Generator:
    """Stands for a GPU's generator."""

    def clone_state(self) -> Generator:
        return Generator()

    def graphsafe_set_state(self, state: Generator) -> None:
        Capture.generator_captured = False


class Pretended(CudaGraphs):
    """`CudaGraphs` on a CPU, with pretended graphs. recordings: made so far."""

    pools = 0
    patched = threading.Lock()  # torch.cuda is all threads'

    def __init__(self) -> None:
        with self.cuda():
            super().__init__()
        self.recordings, self.before = 0, PretendedGraph.replayed

    @property
    def operations(self) -> int:
        """Replayed so far."""
        return PretendedGraph.replayed - self.before

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        with self.patched, self.cuda():
            replay = super().record(function)
        self.recordings += 1
        return replay

    @classmethod
    def cuda(cls) -> Any:
        """torch.cuda with pretended graphs in it."""

        def pool() -> int:
            cls.pools += 1
            return cls.pools

        stands: dict[str, Any] = {"CUDAGraph": PretendedGraph, "graph": Capture, "graph_pool_handle": pool}
        stands |= {"default_generators": [Generator()], "current_device": lambda: 0}
        stands |= {name: mock.MagicMock() for name in ("Stream", "stream", "current_stream")}
        return mock.patch.multiple(torch.cuda, **stands)

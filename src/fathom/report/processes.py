"""Jobs in parallel, each in a process, for `compare` and growths of experts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from fathom.writing import naming


def devices_of(jobs: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES for each process: the GPUs in turn; None on a machine without GPUs."""
    if jobs < 1:
        raise ValueError(f"--jobs {jobs}: must be at least 1")
    count = torch.cuda.device_count()
    if not count:
        return [None] * jobs
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    return [visible[job % count] for job in range(jobs)]


@contextlib.contextmanager
def workers(devices: list[str | None]) -> Iterator[ProcessPoolExecutor | None]:
    """A pool with one process for each entry of `devices`; None if this process can use the only device itself."""
    if len(devices) == 1 and torch.cuda.device_count() <= 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    free = context.Queue()
    for device in devices:
        free.put(device)
    pool = ProcessPoolExecutor(len(devices), context, _start_worker, (free, len(devices)))
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def run_jobs(
    tasks: dict[str, tuple[Any, ...]], pool: ProcessPoolExecutor | None, at_once: int, folder: Path
) -> Iterator[tuple[str, Any]]:
    """(name, result or Exception) of every task (function, *arguments), as they finish. Without a pool they run here.

    Whenever a process is free, the first task is taken out of `tasks`, to which more may be added meanwhile.
    """
    if pool is None:
        while tasks:
            name = next(iter(tasks))
            function, *arguments = tasks.pop(name)
            try:
                yield name, function(*arguments)
            except Exception as error:
                yield name, _described(error)
        return
    futures: dict[Future, str] = {}
    while tasks or futures:
        while tasks and len(futures) < at_once:
            name = next(iter(tasks))
            try:
                futures[pool.submit(_logged, folder, name, *tasks.pop(name))] = name
            except BrokenExecutor as error:  # a process was killed, and took the pool with it
                yield name, _described(error)
        for future in wait(futures, return_when=FIRST_COMPLETED).done:
            failed = future.exception()
            yield futures.pop(future), future.result() if failed is None else _described(failed)


def _described(error: BaseException) -> Exception:
    return RuntimeError(f"{type(error).__name__}: {error}")


def _start_worker(free: Any, jobs: int) -> None:
    """Start a worker: it takes a device before CUDA starts, its share of the cores, and ends when the parent ends."""
    device = free.get()
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    disable_progress_bar()
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _logged(folder: Path, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The task's function with output to a file, because displays of several processes cannot share a terminal."""
    log = folder / "logs" / f"{name.replace('/', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with naming(log), log.open("a", encoding="utf-8", buffering=1) as file, contextlib.redirect_stdout(file):
        return function(*arguments)

"""The thread that runs the model: it takes requests from a bounded queue, batches those of one kind, and generates.

Batches are static: a request that comes while one runs waits for its end. Rows that are done stay in it as pads.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from fathom.caches.base import CacheMethod, layer_bytes
from fathom.caches.compress import compress
from fathom.decoding.versions import CACHE_NAME
from fathom.serve.jobs import Job, Refused

logger = logging.getLogger("fathom.serve")


class Rows(StoppingCriteria):
    """A streamer that hands every row its token, and a criterion that ends the rows that are done."""

    def __init__(self, jobs: list[Job], ends: set[int], decode: Callable[[list[int]], str]):
        self.jobs, self.ends, self.decode, self.prompt = jobs, ends, decode, True

    def put(self, tokens: Tensor) -> None:
        if self.prompt:  # generate() puts the prompt first
            self.prompt = False
            return
        for job, token in zip(self.jobs, tokens.tolist(), strict=True):
            job.add(token, self.ends, self.decode)

    def end(self) -> None:
        pass

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([job.done() for job in self.jobs], device=input_ids.device)


class Passes:
    """Passes that each row's new tokens ran, where they differ from token to token."""

    def __init__(self, model: Any):
        self.depth: Any = getattr(model, "depth", None)
        self.sums: Tensor | None = None
        self.tokens = 0
        self.adaptive = bool(getattr(self.depth, "adaptive", False))

    def __enter__(self) -> Passes:
        self.handle = self.depth.register_forward_hook(self.look) if self.adaptive else None
        return self

    def __exit__(self, *error: Any) -> None:
        if self.handle is not None:
            self.handle.remove()

    def look(self, module: Any, args: Any, output: Any) -> None:
        if "passes" in output.trace:
            last = output.trace["passes"][:, -1].float()
            self.sums = last if self.sums is None else self.sums + last
            self.tokens += 1

    def mean(self, row: int) -> float:
        if self.sums is not None:
            return float(self.sums[row]) / self.tokens
        return float(1 if self.depth is None else type(self.depth).most_steps(self.depth.options))


class Worker:
    """`submit` a job; its text comes through `job.emit`, then None.

    waiting: jobs that may wait; more are refused.   batch: rows of one batch.
    """

    def __init__(self, model: Any, tokenizer: Any, method: CacheMethod | None, batch: int = 8, waiting: int = 128):
        self.model, self.tokenizer, self.method, self.batch = model, tokenizer, method, batch
        self.queue: queue.Queue[Job | None] = queue.Queue(waiting)
        self.held: list[Job] = []  # taken from the queue, of another kind than the batch
        ends = model.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        self.ends = set() if ends is None else set(ends if isinstance(ends, list) else [ends])
        self.thread = threading.Thread(target=self.run, daemon=True, name="fathom-serve")

    def submit(self, job: Job) -> None:
        """Raises Refused (429) where the queue is full."""
        try:
            self.queue.put_nowait(job)
        except queue.Full:
            message = f"{self.queue.maxsize} requests are waiting: try again later"
            raise Refused(429, message) from None

    def stop(self) -> None:
        self.queue.put(None)
        self.thread.join(timeout=30)

    def run(self) -> None:
        with contextlib.nullcontext() if self.method is None else compress(self.model, self.method):
            while (jobs := self.take()) is not None:
                try:
                    self.generate(jobs)
                except Exception as error:
                    logger.exception("a batch of %d requests failed", len(jobs))
                    full = isinstance(error, torch.OutOfMemoryError)
                    said = "the device is out of memory: send a shorter request" if full else "the model failed"
                    for job in jobs:
                        job.error = Refused(503 if full else 500, said)
                for job in jobs:
                    job.emit(None)

    def take(self) -> list[Job] | None:
        """The job that has waited longest, and others of its kind; None: stop."""
        waiting, self.held = self.held, []
        if not waiting:
            job = self.queue.get()
            if job is None:
                return None
            waiting = [job]
        while len(waiting) < self.batch * 8:
            try:
                job = self.queue.get_nowait()
            except queue.Empty:
                break
            if job is None:
                self.queue.put(None)
                break
            waiting.append(job)
        waiting = [job for job in waiting if not job.gone]
        jobs = [job for job in waiting if job.kind == waiting[0].kind][: self.batch]
        chosen = set(map(id, jobs))
        self.held = [job for job in waiting if id(job) not in chosen]
        return jobs

    @torch.inference_mode()
    def generate(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        length = max(len(job.ids) for job in jobs)
        pad = self.tokenizer.pad_token_id
        pad = pad if pad is not None else next(iter(self.ends), 0)
        ids = torch.full((len(jobs), length), pad, device=self.model.device)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):
            ids[row, length - len(job.ids) :] = torch.tensor(job.ids, device=ids.device)
            mask[row, length - len(job.ids) :] = 1
        first = jobs[0]
        options: dict[str, Any] = {"do_sample": first.temperature > 0}
        if first.temperature > 0:
            options |= {"temperature": first.temperature, "top_p": first.top_p, "top_k": 0}
        if first.seed is not None:
            torch.manual_seed(first.seed)
        rows = Rows(jobs, self.ends, lambda tokens: self.tokenizer.decode(tokens, skip_special_tokens=True))
        start = time.monotonic()
        with Passes(self.model) as passes:
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=max(job.most for job in jobs), pad_token_id=pad,
                streamer=rows, stopping_criteria=StoppingCriteriaList([rows]), return_dict_in_generate=True, **options,
            )  # fmt: skip
        logger.info("%d rows in %.2f s", len(jobs), time.monotonic() - start)
        held = sum(layer_bytes(layer) for layer in out[CACHE_NAME].layers) // len(jobs)
        for row, job in enumerate(jobs):
            job.usage = {
                "prompt_tokens": len(job.ids), "completion_tokens": len(job.tokens),
                "total_tokens": len(job.ids) + len(job.tokens), "mean_passes": passes.mean(row), "cache_bytes": held,
            }  # fmt: skip

"""Measurements of a run while it trains: `metrics.jsonl`, one line for each log.

Training lines have step, tokens, train_flops, seconds, loss, learning_rate, grad_norm, tokens_per_second, and on a GPU
peak_memory_bytes. Where tokens stop on their own they also have mean_steps, the mean number of steps that a token ran
since the last line; train_flops counts these steps (on rank 0's tokens).

Auxiliary losses and statistics of a method appear under their names, as means over the micro-batches since the last
line. If there are auxiliary losses, penalty is their sum. `loss` excludes them, so that it compares with other methods'
and with the held-out loss. Statistics `by_layer` of a feed-forward network become lists with a number for each layer,
under the names that its `describe` gives.

Validation lines have step, tokens, train_flops and validation_loss. Losses are means over targets, null where not
finite. `seconds` is training time alone, over all restarts; tokens_per_second is since the last line. Where one process
trains alone on a CPU, a training line also has busy: the share of the time that it was on a core. It is near 1 unless
other processes had the cores, or the process waited for data. A run that resumes from a checkpoint adds a line with
step, tokens, train_flops and resumed.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from fathom.depth.base import DepthMethod
from fathom.feed_forward.base import FeedForward
from fathom.models.hf_versions import FathomOutput
from fathom.writing import naming, write_text

FILE = "metrics.jsonl"
DEAD_FOR = 10  # lines after which experts that no token ran are a warning
# What a line has of its own; nothing that a method says may take such a name. `penalty` may be one loss or their sum.
RESERVED = (
    "step", "tokens", "train_flops", "seconds", "loss", "learning_rate", "grad_norm", "tokens_per_second",
    "peak_memory_bytes", "mean_steps", "validation_loss", "busy", "resumed",
)  # fmt: skip


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines written so far; the last one is left out if a killed process wrote half of it."""
    lines = []
    if (folder / FILE).exists():
        for line in (folder / FILE).read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return lines


class Metrics(TrainerCallback):
    """A callback that writes `metrics.jsonl`. Every checkpoint and evaluation also logs a loss: a resumed
    run has all.
    """

    def __init__(
        self,
        folder: Path,
        tokens_per_step: int,
        flops_per_token: Callable[[Sequence[float] | None], float],
        depth: DepthMethod | None,
        feed_forward: type[FeedForward] = FeedForward,
    ) -> None:
        """flops_per_token: training FLOPs as a function of the shares of tokens that run each step (None: all do)."""
        self.folder, self.tokens_per_step, self.flops_per_token = folder, tokens_per_step, flops_per_token
        self.adaptive = depth is not None and bool(depth.segments)  # training skips steps of tokens that have stopped
        self.ran: list[torch.Tensor] = []  # shares of tokens that ran each step, of every forward
        self.depth, self.feed_forward = depth, feed_forward
        self.dead = 0  # lines in a row that have dead experts
        self.of_layers: dict[str, list[torch.Tensor]] = {}  # likewise, kept apart by layer
        self.said: dict[str, list[torch.Tensor]] = {}  # by name, of every forward since the last training line
        self.losses: set[str] = set()  # which of these names are losses
        self.train_flops, self._counted = 0.0, 0  # up to which step
        self.seconds = self._on_core = 0.0  # on a core: since the last training line
        self._mark = (0.0, 0.0)
        self._last = (0, 0.0)  # step and seconds of the last training line

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        lines = [line for line in read_metrics(self.folder) if line["step"] <= state.global_step]
        if state.is_world_process_zero:
            write_text(self.folder / FILE, "".join(json.dumps(line) + "\n" for line in lines))
        self.seconds = max((line.get("seconds", 0.0) for line in lines), default=0.0)
        self.train_flops, self._counted = max((line["train_flops"] for line in lines), default=0.0), state.global_step
        self._last = (state.global_step, self.seconds)
        if state.global_step:
            self._write(state, resumed=True)
        self._mark = _clocks()
        _reset_peak_memory()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._lap()
        if control.should_save or control.should_evaluate:
            control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self._lap()  # the loss has been read, so the device has finished
            step, seconds = self._last
            passed = max(self.seconds - seconds, 1e-9)
            speed = (state.global_step - step) * self.tokens_per_step / passed
            self._last = (state.global_step, self.seconds)
            some: dict[str, float | None] = {
                **self._means((state.global_step - step) * args.gradient_accumulation_steps)
            }
            losses = [value for name, value in some.items() if name in self.losses and value is not None]
            if losses:
                some["penalty"] = sum(losses)
                logs.update(some, loss=logs["loss"] - sum(losses))  # for the callbacks after this one
            if torch.cuda.is_available():  # a CPU's is the whole process's: libraries, data, what was trained before
                some["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
            if args.device.type == "cpu" and args.world_size == 1:  # several wait for each other
                some["busy"] = round(self._on_core / passed, 3)
            self._on_core = 0.0
            self._write(
                state,
                seconds=round(self.seconds, 3),
                loss=logs["loss"],
                learning_rate=logs["learning_rate"],
                grad_norm=logs.get("grad_norm"),
                tokens_per_second=round(speed, 1),
                **some,
                **self._by_layer(),
            )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self._write(state, validation_loss=metrics["eval_loss"])
        _reset_peak_memory()  # training's own: held-out loss needs all logits at once
        self._mark = _clocks()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._mark = _clocks()

    def _lap(self) -> None:
        (before, core), self._mark = self._mark, _clocks()
        self.seconds += self._mark[0] - before
        self._on_core += self._mark[1] - core

    def add(self, output: FathomOutput) -> None:
        """Keep the auxiliary losses and statistics of one training forward, without waiting for the device."""
        if self.depth is None and getattr(output, "auxiliary", None) is None:
            return
        assert output.losses is not None and output.auxiliary is not None and output.trace is not None  # asked for
        for name, value in {**output.auxiliary, **output.losses}.items():
            if name in RESERVED or (name == "penalty" and name not in output.losses):
                raise ValueError(f"a method says {name!r}, which is a quantity of {FILE}: give it another name")
            if name in self.feed_forward.by_layer:
                self.of_layers.setdefault(name, []).append(value.detach().float())
            else:
                self.said.setdefault(name, []).append(value.detach().float().mean())
        self.losses |= output.losses.keys()
        if self.depth is not None and self.adaptive:
            passes = output.trace["passes"]
            shares = [(passes > step).double().mean() for step in range(self.depth.most_steps(self.depth.options))]
            self.ran.append(torch.stack(shares))

    def _means(self, forwards: int) -> dict[str, float]:
        """Means over all ranks and over the forwards since the last line that gave each value, as for the loss."""
        if not self.said:
            return {}
        names = sorted(self.said)
        # a loss counts in the mean of the training loss where it was not added, too
        counts = [forwards if name in self.losses else len(self.said[name]) for name in names]
        means = torch.stack([torch.stack(self.said[name]).sum() / n for name, n in zip(names, counts, strict=True)])
        self.said.clear()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(means)
            means /= torch.distributed.get_world_size()
        return dict(zip(names, means.tolist(), strict=True))

    def _by_layer(self) -> dict[str, Any]:
        """The feed-forward network's quantities by layer, from its means since the last training line."""
        kept, self.of_layers = self.of_layers, {}
        means = {name: torch.stack(values).mean(0) for name, values in kept.items()}
        if means and torch.distributed.is_available() and torch.distributed.is_initialized():
            for name in sorted(means):
                torch.distributed.all_reduce(means[name])
                means[name] /= torch.distributed.get_world_size()
        found = self.feed_forward.describe(means) if means else {}
        dead = sum(found.get("dead_experts", ()))
        self.dead = self.dead + 1 if dead else 0
        if self.dead == DEAD_FOR:
            warnings.warn(
                f"{dead} experts ran no token since the last {DEAD_FOR} lines of {FILE}: raise the mixture's `balance`,"
                " lower training.lr, or grow with fewer experts or a larger reinit_ratio",
                stacklevel=2,
            )
        return found

    def _add_flops(self, state: Any) -> float | None:
        """Add the FLOPs of the steps since the last call. Returns the mean number of steps that a token ran in them."""
        tokens = (state.global_step - self._counted) * self.tokens_per_step
        self._counted = state.global_step
        if not self.adaptive:
            self.train_flops = state.global_step * self.tokens_per_step * self.flops_per_token(None)
        elif self.ran:
            shares = torch.stack(self.ran).mean(0).tolist()
            self.ran.clear()
            self.train_flops += tokens * self.flops_per_token(shares)
            return sum(shares)
        return None

    def _write(self, state: Any, **values: Any) -> None:
        mean_steps = self._add_flops(state)
        if not state.is_world_process_zero:
            return
        tokens = state.global_step * self.tokens_per_step
        line = {"step": state.global_step, "tokens": tokens, "train_flops": self.train_flops, **values}
        if mean_steps is not None:
            line["mean_steps"] = mean_steps
        line = {name: _finite(value) for name, value in line.items()}
        with naming(self.folder / FILE), (self.folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """The number, or nested list of numbers, with None for each that is not finite."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if value is None or math.isfinite(value) else None


def _clocks() -> tuple[float, float]:
    """Two clocks in seconds: wall time, and the time that this thread was on a core."""
    return time.perf_counter(), time.thread_time()


def _reset_peak_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()

"""Live progress of a run: a bar in a terminal, plain lines elsewhere. Loss, tokens/s, FLOPs spent, time left."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from transformers import TrainerCallback

from fathom.train.metrics import Metrics

_SECONDS_BETWEEN_LINES = 5.0


class ProgressDisplay(TrainerCallback):
    """Shows one run on rank 0's standard output; `label` says which."""

    def __init__(self, label: str, metrics: Metrics) -> None:
        self.label, self.metrics = label, metrics
        self.loss = self.validation_loss = float("nan")
        self.bar: Progress | None = None
        self._printed = self._start_step = 0.0
        self._start_seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start_step, self._start_seconds = state.global_step, self.metrics.seconds
        if state.is_world_process_zero and sys.stdout.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
            )
            self.bar = Progress(*columns)
            self.task = self.bar.add_task(self.label, total=state.max_steps, completed=state.global_step, text="")
            self.bar.start()
        elif state.is_world_process_zero and state.global_step:
            print(f"{self.label}  resumes after step {state.global_step}/{state.max_steps}", flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.loss = logs["loss"]
            if not control.should_evaluate:  # on_evaluate shows this step
                self._show(state)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.validation_loss = metrics["eval_loss"]
        self._show(state, now=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _show(self, state: Any, now: bool = False) -> None:
        if not state.is_world_process_zero:
            return
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step, text=self._text(state))
        elif now or time.monotonic() - self._printed > _SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            print(f"{self.label}  step {state.global_step}/{state.max_steps}  {self._text(state)}", flush=True)

    def _text(self, state: Any) -> str:
        steps = state.global_step - self._start_step
        seconds_a_step = (self.metrics.seconds - self._start_seconds) / max(steps, 1)
        parts = [
            f"loss {self.loss:.4f}",
            f"{self.metrics.tokens_per_step / max(seconds_a_step, 1e-9):,.0f} tokens/s",
            f"{self.metrics.train_flops:.2e} FLOPs",
            f"{_clock((state.max_steps - state.global_step) * seconds_a_step)} left",
        ]
        if self.validation_loss == self.validation_loss:
            parts.insert(1, f"validation {self.validation_loss:.4f}")
        return "  ".join(parts)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86400 else f"{seconds / 86400:.1f} days"

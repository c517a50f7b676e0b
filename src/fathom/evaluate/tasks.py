"""Downstream tasks through lm_eval (Language Model Evaluation Harness): its own tasks, or YAML files of yours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from fathom.models.registry import nearest


def evaluate_tasks(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    tasks: list[str],
    task_dir: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> dict[str, dict[str, float]]:
    """Metrics by task, as lm_eval names them ("acc", "acc_stderr", "perplexity", …).

    Args:
        tasks: names of lm_eval tasks, groups or tags.
        task_dir: folder of further task YAML files; they go before lm_eval's own.
        limit: score only so many documents of each task.

    Raises:
        ImportError: lm_eval is not installed.
        FileNotFoundError: no such `task_dir`.
        ValueError: an unknown task (the nearest is named), or limit or batch_size below 1.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise ImportError(f"tasks need lm_eval ({error}): pip install 'fathom-lm[eval]'") from error
    for argument, value in (("limit", limit), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{argument}={value}: must be at least 1")
    if task_dir is not None and not Path(task_dir).is_dir():
        raise FileNotFoundError(f"task_dir={str(task_dir)!r}: no such folder")
    manager = None if task_dir is None else TaskManager(include_path=str(task_dir), include_defaults=False)
    if manager is None or not set(tasks) <= set(manager.all_tasks):  # lm_eval's own too: reading those takes a while
        manager = TaskManager(include_path=None if task_dir is None else str(task_dir))
    for task in tasks:
        if task not in manager.all_tasks:
            raise ValueError(f"task {task!r} does not exist{nearest(task, manager.all_tasks)}; task_dir adds your own")
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal")
    found = simple_evaluate(lm, tasks=tasks, task_manager=manager, limit=limit, log_samples=False, bootstrap_iters=0)
    assert found is not None  # None only on ranks other than 0
    return {task: _metrics(row) for task, row in found["results"].items()}


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    """lm_eval's "metric,filter" without the filter where that is "none"; entries that are not numbers left out."""
    return {name.removesuffix(",none"): value for name, value in row.items() if isinstance(value, int | float)}

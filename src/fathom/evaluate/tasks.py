"""Downstream tasks through lm_eval (Language Model Evaluation Harness): its own tasks, or YAML files of yours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from fathom.diffusion.base import is_diffusion
from fathom.models.registry import nearest

BOOTSTRAPS = 1000  # resamples for the standard error of metrics that have no closed form (perplexity)


def evaluate_tasks(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    tasks: list[str],
    task_dir: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    manager: Any = None,
) -> dict[str, dict[str, float]]:
    """Metrics by task, as lm_eval names them ("acc", "acc_stderr", "perplexity", …), with their standard errors. For a
    diffusion model they are computed from bounds on likelihoods (diffusion_tasks.py).

    Args:
        tasks: names of lm_eval tasks, groups or tags.
        task_dir: folder of further task YAML files; they go before lm_eval's own.
        limit: the most documents of each task to score.
        num_fewshot: examples before each question; None: as each task says.
        apply_chat_template: write every question as a user's message in the tokenizer's chat template.
        manager: the result of `find_tasks` for these tasks, if there is one.

    Raises:
        ImportError: lm_eval is not installed.
        FileNotFoundError: no such `task_dir`.
        ValueError: an unknown task (the nearest is named), limit or batch_size below 1, num_fewshot below 0, no chat
            template, or an answer that is longer than the model's context.
    """
    for argument, value, least in (("limit", limit, 1), ("batch_size", batch_size, 1), ("num_fewshot", num_fewshot, 0)):
        if value is not None and value < least:
            raise ValueError(f"{argument}={value}: must be at least {least}")
    if apply_chat_template and not getattr(tokenizer, "chat_template", None):
        raise ValueError("apply_chat_template: the tokenizer has no chat template; leave it out")
    manager = find_tasks(tasks, task_dir) if manager is None else manager
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    class LanguageModel(HFLM):
        def _loglikelihood_tokens(self, requests: Any, *args: Any, **options: Any) -> Any:
            answers_fit(requests, self.max_length)  # lm_eval asserts it
            return super()._loglikelihood_tokens(requests, *args, **options)

    kind: Any = LanguageModel
    if is_diffusion(model):
        from fathom.evaluate.diffusion_tasks import DiffusionLM

        kind = DiffusionLM
    lm = kind(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal")
    found = simple_evaluate(
        lm,
        tasks=tasks,
        task_manager=manager,
        limit=limit,
        num_fewshot=num_fewshot,
        apply_chat_template=apply_chat_template,
        log_samples=False,
        bootstrap_iters=BOOTSTRAPS,
    )
    assert found is not None  # None only on ranks other than 0
    return {task: _metrics(row) for task, row in found["results"].items()}


def answers_fit(requests: Any, positions: int) -> None:
    """Raises ValueError where an answer, of (_, question ids, answer ids), is longer than the model's context."""
    longest = max((len(answer) for _, _, answer in requests), default=0)
    if longest > positions:
        raise ValueError(
            f"an answer has {longest} tokens and the model's context {positions}: a question can be cut, it can not; "
            "leave its task out, or take a model with a longer context"
        )


def find_tasks(tasks: list[str], task_dir: str | Path | None = None) -> Any:
    """lm_eval's TaskManager that knows the tasks, without any model. Raises what `evaluate_tasks` does."""
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise ImportError(f"tasks need lm_eval ({error}): pip install 'fathom-lm[eval]'") from error
    if task_dir is not None and not Path(task_dir).is_dir():
        raise FileNotFoundError(f"task_dir={str(task_dir)!r}: no such folder")
    manager = None if task_dir is None else TaskManager(include_path=str(task_dir), include_defaults=False)
    if manager is None or not set(tasks) <= set(manager.all_tasks):  # lm_eval's own too: reading those takes a while
        manager = TaskManager(include_path=None if task_dir is None else str(task_dir))
    for task in tasks:
        if task not in manager.all_tasks:
            raise ValueError(f"task {task!r} does not exist{nearest(task, manager.all_tasks)}; task_dir adds your own")
    return manager


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    """lm_eval's "metric,filter", without the filter where that is "none". What has no filter ("sample_len") counts
    documents and is no metric; a standard error that is not known is no number."""
    numbers = {name: value for name, value in row.items() if "," in name and isinstance(value, int | float)}
    return {name.removesuffix(",none"): value for name, value in numbers.items()}

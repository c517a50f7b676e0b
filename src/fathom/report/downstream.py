"""A comparison's downstream accuracies: each model on each task, and the mean over tasks that differ from guessing."""

from __future__ import annotations

from typing import Any

from fathom.evaluate.downstream import Accuracy, mean, signal, without_signal
from fathom.report.results import Row, Table


def has_downstream(table: Table) -> bool:
    """Whether any run of the table was scored on downstream tasks."""
    return any(run.downstream for row in table.rows for run in row.runs)


def summary(table: Table) -> dict[str, Any]:
    """A budget's downstream accuracies, as in results.json and on the page.

    `no_signal`: tasks on which every model is within two standard errors of guessing; `in_mean`: the others.
    `chance`: accuracy of guessing, by task. `methods`: by name, `tasks` with accuracy, standard error and whether it
    differs from guessing, and `mean` over `in_mean` with `mean_error`, None where that is empty.
    """
    contestants = {row.method: _runs(row) for row in table.rows}
    contestants = {method: runs for method, runs in contestants.items() if runs}
    no_signal = without_signal(contestants)
    common = [set.intersection(*({*run} for run in runs)) for runs in contestants.values()]
    chance = {task: score.chance for runs in contestants.values() for task, score in runs[0].items()}
    shared = [task for task in chance if task not in no_signal and all(task in tasks for tasks in common)]
    methods = {}
    for method, runs in contestants.items():
        scores = {task: [run[task] for run in runs if task in run] for task in chance}
        value, error = mean(runs, shared) if shared else (None, None)
        methods[method] = {
            "tasks": {
                task: {
                    "accuracy": sum(score.value for score in found) / len(found),
                    "error": sum(score.error for score in found) / len(found),
                    "signal": signal(found),
                }
                for task, found in scores.items()
                if found
            },
            "mean": value,
            "mean_error": error,
        }
    return {"no_signal": no_signal, "chance": chance, "in_mean": shared, "methods": methods}


def _runs(row: Row) -> list[dict[str, Accuracy]]:
    return [{task: Accuracy(**score) for task, score in run.downstream.items()} for run in row.runs if run.downstream]

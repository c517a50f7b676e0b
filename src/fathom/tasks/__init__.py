"""Tasks, on which models are trained and judged: one file each. `base.py` says what a task provides."""

from fathom.tasks.base import DEFAULT, Score, Task, lookup, tasks

__all__ = ["DEFAULT", "Score", "Task", "lookup", "tasks"]

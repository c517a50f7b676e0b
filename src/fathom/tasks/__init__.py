"""What a model is trained and judged on: one file a task. `base.py` says what a task provides."""

from fathom.tasks.base import DEFAULT, Score, Task, lookup, tasks

__all__ = ["DEFAULT", "Score", "Task", "lookup", "tasks"]

"""Scores of a model's tool calls, on questions with known calls and answers."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathom.data.sources import Source
from fathom.tools import Tool, Trace, answer_with_tools


@dataclass(frozen=True)
class ToolQuestion:
    """A question, the calls that lead to its answer, {"name", "arguments"} each, and the answer."""

    question: str
    answer: str
    calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Share:
    """A share of n, and its standard error √(p (1 − p) / (n − 1)), as lm_eval's; None for one."""

    share: float
    error: float | None
    n: int

    @classmethod
    def of(cls, right: Sequence[float]) -> Share:
        n = len(right)
        mean = math.fsum(right) / n
        spread = math.fsum((value - mean) ** 2 for value in right)
        return cls(mean, math.sqrt(spread / (n - 1) / n) if n > 1 else None, n)


def read_questions(path: str | Path) -> list[ToolQuestion]:
    """The rows {"question", "answer", "calls"} of a JSONL or Parquet file. Raises OSError, or ValueError that names the
    row."""
    found = []
    for row, where in Source(str(path), argument="--questions").rows():
        for field in ("question", "answer"):
            if not isinstance(row.get(field), str) or not row[field].strip():
                raise ValueError(f"{where}: no text in field {field!r} (found: {', '.join(row) or 'none'})")
        calls = row.get("calls") or []
        if not all(isinstance(one, dict) and {"name", "arguments"} <= set(one) for one in calls):
            raise ValueError(f'{where}: field \'calls\' must be a list of {{"name", "arguments"}}')
        found.append(ToolQuestion(row["question"], row["answer"], tuple(calls)))
    if not found:
        raise ValueError(f"{path}: holds no question")
    return found


def evaluate_tool_calls(
    model: Any,
    tokenizer: Any,
    questions: Sequence[ToolQuestion],
    tools: Iterable[Callable[..., Any] | Tool],
    rounds: int = 5,
    max_new_tokens: int = 128,
) -> dict[str, Any]:
    """Shares of questions with their standard errors, and the first traces for a reader. Decoding is greedy.

    "calls": exactly the right calls, in order.   "answer": the answer is right with the tools.
    "answer_without_tools": it is right without any.   "failed_calls": a call failed.

    An answer is right if its text is the expected one, apart from case, spaces at its ends and a full stop; or if both
    are numbers that are equal, or that differ by at most a millionth if one of them is not whole.

    Raises ValueError for no questions, and as `answer_with_tools` does.
    """
    if not questions:
        raise ValueError("questions is empty: give at least one")
    tools = list(tools)
    traces = [answer_with_tools(model, tokenizer, one.question, tools, rounds, max_new_tokens) for one in questions]
    alone = [answer_with_tools(model, tokenizer, one.question, [], 0, max_new_tokens) for one in questions]
    shares = {
        "calls": [_called(one, trace) for one, trace in zip(questions, traces, strict=True)],
        "answer": [is_right(one.answer, trace.answer) for one, trace in zip(questions, traces, strict=True)],
        "answer_without_tools": [
            is_right(one.answer, trace.answer) for one, trace in zip(questions, alone, strict=True)
        ],
        "failed_calls": [any(step.failed for step in trace.steps) for trace in traces],
    }
    found: dict[str, Any] = {name: dataclasses.asdict(Share.of(right)) for name, right in shares.items()}
    return {**found, "rounds": rounds, "template": traces[0].template, "traces": [str(trace) for trace in traces[:3]]}


def is_right(expected: str, answer: str | None) -> bool:
    """Whether an answer is the right one."""
    if answer is None:
        return False
    one, other = (text.strip().rstrip(".").strip().casefold() for text in (expected, answer))
    if one == other:
        return True
    try:
        if re.fullmatch(r"[+-]?\d+", one) and re.fullmatch(r"[+-]?\d+", other):
            return int(one) == int(other)  # whole numbers are counted, not measured
        return math.isclose(float(one), float(other), rel_tol=1e-6)
    except ValueError:
        return False


def _called(question: ToolQuestion, trace: Trace) -> bool:
    made = [{"name": step.action, "arguments": step.arguments} for step in trace.steps]
    return made == [{"name": one["name"], "arguments": one["arguments"]} for one in question.calls]

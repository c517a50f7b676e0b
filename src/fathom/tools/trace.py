"""ReAct: Question, Thought, Action, Action Input, Observation, …, Final Answer (arXiv 2210.03629).

A trace is a text of such fields, each at the start of a line. What a model learns of it are its own fields; what the
tools returned it only reads. Before the last Question may stand an instruction that describes tools and format.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_FIELD = re.compile(r"^(Question|Thought|Action Input|Action|Observation|Final Answer):[ \t]*", re.M)
_DEEPEST = 64  # lists and objects in one another, in arguments
_HALVES = re.compile("[\ud800-\udfff]")  # of pairs: JSON can write them, and no tokenizer reads them
_CALLED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.S)


@dataclass(frozen=True)
class Call:
    """A tool's name and its arguments: what JSON gave, or text that is no JSON, with why."""

    name: str
    arguments: Any
    error: str = ""


@dataclass(frozen=True)
class Reply:
    """What a model wrote: calls of tools after a thought, or an answer."""

    thought: str
    calls: tuple[Call, ...]
    answer: str | None


def spans(trace: str, where: str) -> list[tuple[str, bool]]:
    """The trace cut into what is read (False) and what is learned (True), in turn; joined they are the trace.

    Observations, and all up to the question's end, are read. Raises ValueError that names the row for a trace without a
    question or a final answer, and for an observation that nothing of the model follows.
    """
    fields = list(_FIELD.finditer(trace))
    first = max((i for i, field in enumerate(fields) if field[1] == "Question"), default=None)
    if first is None:
        raise ValueError(f"{where}: the trace has no line 'Question:'")
    fields = fields[first + 1 :]
    if fields and fields[-1][1] == "Observation":
        raise ValueError(f"{where}: an unclosed Observation: the trace ends in it; nothing says where it ends")
    if not fields or fields[-1][1] != "Final Answer":
        raise ValueError(f"{where}: the trace does not end in a line 'Final Answer:'")
    found = [(trace[: fields[0].start()], False)]
    for field, following in zip(fields, [*fields[1:], None], strict=True):
        text = trace[field.start() : following.start() if following else len(trace)]
        learned = field[1] != "Observation"
        if found[-1][1] == learned:
            found[-1] = (found[-1][0] + text, learned)
        else:
            found.append((text, learned))
    return found


def read_reply(text: str) -> Reply:
    """What a model wrote until it stopped: fields of ReAct, calls between <tool_call> tags, or a plain answer."""
    tagged = list(_CALLED.finditer(text))
    if tagged:
        calls = [call for found in tagged for call in _tagged(found[1])]
        return Reply(text[: tagged[0].start()].strip(), tuple(calls), None)
    fields = list(_FIELD.finditer(text))
    ends = [*(field.start() for field in fields[1:]), len(text)]
    said = [(field[1], text[field.end() : end].strip()) for field, end in zip(fields, ends)]
    thought = "\n".join(value for name, value in said if name == "Thought")
    for index, (name, value) in enumerate(said):
        if name == "Final Answer":
            return Reply(thought, (), value)
        if name == "Action":
            given = said[index + 1][1] if index + 1 < len(said) and said[index + 1][0] == "Action Input" else ""
            return Reply(thought, (_call(value, given),), None)
    return Reply(thought, (), text.strip() if not said else None)


def called_in(text: str) -> bool:
    """Whether a model that writes ReAct has finished a call: a whole line of JSON after "Action Input:", or any text
    with a line that begins an Observation."""
    if re.search(r"^Observation:", text, re.M):
        return True
    given = re.search(r"^Action Input:[ \t]*(.*)\n", text, re.M | re.S)
    return given is not None and (not given[1].startswith("{") or not _call("", given[1]).error)


def _call(name: str, arguments: str) -> Call:
    try:
        return checked(name, json.loads(arguments, parse_constant=_refused))
    except (ValueError, RecursionError) as error:
        return Call(name, arguments, f"the arguments are not JSON ({error})")


def checked(name: str, arguments: Any) -> Call:
    """A call; its name and arguments may be what JSON can write and no template or tokenizer reads."""
    level = [arguments]
    for _ in range(_DEEPEST):
        level = [x for one in level for x in (one.values() if isinstance(one, dict) else one if _is_list(one) else ())]
    if level:
        return Call("", "", f"the arguments have more than {_DEEPEST} lists and objects in one another")
    if _HALVES.search(name + json.dumps(arguments, ensure_ascii=False, default=str)):
        return Call("", "", "the call holds half of a pair of UTF-16, which is no text")
    return Call(name, arguments)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _tagged(text: str) -> list[Call]:
    """Calls as {"name", "arguments"}, or a list of such."""
    read = _call("", text)
    if read.error:
        return [read]
    calls = []
    for one in read.arguments if isinstance(read.arguments, list) else [read.arguments]:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            calls.append(Call("", one, 'a call must be a JSON object {"name", "arguments"}'))
        else:
            given = one.get("arguments", one.get("parameters", {}))
            calls.append(_call(one["name"], given) if isinstance(given, str) else checked(one["name"], given))
    return calls


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")

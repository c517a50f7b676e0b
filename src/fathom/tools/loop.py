"""A question answered with tools: the model writes, the tools that it calls run, and it reads what they returned.

At most `rounds` calls are run. A tool that does not exist, arguments that do not fit, a tool that raises or takes too
long, and a call that was made before are one line, "error: …", which the model reads as any result.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jinja2
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from fathom.data.templates import TEMPLATES, takes_tools
from fathom.diffusion.base import is_diffusion
from fathom.models.method import check_range
from fathom.tools.tool import SECONDS, Tool, ToolError, as_tools, call
from fathom.tools.trace import Call, Reply, called_in, checked, read_reply


@dataclass(frozen=True)
class Step:
    """One call: the thought before it, the tool's name and arguments as the model gave them, and the line it read."""

    thought: str
    action: str
    arguments: Any
    observation: str
    failed: bool

    def __str__(self) -> str:
        given = self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)
        thought = f"Thought: {self.thought}\n" if self.thought else ""
        return f"{thought}Action: {self.action}\nAction Input: {given}\nObservation: {self.observation}"


@dataclass(frozen=True)
class Trace:
    """The calls and the answer of a question.

    Attributes:
        answer: the final answer; None where there is none.
        ended: why it ended: with an "answer", after as many calls as `rounds` allows ("rounds"), with no "room" left in
            the model's positions, or with text that is neither call nor answer ("nothing").
        thought: before the answer.
        template: what wrote the prompt, "the tokenizer's own" or "react, built in".
    """

    question: str
    steps: tuple[Step, ...]
    answer: str | None
    ended: Literal["answer", "rounds", "room", "nothing"]
    thought: str
    template: str

    def __str__(self) -> str:
        lines = [f"Question: {self.question}", *map(str, self.steps)]
        return "\n".join([*lines, self.last_lines()])

    def last_lines(self) -> str:
        thought = f"Thought: {self.thought}\n" if self.thought else ""
        if self.answer is not None:
            return f"{thought}Final Answer: {self.answer}"
        why = {
            "rounds": f"{len(self.steps)} calls were made, and no more are allowed",
            "room": "the model's positions are used up",
            "nothing": "the model wrote neither a call nor an answer",
        }[self.ended]
        return f"{thought}error: no final answer: {why}"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def answer_with_tools(
    model: Any,
    tokenizer: Any,
    question: str,
    tools: Iterable[Callable[..., Any] | Tool],
    rounds: int = 5,
    max_new_tokens: int = 256,
    seconds: float = SECONDS,
    on_step: Callable[[Step], None] | None = None,
    **generation: Any,
) -> Trace:
    """A question answered by a causal language model that may call `tools`, and nothing else.

    The tokenizer's own chat template writes the prompt where it has a place for tools, and the built-in one of ReAct
    where not.

    Args:
        tools: functions with types and a docstring that describes their arguments.
        rounds: calls that are run at most; 0: none.
        max_new_tokens: of each reply.
        seconds: that one call may take.
        on_step: called after every call.
        generation: options of `model.generate`; greedy decoding without any.

    Raises:
        ValueError: a tool without a schema; a question that is empty, holds a special token or does not fit the model's
            positions; a diffusion model.
    """
    check_range("answer_with_tools", "rounds", rounds, 0)
    check_range("answer_with_tools", "max_new_tokens", max_new_tokens, 1)
    if is_diffusion(model):
        raise ValueError(f"{type(model).__name__}: tools need a model that writes from left to right")
    if not question.strip():
        raise ValueError("question is empty")
    inside = _special(question, tokenizer)
    if inside:
        raise ValueError(f"question holds the special token {inside!r}, which would be read as one; remove it")
    known = as_tools(tools)
    writer = _Writer(model, tokenizer, [tool.schema for tool in known.values()], max_new_tokens, generation)
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    steps: list[Step] = []
    made: set[str] = set()

    def end(ended: Any, reply: Reply | None = None) -> Trace:
        answer, thought = (reply.answer, reply.thought) if reply else (None, "")
        return Trace(question, tuple(steps), answer, ended, thought, writer.template_name)

    while True:
        prompt = writer.prompt(messages)
        if len(prompt) >= writer.positions:
            if not steps:
                raise ValueError(
                    f"question: with the tools' descriptions it is {len(prompt)} tokens long, and the model has "
                    f"{writer.positions} positions; ask less, or give fewer tools"
                )
            return end("room")
        reply = writer.reply(prompt)
        if reply.answer is not None or not reply.calls:
            return end("nothing" if reply.answer is None else "answer", reply)
        for one in reply.calls:
            if len(steps) == rounds:
                return end("rounds", Reply(reply.thought, (), None))
            observation, failed = _observe(one, known, made, seconds, tokenizer)
            step = Step(reply.thought, one.name, one.arguments, observation, failed)
            steps.append(step)
            messages += _written(step)
            if on_step is not None:
                on_step(step)


def _observe(one: Call, tools: dict[str, Tool], made: set[str], seconds: float, tokenizer: Any) -> tuple[str, bool]:
    """The line that the model reads after a call, and whether the call failed."""
    key = json.dumps([one.name, one.arguments], sort_keys=True, default=str)
    try:
        if one.error:
            raise ToolError(one.error)
        if key in made:
            raise ToolError(f"{one.name} was called with these arguments before; its result stands above")
        made.add(key)
        found = call(tools, one.name, one.arguments, seconds)
        inside = _special(found, tokenizer)
        if inside:
            raise ToolError(f"{one.name}: its result holds the special token {_apart(inside)}")
        return found, False
    except ToolError as error:
        text = f"error: {error}"
        inside = _special(text, tokenizer)
        return (f"error: the call holds the special token {_apart(inside)}" if inside else text), True


def _written(step: Step) -> list[dict[str, Any]]:
    """A step as messages, in transformers' convention."""
    function = {"name": step.action, "arguments": step.arguments}
    called = {"role": "assistant", "content": step.thought, "tool_calls": [{"type": "function", "function": function}]}
    return [called, {"role": "tool", "name": step.action, "content": step.observation}]


def _special(text: str, tokenizer: Any) -> str:
    """A special token that stands written out in the text, or ""."""
    return next((token for token in tokenizer.all_special_tokens if token in text), "")


def _apart(token: str) -> str:
    """A special token so that it can be said without being one."""
    return " ".join(token)


class _Writer:
    """A model with its template: messages → prompt → reply."""

    def __init__(self, model: Any, tokenizer: Any, schemas: list[Any], max_new_tokens: int, generation: dict[str, Any]):
        self.model, self.tokenizer, self.schemas = model, tokenizer, schemas
        self.max_new_tokens, self.generation = max_new_tokens, generation
        own = takes_tools(tokenizer)
        self.template = tokenizer.get_chat_template(tools=schemas) if own else TEMPLATES["react"]
        self.react = self.template == TEMPLATES["react"]
        self.template_name = "react, built in" if self.react else "the tokenizer's own"
        self.positions = getattr(model.config, "max_position_embeddings", None) or 2**31
        stored = model.generation_config.eos_token_id
        ends = {tokenizer.eos_token_id, *(stored if isinstance(stored, list) else [stored])} - {None}
        asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        after = self._text(asked, False).rpartition("b")[2]  # what the template ends an answer with
        special = set(tokenizer.all_special_ids)
        self.ends = sorted(ends | {i for i in tokenizer(after, add_special_tokens=False)["input_ids"] if i in special})

    def _text(self, messages: list[dict[str, Any]], ask: bool = True) -> str:
        options: Any = {"tools": self.schemas or None, "chat_template": self.template, "add_generation_prompt": ask}
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise ValueError(f"the chat template refuses these messages ({error})") from None

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        return list(self.tokenizer(self._text(messages), add_special_tokens=False, verbose=False)["input_ids"])

    def reply(self, prompt: list[int]) -> Reply:
        ids = torch.tensor([prompt], device=self.model.device)
        stop = _AfterCall(self.tokenizer, len(prompt))
        pad = self.tokenizer.pad_token_id
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(self.max_new_tokens, self.positions - len(prompt)),
            eos_token_id=self.ends,
            pad_token_id=pad if pad is not None else next(iter(self.ends), 0),
            stopping_criteria=StoppingCriteriaList([stop] if self.react else []),
            **{"do_sample": False, **self.generation},
        )
        written = out[0, len(prompt) :].tolist()
        if written and written[-1] in self.ends:
            written.pop()
        parser = getattr(self.tokenizer, "response_template", None)
        if parser is not None and not self.react:
            return self._parsed(written, prompt)
        return read_reply(self.tokenizer.decode(written, skip_special_tokens=True))

    def _parsed(self, written: list[int], prompt: list[int]) -> Reply:
        """A reply read by the parser that comes with the tokenizer."""
        try:
            found = self.tokenizer.parse_response(written, prefix=prompt)
            said = [one.get("function", one) for one in found.get("tool_calls") or ()]
        except Exception as error:  # what a model wrote may be anything
            return Reply("", (Call("", self.tokenizer.decode(written), f"the reply cannot be read ({error})"),), None)
        calls = tuple(checked(str(one.get("name", "")), one.get("arguments", {})) for one in said)
        content = str(found.get("content") or "").strip()
        return Reply(content, calls, None) if calls else Reply("", (), content)


class _AfterCall(StoppingCriteria):
    """Stops where a call is complete."""

    def __init__(self, tokenizer: Any, prompt: int):
        self.tokenizer, self.prompt = tokenizer, prompt

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = [called_in(self.tokenizer.decode(row[self.prompt :], skip_special_tokens=True)) for row in input_ids]
        return torch.tensor(done, device=input_ids.device)

"""One request: its fields, checked before anything runs, and the text generated for it so far."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

CHAT, TEXT = "chat/completions", "completions"
# Fields that mean what we do anyway, by the value that says so; any other value is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "logit_bias": ({},), "tools": ([],), "suffix": ("",),
    "response_format": ({"type": "text"},),
}  # fmt: skip
KNOWN = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "stream",
    "stream_options", "seed", "user", "metadata", "store",
}  # fmt: skip


class Refused(Exception):
    """A request that is not served: HTTP status, a line that says what would be right, the argument."""

    def __init__(self, status: int, message: str, argument: str | None = None):
        super().__init__(message)
        self.status, self.message, self.argument = status, message, argument


@dataclasses.dataclass
class Job:
    """A request on its way: `emit` is called with pieces of text, then with None.

    gone: nobody waits for it any more; its row ends with the next token.
    """

    ids: list[int]
    most: int
    temperature: float
    top_p: float
    seed: int | None
    stops: tuple[str, ...]
    emit: Callable[[str | None], None] = lambda piece: None
    tokens: list[int] = dataclasses.field(default_factory=list)
    sent: int = 0
    finish: str | None = None
    error: Refused | None = None
    gone: bool = False
    usage: dict[str, Any] = dataclasses.field(default_factory=dict)
    since: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Jobs of one kind run in one batch; one with a seed runs alone, or others would change its draws."""
        return (self.temperature, self.top_p, None if self.seed is None else id(self))

    def add(self, token: int, ends: set[int], decode: Callable[[list[int]], str]) -> None:
        """One more token; sends what text is certain by now."""
        if self.finish is not None:
            return
        if token in ends:
            self.finish = "stop"
        else:
            self.tokens.append(token)
            if len(self.tokens) >= self.most:
                self.finish = "length"
        text = decode(self.tokens)
        found = [place for place in (text.find(stop, self.sent) for stop in self.stops) if place >= 0]
        if found:
            text, self.finish = text[: min(found)], "stop"
        if self.finish is None:
            # Half a character decodes to U+FFFD, and the start of a stop string may be one.
            text = text.rstrip("\ufffd")
            text = text[: len(text) - max((_begun(text, stop) for stop in self.stops), default=0)]
        if len(text) > self.sent:
            self.emit(text[self.sent :])
            self.sent = len(text)

    def done(self) -> bool:
        return self.finish is not None or self.gone


def _begun(text: str, stop: str) -> int:
    """The number of characters at the end of the text that may begin the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def parse(kind: str, body: Any, tokenizer: Any, positions: int | None, name: str) -> Job:
    """The job that a request's body asks for.

    Raises:
        Refused: 400 for a field that is wrong or not served, 404 for another model, 413 beyond the context.
    """
    if not isinstance(body, dict):
        raise Refused(400, f"the body is a JSON {type(body).__name__}: send an object")
    for field, value in body.items():
        if value is None or field in KNOWN:
            continue
        if field not in NEUTRAL:
            raise Refused(400, f"{field} is not served: leave it out", field)
        if value not in NEUTRAL[field]:
            raise Refused(400, f"{field}={value!r} is not served: use {NEUTRAL[field][0]!r}, or leave it out", field)
    given = {field: value for field, value in body.items() if value is not None}
    if given.get("model", name) != name:
        raise Refused(404, f"model={given['model']!r}: this server has {name!r}", "model")
    text = _chat(given, tokenizer) if kind == CHAT else _prompt(given)
    ids = tokenizer(text, add_special_tokens=kind != CHAT)["input_ids"]
    if not ids:
        raise Refused(400, "the prompt has no tokens: send some text", "prompt")
    temperature, top_p = _number(given, "temperature", 1.0, 0.0, 2.0), _number(given, "top_p", 1.0, 0.0, 1.0)
    stops = given.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(s, str) and s for s in stops):
        raise Refused(400, f"stop={stops!r}: use a text, or a list of at most 4", "stop")
    for field in ("stream", "store"):
        if not isinstance(given.get(field, False), bool):
            raise Refused(400, f"{field}={given[field]!r}: use true or false", field)
    if not isinstance(given.get("stream_options", {}), dict):
        raise Refused(400, f"stream_options={given['stream_options']!r}: use an object", "stream_options")
    room = None if positions is None else positions - len(ids)
    if room is not None and room < 1:
        raise Refused(413, f"the prompt has {len(ids)} tokens, the model {positions} positions: shorten it", "prompt")
    most = _integer(given, "max_completion_tokens", _integer(given, "max_tokens", None, 1), 1)
    if most is not None and room is not None and most > room:
        raise Refused(
            413, f"max_tokens={most}: with the prompt's {len(ids)} tokens that is more than the model's {positions} "
            f"positions; at most {room} are possible", "max_tokens",
        )  # fmt: skip
    most = most or (256 if room is None else min(256, room))
    return Job(ids, most, temperature, top_p, _integer(given, "seed", None, 0), tuple(stops))


def _prompt(given: dict[str, Any]) -> str:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise Refused(400, f"prompt is {type(prompt).__name__}: send one text that is not empty", "prompt")
    return prompt


def _chat(given: dict[str, Any], tokenizer: Any) -> str:
    messages = given.get("messages")
    fits = isinstance(messages, list) and messages
    if not fits or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages  # type: ignore[union-attr]
    ):
        raise Refused(400, "messages: send a list of {role, content}, both texts", "messages")
    if not getattr(tokenizer, "chat_template", None):
        raise Refused(400, "the checkpoint's tokenizer has no chat template: use /v1/completions", "messages")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template raises what it likes
        raise Refused(400, f"messages do not fit the chat template: {error}", "messages") from error


def _number(given: dict[str, Any], field: str, default: float, low: float, high: float) -> float:
    value = given.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise Refused(400, f"{field}={value!r}: use a number from {low:g} to {high:g}", field)
    return float(value)


def _integer(given: dict[str, Any], field: str, default: int | None, low: int) -> int | None:
    value = given.get(field, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
        raise Refused(400, f"{field}={value!r}: use an integer ≥ {low}", field)
    return value

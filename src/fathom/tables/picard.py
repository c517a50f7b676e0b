"""PICARD (arXiv 2109.05093): beam search that drops tokens after which no query can follow.

    logits[v] ← −∞ unless v is among the k likeliest and text + v can still become an answer; the end token stays

The official parser is a server in Haskell with a limit of 0.1 s for each check. This one counts steps of its acceptor,
so that no result depends on the computer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor

from fathom.models.method import check_choice, check_range
from fathom.tables.acceptor import MODES, Acceptor
from fathom.tables.base import TableMethod
from fathom.tables.schema import Schema

_UNFINISHED = "�"  # what a decoder gives for the first bytes of a character, which are three at most


@dataclasses.dataclass(frozen=True)
class Picard(TableMethod):
    """Options:

    mode: "lex" (any words), "parse_without_guards", "parse_with_guards" (columns of tables in scope) or
        "parse_with_types".
    schedule: "incremental" looks at every token, "finalizing" at the end token alone.
    k: number of likeliest tokens that are checked; all others but the end token are dropped.
    steps: the most readings that the acceptor follows for one token; a token that needs more is dropped, and counted.
    characters: the most characters of a quoted text.
    """

    mode: Literal["lex", "parse_without_guards", "parse_with_guards", "parse_with_types"] = "parse_with_guards"
    schedule: Literal["incremental", "finalizing"] = "incremental"
    k: int = 2
    steps: int = 10_000
    characters: int = 32

    name = "picard"
    paper = "2109.05093"
    summary = "Drops tokens in decoding after which no query over the database can follow."
    equation = "logits[v] = −∞ unless v is among the k likeliest and text + v can become a query; the end token stays"

    def __post_init__(self) -> None:
        check_choice("picard", "mode", self.mode, MODES)
        check_choice("picard", "schedule", self.schedule, ("incremental", "finalizing"))
        check_range("picard", "k", self.k, 1)
        check_range("picard", "steps", self.steps, 1)
        check_range("picard", "characters", self.characters, 1)

    def processor(
        self, tokenizer: Any, schemas: Mapping[str, Schema], databases: Sequence[str] | None = None
    ) -> PicardProcessor:
        """The processor for `generate(logits_processor=[…])`.

        Args:
            schemas: of the databases that answers may be about, by name.
            databases: of each row of the batch the one that its answer must be about; None: any.
        """
        return PicardProcessor(self, tokenizer, schemas, databases)


class PicardProcessor(LogitsProcessor):
    """The logits processor of `Picard`, which runs at every step of `generate`.

    Attributes:
        checked, rejected: number of tokens that the acceptor checked, and of those that it dropped.
        dead_ends: number of steps of a row at which only the end token was left.
    """

    def __init__(self, method: Picard, tokenizer: Any, schemas: Mapping[str, Schema], databases: Sequence[str] | None):
        self.method, self.tokenizer, self.databases = method, tokenizer, databases
        self.acceptor = Acceptor(schemas, method.mode, method.steps, method.characters)
        self.end = tokenizer.eos_token_id
        self.silent = set(tokenizer.all_special_ids) - {self.end}  # they write nothing
        self.checked = self.rejected = self.dead_ends = 0
        # (database or "", tokens) → their text, and the acceptor's state
        self._read: dict[tuple[str, tuple[int, ...]], tuple[str, Any]] = {}

    @property
    def cut_off(self) -> int:
        """The number of tokens that were dropped because they needed more steps than the limit."""
        return self.acceptor.cut_off

    def __call__(self, input_ids: Int[Tensor, "rows T"], scores: Float[Tensor, "rows V"]) -> Float[Tensor, "rows V"]:
        if self.databases and len(scores) % len(self.databases):
            raise ValueError(
                f"picard: databases has {len(self.databases)} names, and there are {len(scores)} rows; name one for "
                "each question of the batch"
            )
        likeliest = scores.topk(min(self.method.k, scores.shape[-1]), dim=-1).indices.tolist()
        beams = len(scores) // len(self.databases) if self.databases else 1
        ended: list[int] = []  # rows
        kept: list[tuple[int, int]] = []  # (row, token)
        unfinished: list[int] = []  # rows that would end and must not
        for row, (read, tokens) in enumerate(zip(input_ids.tolist(), likeliest, strict=True)):
            name = self.databases[row // beams] if self.databases else ""
            prefix = tuple(read[1:])  # without the token that decoding starts from
            if self.end in prefix:  # a beam that has ended
                ended.append(row)
                continue
            allowed = [token for token in tokens if self._allows(prefix, token, name)]
            if self.method.schedule == "finalizing":
                if self.end in tokens and self.end not in allowed:
                    unfinished.append(row)
                continue
            if self.end not in tokens or not allowed:
                self.dead_ends += not allowed
                allowed.append(self.end)
            kept += [(row, token) for token in allowed]
        if self.method.schedule == "finalizing":
            found = scores.clone()
            found[unfinished, self.end] = -torch.inf
            return found
        found = torch.full_like(scores, -torch.inf)
        found[ended] = scores[ended]
        if kept:
            where = torch.tensor(kept, device=scores.device).unbind(1)  # one copy to the device, not one a row
            found[where] = scores[where]
        return found

    def _allows(self, prefix: tuple[int, ...], token: int, name: str) -> bool:
        """Whether an answer can continue with this token, or end here."""
        if token != self.end and self.method.schedule == "finalizing":
            return True
        self.checked += 1
        state = self._state(prefix, name)
        if token == self.end:
            fine = state is not None and self.acceptor.complete(state)
        else:
            fine = state is not None and token not in self.silent
            fine = fine and self._state((*prefix, token), name) is not None
        self.rejected += not fine
        return fine

    def _state(self, tokens: tuple[int, ...], name: str) -> Any:
        """The acceptor's state after these tokens; None: no answer begins this way."""
        return self._text_and_state(tokens, name)[1]

    def _text_and_state(self, tokens: tuple[int, ...], name: str) -> tuple[str, Any]:
        """A text grows by what its last token adds to it."""
        if not tokens:
            return "", Acceptor.START
        key = (name, tokens)
        if key not in self._read:
            before, state = self._text_and_state(tokens[:-1], name)
            text = str(
                self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            )
            written = text.rstrip(_UNFINISHED)
            unfinished, text = len(text) - len(written), written
            if state is not None:
                more = text[len(before) :] if text.startswith(before) and unfinished <= 3 else None
                state = None if more is None else self.acceptor.advance(state, more, [name] if name else None)
            self._read[key] = (text, state)
        return self._read[key]

"""The text of a question and a database for a model, and the word, name or cell of each token.

    {turn 1} | … | {turn n} | {database} | {table} : {column} , {column} [ {cell} ; {cell} ] | {table} : …
    answer: {database} | {query}

Every word, name and cell keeps its characters, so that the tokenizer's offsets say which tokens it has. The database's
name stands for the column "*". Where turns are too long, the oldest go first.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fathom.models.method import check_range
from fathom.tables.database import Database
from fathom.tables.linking import values_of
from fathom.tables.rasat import numbering
from fathom.tables.relations import Turn, relation_matrix
from fathom.tables.schema import STAR, Schema
from fathom.tables.words import split

_QUOTED = re.compile(r"(\"[^\"]*\"|'[^']*')")


@dataclasses.dataclass(frozen=True)
class Item:
    """A word, name or cell at the characters [start, stop).

    kind: "word", "table", "column" or "value".   owner: a word's turn or a cell's column.   index: within the owner.
    """

    kind: str
    owner: int
    index: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Text:
    """A source, and its items in the order of their characters."""

    text: str
    items: tuple[Item, ...]


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A source for a model.

    Attributes:
        table: the relation of every word, name and cell to every other (`fathom.tables.relations`), uint8.
        rows: for every token its row of the table, −1 for none.
        places: for every item of the text its row.
        cut: sentences about what was left out.
    """

    input_ids: list[int]
    table: np.ndarray
    rows: np.ndarray
    places: np.ndarray
    text: Text
    cut: str = ""

    def relation_ids(self, options: Any) -> np.ndarray:
        """The relations [T, T] of tokens, uint8, by the ids of a model with these options (`Rasat.Options`)."""
        return of_tokens(np.array(numbering(options), dtype=np.uint8)[self.table], self.rows)


@dataclasses.dataclass(frozen=True)
class Source:
    """The way to write sources and answers. A checkpoint's config keeps it.

    tokens: the most tokens of a source, its end included.
    values: write cells that nearly match words of the question beside their column.
    links: cells of the real database link words to columns ("value match").
    """

    tokens: int = 512
    values: bool = True
    links: bool = True

    def __post_init__(self) -> None:
        check_range("source", "tokens", self.tokens, 8)

    def write(self, turns: Sequence[str], schema: Schema, database: Database | None = None) -> Text:
        """The text of turns, the current one last, and a database."""
        cells = values_of(" | ".join(turns), database) if self.values else {}
        return write(turns, schema, cells)

    def encode(
        self,
        tokenizer: Any,
        turns: Sequence[str],
        schema: Schema,
        database: Database | None = None,
        spoken: Sequence[Turn] | None = None,
        dependency: bool = False,
        whole: bool = True,
    ) -> Encoded:
        """Tokens of turns and a database, with the end token, and their relations.

        Args:
            turns: the questions, the current one last; older ones are left out if there is no room.
            spoken: for each turn, annotations of its words (coreference, a parse).
            dependency: relate words by their parse, not by their distance.
            whole: raise ValueError if the current question and the schema do not fit; else their end is cut.
        """
        turns, spoken = list(turns), list(spoken) if spoken is not None else [Turn() for _ in turns]
        if not turns or not turns[-1].strip():
            raise ValueError("question is empty: ask something of the database")
        count, cut = len(turns), ""
        for first in range(count):
            text = self.write(turns[first:], schema, database)
            found = tokenizer(  # a special token in a question or a name is text like any other
                text.text,
                add_special_tokens=False,
                split_special_tokens=True,
                return_offsets_mapping=True,
                verbose=False,
            )
            ids = [*found["input_ids"], tokenizer.eos_token_id]
            offsets = [*found["offset_mapping"], (0, 0)]
            if len(ids) <= self.tokens:
                break
        else:
            if whole:
                raise ValueError(self._too_long(tokenizer, turns[-1], schema, len(ids)))
            lost = len(ids) - self.tokens
            ids, offsets = [*ids[: self.tokens - 1], ids[-1]], [*offsets[: self.tokens - 1], (0, 0)]
            cut = f"the last {lost} tokens of the schema"
            first = count - 1
        if first:
            cut = " and ".join(part for part in (f"the oldest {first} of {count} turns", cut) if part)
        links = database if self.links else None
        table, places = relation_matrix(text, turns[first:], schema, links, spoken[first:], dependency)
        owner = token_items(text, offsets)
        return Encoded(ids, table, np.where(owner >= 0, places[owner], -1), places, text, cut)

    def _too_long(self, tokenizer: Any, question: str, schema: Schema, tokens: int) -> str:
        bare = write([""], schema, {}).text
        alone = (
            len(tokenizer(bare, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]) + 1
        )
        if alone > self.tokens:
            return (
                f"database {schema.name!r}: its schema alone has {alone} tokens, and a source has room for "
                f"{self.tokens}; use a source of more tokens, or a database with fewer tables"
            )
        return (
            f"question of {len(question)} characters: with the schema of {schema.name!r} ({alone} tokens) it has "
            f"{tokens} tokens, and a source has room for {self.tokens}; ask it more briefly"
        )


def write(turns: Sequence[str], schema: Schema, cells: Mapping[int, Sequence[str]]) -> Text:
    """The text, with `cells` beside their columns."""
    parts: list[str] = []
    items: list[Item] = []
    place = 0

    def say(text: str, kind: str = "", owner: int = 0, index: int = 0) -> None:
        nonlocal place
        if kind:
            items.append(Item(kind, owner, index, place, place + len(text)))
        parts.append(text)
        place += len(text)

    for number, turn in enumerate(turns):
        if number:
            say(" | ")
        text = question_text(turn)
        for index, word in enumerate(split(text)):
            items.append(Item("word", number, index, place + word.start, place + word.stop))
        say(text)
    say(" | ")
    say(schema.name, "column", STAR, STAR)
    for table, name in enumerate(schema.tables):
        say(" | ")
        say(name.lower(), "table", table, table)
        for position, column in enumerate(schema.of_table(table)):
            say(" , " if position else " : ")
            say(schema.columns[column].name.lower(), "column", column, column)
            for order, cell in enumerate(cells.get(column, ())):
                say(" ; " if order else " [ ")
                say(cell, "value", column, order)
            if cells.get(column):
                say(" ]")
    return Text("".join(parts), tuple(items))


def question_text(turn: str) -> str:
    """A turn as it is written: plain double quotes, no bar (which would end it), single spaces."""
    for mark in ("``", "''", "“", "”", "‘‘", "’’"):
        turn = turn.replace(mark, '"')
    return " ".join(turn.replace("|", " ").replace("\ufeff", " ").split())


def token_items(text: Text, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """The index of each token's item, that with most of its characters (the first of equal ones); −1 for none."""
    owner = np.full(len(offsets), -1)
    number = 0
    for token, (start, stop) in enumerate(offsets):
        while number < len(text.items) and text.items[number].stop <= start:
            number += 1
        best = 0
        for candidate in range(number, len(text.items)):
            item = text.items[candidate]
            if item.start >= stop:
                break
            shared = min(stop, item.stop) - max(start, item.start)
            if shared > best:
                best, owner[token] = shared, candidate
    return owner


def of_tokens(table: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The relations [T, T] of tokens with these rows of a table; a token with row −1 has no relations."""
    return np.where((rows[:, None] >= 0) & (rows >= 0), table[rows[:, None], rows], 0).astype(np.uint8)


def answer_text(query: str, schema_name: str) -> str:
    """The answer that a model learns: the database's name, a bar, and the query, in lower case outside quotes."""
    return f"{schema_name} | {normalised(query)}"


def begun(tokenizer: Any, schema_name: str) -> list[int]:
    """The tokens with which an answer about a database begins: its name and the bar, as they stand before a query."""
    name = f"{schema_name} |"
    found = tokenizer(answer_text("select", schema_name), add_special_tokens=False, return_offsets_mapping=True)
    ends = [stop for _, stop in found["offset_mapping"]]  # the bar's token may have the space behind it
    return [token for token, stop in zip(found["input_ids"], ends, strict=True) if stop <= len(name) + 1]


def normalised(query: str) -> str:
    """A query in lower case outside quotes, with single spaces and none before a comma."""
    query = query.strip().rstrip(";").strip()
    parts = _QUOTED.split(query)
    parts = [p if i % 2 else re.sub(r"\s+", " ", p.lower()).replace(" , ", ", ") for i, p in enumerate(parts)]
    return "".join(parts).strip()


def query_of(answer: str, schema_name: str = "") -> str:
    """The query in what a model wrote about a database. Both its name and the query may have bars of their own."""
    answer = answer.strip()
    if schema_name and answer.startswith(f"{schema_name} |"):
        return answer.removeprefix(f"{schema_name} |").strip()
    if re.match(r"(select|with)\b", answer, re.IGNORECASE):  # without a name
        return answer
    return answer.split("|", 1)[-1].strip()

"""The relation of every word, table, column and cell of a source to every other.

    words       by distance in a turn, or by a parse; words of different turns are "generic"
    schema      keys, and which column is in which table
    linking     a word names a table or column, wholly or in part, or is one of a column's cells
    cells       to the words of their own column, and back
    turns       mentions of one thing, from a file

Every relation has a number (`NUMBER`), and a model's options give its id in the model's tables (`rasat.numbering`). A
token
has the relations of the word, name or cell that it belongs to: `Source.encode` copies the matrix.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fathom.tables.database import Database
from fathom.tables.linking import EXACT, NONE, PARTIAL, VALUE, link_columns, link_names
from fathom.tables.rasat import EVERY
from fathom.tables.schema import STAR, Schema
from fathom.tables.words import split

NUMBER = {name: number for number, name in enumerate(EVERY, start=1)}
NEAR = 2  # words, whose distance has a relation of its own
_MATCH = {EXACT: "exact", PARTIAL: "partial", NONE: "none", VALUE: "value"}


@dataclasses.dataclass(frozen=True)
class Turn:
    """Annotations of one turn's words, which are named by their numbers.

    Attributes:
        heads: for each word the number of its head, −1 for a root.
        mentions: (chain, the numbers of the words of one mention); a chain may have mentions in other turns.
    """

    heads: tuple[int, ...] | None = None
    mentions: tuple[tuple[int, tuple[int, ...]], ...] = ()


def relation_matrix(
    text: Any,
    turns: Sequence[str],
    schema: Schema,
    database: Database | None = None,
    spoken: Sequence[Turn] = (),
    dependency: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers between rows (uint8), and the row of every item of `text`. `dependency`: by parses, not by distances.

    Rows are the words turn by turn, the tables, the columns and the cells. Raises ValueError where a file's words are
    not the turn's.
    """
    from fathom.tables.source import question_text

    words = [split(question_text(turn)) for turn in turns]
    starts = np.cumsum([0, *map(len, words)]).tolist()
    said, tables, columns = starts[-1], len(schema.tables), len(schema.columns)
    cells = [item.owner for item in text.items if item.kind == "value"]
    first_table, first_column, first_cell = said, said + tables, said + tables + columns
    size = first_cell + len(cells)
    found = np.zeros((size, size), dtype=np.uint8)

    found[:said, :said] = NUMBER["q-q:generic"]
    _distances(found[:said, :said], " across")
    _coreference(found, starts, spoken)
    for turn, start in enumerate(starts[:-1]):
        stop = starts[turn + 1]
        heads = spoken[turn].heads if spoken else None
        if dependency:
            _dependencies(found[start:stop, start:stop], heads, turn)
        else:
            _distances(found[start:stop, start:stop])
    found[first_table:first_cell, first_table:first_cell] = _schema(schema)
    for turn, start in enumerate(starts[:-1]):
        stop = starts[turn + 1]
        to_tables, to_columns = link_names(words[turn], schema.table_words), link_columns(words[turn], schema, database)
        for kind, links, place in (("t", to_tables, first_table), ("c", to_columns, first_column)):
            span = slice(place, place + links.shape[1])
            # a table has no cells, so VALUE does not occur among its links
            forward = np.array([NUMBER.get(f"q-{kind}:{_MATCH[match]}", 0) for match in range(4)], dtype=np.uint8)
            backward = np.array([NUMBER.get(f"{kind}-q:{_MATCH[match]}", 0) for match in range(4)], dtype=np.uint8)
            found[start:stop, span], found[span, start:stop] = forward[links], backward[links].T
        found[start:stop, first_column + STAR] = NUMBER["q-*:generic"]
        found[first_column + STAR, start:stop] = NUMBER["*-q:generic"]
    for index, column in enumerate(cells):
        found[first_column + column, first_cell + index] = NUMBER["c-v:has"]
        found[first_cell + index, first_column + column] = NUMBER["v-c:has"]

    rows, cell = np.empty(len(text.items), dtype=np.int64), 0
    for place, item in enumerate(text.items):
        if item.kind == "word":
            rows[place] = starts[item.owner] + item.index
        elif item.kind == "value":
            rows[place], cell = first_cell + cell, cell + 1
        else:
            rows[place] = (first_table if item.kind == "table" else first_column) + item.index
    return found, rows


def _distances(block: np.ndarray, kind: str = "") -> None:
    """The relation of word i to word j by their distance j − i, up to `NEAR`."""
    size = len(block)
    for distance in range(-NEAR, NEAR + 1):
        here = np.arange(max(0, -distance), min(size, size - distance))
        block[here, here + distance] = NUMBER[f"q-q:{distance}{kind}"]


def _dependencies(block: np.ndarray, heads: Sequence[int] | None, turn: int) -> None:
    """Head to child forward, child to head backward, all others unrelated."""
    if heads is None:
        raise ValueError(
            f"dependency=True: turn {turn} has no parse; give a CoNLL-U file, or load the model with dependency=False"
        )
    if len(heads) != len(block):
        raise ValueError(
            f"the parse of turn {turn} has {len(heads)} words and the question {len(block)}; parse the words that "
            "fathom.tables.words.split makes of it"
        )
    block[:] = NUMBER["q-q:unrelated"]
    for child, head in enumerate(heads):
        if head >= 0:
            block[head, child], block[child, head] = NUMBER["q-q:forward"], NUMBER["q-q:backward"]


def _coreference(found: np.ndarray, starts: Sequence[int], spoken: Sequence[Turn]) -> None:
    """Relations between the mentions of a chain, in both directions, and among the words of one mention."""
    chains: dict[int, list[list[int]]] = {}
    for turn, said in enumerate(spoken):
        for chain, words in said.mentions:
            if any(word >= starts[turn + 1] - starts[turn] for word in words):
                raise ValueError(
                    f"coreference of turn {turn} names word {max(words)}, and the question has "
                    f"{starts[turn + 1] - starts[turn]}; count the words that fathom.tables.words.split makes of it"
                )
            chains.setdefault(chain, []).append([starts[turn] + word for word in words])
    for mentions in chains.values():
        if len(mentions) < 2:  # the others were left out with older turns
            continue
        for index, mention in enumerate(mentions):
            if len(mention) > 1:
                found[np.ix_(mention, mention)] = NUMBER["q-q:same-mention"]
            for later in mentions[index + 1 :]:
                found[np.ix_(mention, later)] = NUMBER["q-q:coreference"]
                found[np.ix_(later, mention)] = NUMBER["q-q:coreference-back"]


@functools.lru_cache(maxsize=512)
def _schema(schema: Schema) -> np.ndarray:
    """The block of tables and columns."""
    tables, columns = len(schema.tables), len(schema.columns)
    found = np.zeros((tables + columns, tables + columns), dtype=np.uint8)
    of = [column.table for column in schema.columns]

    between_tables = np.full((tables, tables), NUMBER["t-t:generic"])
    pairs = {(of[a], of[b]) for a, b in schema.foreign}
    for a, b in pairs:
        if (b, a) in pairs:
            between_tables[a, b] = between_tables[b, a] = NUMBER["t-t:fk-both"]
        else:
            between_tables[a, b], between_tables[b, a] = NUMBER["t-t:fk"], NUMBER["t-t:fk-reverse"]
    np.fill_diagonal(between_tables, NUMBER["t-t:identity"])

    between_columns = np.full((columns, columns), NUMBER["c-c:generic"])
    same = np.array(of)[:, None] == np.array(of)
    between_columns[same] = NUMBER["c-c:same-table"]
    np.fill_diagonal(between_columns, NUMBER["c-c:identity"])
    for a, b in schema.foreign:
        between_columns[a, b], between_columns[b, a] = NUMBER["c-c:fk"], NUMBER["c-c:fk-reverse"]
    between_columns[STAR, :], between_columns[:, STAR] = NUMBER["*-c:generic"], NUMBER["c-*:generic"]
    between_columns[STAR, STAR] = NUMBER["*-*:identity"]

    down = np.full((tables, columns), NUMBER["t-c:generic"])
    up = np.full((columns, tables), NUMBER["c-t:generic"])
    for column, table in enumerate(of):
        if table >= 0:
            key = "pk" if column in schema.primary else "has"
            down[table, column], up[column, table] = NUMBER[f"t-c:{key}"], NUMBER[f"c-t:{key}"]
    down[:, STAR], up[STAR] = NUMBER["t-*:generic"], NUMBER["*-t:generic"]

    found[:tables, :tables], found[tables:, tables:] = between_tables, between_columns
    found[:tables, tables:], found[tables:, :tables] = down, up
    return found

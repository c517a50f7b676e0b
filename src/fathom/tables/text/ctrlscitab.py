"""CTRLSciTab (arXiv 2312.05402): highlighted cells and a few background sentences say what to write about a table.

    full            h₁ <C> h₂ … <H> <R> <C> col₁ <C> col₂ … <CAP> caption <BKG> s₁ s₂ s₃
    no background   the same without <BKG> …
    no highlight    <R> <C> v <C> v … of every row <CAP> caption <BKG> …
    neither         <R> <C> v <C> v … of every row <CAP> caption

"full" has the header but no body, as in the released code; `include_body=True` adds the rows, which comparisons need.
The released preprocessing puts the reference into the query of training rows and trains its retriever on all splits'
references: here queries are plain and the retriever sees training texts alone (`retrieval.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from fathom.tables.text.base import TableMethod
from fathom.tables.text.linearize import BACKGROUND, BODY, CAPTION, HEADER, HIGHLIGHTS, PREFIX, Grid, TableLinearizer

ROW, CELL, CAPTION_MARK, BACKGROUND_MARK, HIGHLIGHT_END = "<R>", "<C>", "<CAP>", "<BKG>", "<H>"
GRID_MARKERS = (ROW, CELL, CAPTION_MARK, BACKGROUND_MARK, HIGHLIGHT_END)
GRID_PREFIX = "Table to text: "  # for T5

Retriever = Literal["tsdae", "tfidf", "cross_encoder", "random", "oracle", "none"]


@dataclasses.dataclass(frozen=True)
class CTRLSciTab(TableMethod):
    """source_tokens: the most tokens of a source, which is cut on the right.

    highlights: read the highlighted cells, and of the table only its header.
    include_body: read the table's rows beside the highlights, too.
    background: read retrieved background sentences.
    retriever: how they are chosen: tsdae, tfidf, cross_encoder, random, oracle (nearest to the reference) or none.
    sentences: number of background sentences.
    sentence_tokens: the most tokens of each; None: only the end of the source cuts them.
    query_for_train: "plain", or "oracle": queries of training rows hold the reference, as in the released code.
    strip_stopwords: background sentences without their stop words, as in the released code.
    """

    source_tokens: int = 512
    highlights: bool = True
    include_body: bool = False
    background: bool = True
    retriever: Retriever = "tsdae"
    sentences: int = 3
    sentence_tokens: int | None = None
    query_for_train: Literal["plain", "oracle"] = "plain"
    strip_stopwords: bool = False

    name = "ctrlscitab"
    paper = "2312.05402"
    summary = "Highlighted cells, and background sentences that a retriever chose, say what to write about a table."
    equation = "source = highlights <H> header <CAP> caption <BKG> top₃ sentences by cos(enc(query), enc(sentence))"
    variants = ({}, {"background": False}, {"highlights": False}, {"highlights": False, "background": False})
    slots = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sentences < 1:
            raise self.refuse("sentences", self.sentences, "must be at least 1; background=False reads none")
        if self.background and self.retriever == "none":
            raise self.refuse("retriever", "none", "choose one, or use background=False")

    def parts(self, training: bool) -> tuple[int, ...]:
        table = (HIGHLIGHTS, HEADER, *((BODY,) if self.include_body else ())) if self.highlights else (BODY,)
        return (PREFIX, *table, CAPTION, *((BACKGROUND,) if self.background else ()))


def pieces(grid: Grid, background: Sequence[str] = ()) -> dict[int, list[str]]:
    """Every part of a source: text, marker, text, marker, …, of which texts may be empty. A source is some of the
    parts, in this order, with one space between."""
    return {
        HIGHLIGHTS: [*_between(grid.highlights, CELL), HIGHLIGHT_END, ""],
        HEADER: _rows([grid.header]),
        BODY: _rows(grid.rows),
        CAPTION: ["", CAPTION_MARK, grid.caption.rstrip()],
        BACKGROUND: ["", BACKGROUND_MARK, " ".join(background)] if background else [],
    }


def source_parts(
    grid: Grid, background: Sequence[str], lines: TableLinearizer, most: int
) -> list[tuple[int, list[int]]]:
    """The parts of a source as token ids, each at most so many, in their order. A marker in a cell, the caption or the
    background is text like any other."""

    def ids(said: list[str]) -> list[int]:
        found: list[int] = []
        for place in range(0, len(said), 2):
            text, marker = said[place] and f" {said[place]}", said[place + 1 : place + 2]
            found += lines.plain(f"{text} " if marker else text) + [i for m in marker for i in lines.ids(m)]
        return found

    parts = [(part, ids(said)[:most]) for part, said in pieces(grid, background).items() if said]
    return [(PREFIX, lines.ids(lines.prefix)), *parts] if lines.prefix else parts


def serialize(grid: Grid, method: CTRLSciTab, background: Sequence[str] = ()) -> str:
    """A source as text."""
    found = pieces(grid, background)
    return _text([word for part in method.parts(training=False) for word in found.get(part, ())])


def parse(source: str) -> dict[str, Any]:
    """The parts of a source: `highlights`, `rows` (the header first, if it is read), `caption`, `background`."""
    before, mark, rest = source.partition(HIGHLIGHT_END)
    if not mark:
        before, rest = "", source
    head, _, tail = rest.partition(CAPTION_MARK)
    caption, _, background = tail.partition(BACKGROUND_MARK)
    rows = [row for row in head.split(ROW) if row.strip()]
    return {
        "highlights": [cell.strip() for cell in before.split(CELL)] if before.strip() else [],
        "rows": [[cell.strip() for cell in row.split(CELL)[1:]] for row in rows],
        "caption": caption.strip(),
        "background": background.strip(),
    }


def query(grid: Grid, reference: str | None = None) -> str:
    """The query for background: highlights, header and caption; with the reference, as in the released code."""
    found = pieces(grid)
    plain = _text([word for part in (HIGHLIGHTS, HEADER, CAPTION) for word in found[part]])
    return plain if reference is None else f"{plain} {BACKGROUND_MARK} {reference}"


def _rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """["", <R>, "", <C>, cell, <C>, cell, …, <R>, …]."""
    found = [""]
    for cells in rows:
        found += [ROW, ""]
        for cell in cells:
            found += [CELL, cell.rstrip()]
    return found


def _between(texts: Sequence[str], marker: str) -> list[str]:
    return [word for text in texts for word in (marker, text)][1:] or [""]


def _text(words: Sequence[str]) -> str:
    return " ".join(word for word in words if word)

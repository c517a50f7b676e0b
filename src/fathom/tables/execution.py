"""Spider's execution accuracy: whether two queries return the same (test suites, arXiv 2010.02840).

Results are the same if, in some order of the predicted columns, both have the same bag of rows, or the same list of
rows where the gold query has ORDER BY. DISTINCT is removed from both first, as the official script does by default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fathom.tables.database import Database, QueryError
from fathom.tables.mutants import TOKEN
from fathom.tables.sql_match import whole_signs


def runnable(query: str, distinct: bool = False) -> str:
    """The query as it is run: signs that a tokenizer split are joined, and DISTINCT is removed unless `distinct`."""
    query = whole_signs(query)
    if not distinct and "distinct" in query.lower():
        query = _without_distinct(query)
    return query


def _without_distinct(query: str) -> str:
    parts, end, before = [], 0, ""
    for token in TOKEN.finditer(query):
        word = token.group().lower()
        if word == "distinct" and before != "is":  # IS [NOT] DISTINCT FROM compares
            parts.append(query[end : token.start()])
            end = token.end()
        if (before, word) != ("is", "not"):
            before = word
    return "".join([*parts, query[end:]])


def same_rows(gold: Sequence[tuple[Any, ...]], said: Sequence[tuple[Any, ...]], ordered: bool) -> bool:
    """Whether the rows are the same up to the order of columns, and of rows unless `ordered`."""
    if len(gold) != len(said):
        return False
    if not gold:
        return True
    width = len(gold[0])
    if len(said[0]) != width:
        return False
    bag: Any = list if ordered else Counter
    seen: dict[tuple[Any, ...], int] = {}
    first = [seen.setdefault(column, i) for i, column in enumerate(zip(*said, strict=True))]

    def extends(taken: tuple[int, ...]) -> bool:
        """Whether the first columns of gold are these of the others, and the rest of them can be found, too."""
        count = len(taken)
        if bag(row[:count] for row in gold) != bag(tuple(row[i] for i in taken) for row in said):
            return False
        left = {first[i]: i for i in range(width) if i not in taken}  # of equal columns one is enough
        return count == width or any(extends((*taken, i)) for i in left.values())

    return extends(())


def execution_match(predicted: str, gold: str, databases: Iterable[Database], distinct: bool = False) -> bool:
    """Whether a prediction returns the same as the gold query on every database. A prediction that fails, or that a
    limit stops, does not. A database on which the gold query does not run says nothing, as a view has no made-up rows.
    Raises QueryError if it runs on none.
    """
    said, right = runnable(predicted, distinct), runnable(gold, distinct)
    ordered = "order by" in " ".join(gold.lower().split())
    fault: QueryError | None = None
    ran = False
    for database in databases:
        try:
            expected = database.run(right).rows
        except QueryError as error:
            fault = error
            continue
        ran = True
        try:
            rows = database.run(said).rows
        except QueryError:
            return False
        if not same_rows(expected, rows, ordered):
            return False
    if fault is not None and not ran:
        raise fault
    return True

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

_JOINED = {("<", "="): "<=", (">", "="): ">=", ("!", "="): "!=", ("<", ">"): "<>"}


def runnable(query: str, distinct: bool = False) -> str:
    """The query as it is run: signs that a tokenizer split are joined, and DISTINCT is removed unless `distinct`."""
    for (first, second), whole in _JOINED.items():
        query = query.replace(f"{first} {second}", whole)
    if not distinct and "distinct" in query.lower():
        query = _without_distinct(query)
    return query


def _without_distinct(query: str) -> str:
    parts, end = [], 0
    for token in TOKEN.finditer(query):
        if token.group().lower() == "distinct":
            parts.append(query[end : token.start()])
            end = token.end()
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
    limit stops, does not. Raises QueryError if the gold query does not run.
    """
    said, right = runnable(predicted, distinct), runnable(gold, distinct)
    ordered = "order by" in " ".join(gold.lower().split())
    for database in databases:
        expected = database.run(right).rows
        try:
            rows = database.run(said).rows
        except QueryError:
            return False
        if not same_rows(expected, rows, ordered):
            return False
    return True

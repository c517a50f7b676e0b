"""Mutants of a query, which differ from it in one place; a score and a test suite must tell them from it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fathom.tables.schema import Schema

TOKEN = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`|\[[^\]]*\]|\d+\.\d+|\w+(?:\.\w+)*(?:\.\*)?|<=|>=|!=|<>|[^\w\s]")
_CHANGES = {
    "max": ("min",), "min": ("max",), "sum": ("avg",), "avg": ("sum",), "count": ("max",), ">": ("<", ">="),
    "<": (">", "<="), ">=": (">",), "<=": ("<",), "=": ("!=",), "!=": ("=",), "and": ("or",), "or": ("and",),
    "desc": ("asc", ""), "asc": ("desc",), "distinct": ("",), "union": ("intersect",), "intersect": ("union", "except"),
    "except": ("union", "intersect"), "not": ("",), "like": ("=",),
}  # fmt: skip
_KEYWORDS = {
    *_CHANGES, "select", "from", "where", "group", "order", "by", "having", "limit", "as", "join", "on", "in",
    "between",
}  # fmt: skip


def mutants(query: str, schema: Schema) -> list[str]:
    """All queries that differ from `query` by one change, without repetitions: another operator, aggregate, order,
    connector, column of the same table, number, text or limit; DISTINCT added or removed; one condition, grouping key
    or limit removed.
    """
    tokens = TOKEN.findall(query)
    found = dict.fromkeys(" ".join(part for part in changed if part) for changed in _changed(tokens, schema))
    found.pop(" ".join(tokens), None)
    return list(found)


def _changed(tokens: list[str], schema: Schema) -> Iterator[list[str]]:
    lower = [token.lower() for token in tokens]
    aliases = {lower[i + 1]: lower[i - 1] for i, word in enumerate(lower[:-1]) if word == "as" and i}
    tables = [word for word in lower if word in schema.by_name]

    def with_one(place: int, *new: str) -> list[str]:
        return [*tokens[:place], *new, *tokens[place + 1 :]]

    for place, word in enumerate(lower):
        for other in _CHANGES.get(word, ()):
            yield with_one(place, other)
        if word == "select" and lower[place + 1 : place + 2] != ["distinct"]:
            yield with_one(place, tokens[place], "DISTINCT")
        elif word == "limit":
            yield [*tokens[:place], *tokens[place + 2 :]]
        elif re.fullmatch(r"\d+", word):
            yield with_one(place, str(int(word) + 1))
        elif word[0] in "'\"":
            yield with_one(place, f"{word[0]}{word[1:-1]}x{word[0]}")
        elif word not in _KEYWORDS:
            prefix, _, name = word.rpartition(".")
            for table in [aliases.get(prefix, prefix)] if prefix else tables:
                columns = schema.by_name.get(table, {})
                if name in columns and (prefix or word not in schema.by_name):
                    for other in columns:
                        if other != name:
                            yield with_one(place, f"{prefix}.{other}" if prefix else other)
    for place, word in enumerate(lower):  # one of several conditions, or of several keys, less
        if word in ("and", "or") and "between" not in lower[max(0, place - 3) : place]:
            stop = next((i for i in range(place + 1, len(lower)) if lower[i] in _ENDS), len(lower))
            yield [*tokens[:place], *tokens[stop:]]
        if word == "," and "by" in lower[max(0, place - 2) : place]:
            yield [*tokens[:place], *tokens[place + 2 :]]


_ENDS = {"and", "or", "group", "order", "limit", "having", "union", "intersect", "except", "join", "where", ")"}

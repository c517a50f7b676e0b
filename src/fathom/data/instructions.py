"""Instruction rows made from documents and records, as GeoSignal restructures existing resources (arXiv 2306.05064).

A generator has templates, an extractor that finds their fields in a record, and a filter. A record is a document
{"text", "meta"} in Markdown, as `fathom curate` writes it, or an entry of a resource:

    {"entity", "entity_type"}   {"head", "relation", "tail"}   {"question", "answer"}

A row has "instruction", "input", "output", "type" (the generator) and "source" (of the record), and is read by task
`sft` with prompt_field: instruction, input_field: input, answer_field: output.
"""

from __future__ import annotations

import collections
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fathom.models.registry import nearest

Fields = dict[str, str]
LONGEST = 4000  # characters of an input or an output
_SECTION = re.compile(r"^#{2,3} (.+)\n+((?:(?!^#).*\n?)*)", re.M)
_FLOAT = re.compile(r"\[START_(FIGURE|TABLE)\]\s*(.*?)\s*\[END_\1\]", re.S)
_MARKED = re.compile(r"\[(START|END)_[A-Z]+\]")
_DEFINED = re.compile(
    r"(?:^|(?<=[.!?] ))((?:An? |The )?([A-Za-z][\w -]{3,41}?) (?:is|are) (?:an?|the) [^.!?]{20,300}\.)"
)
_PRONOUNS = frozenset(("it", "this", "that", "these", "those", "they", "he", "she", "we", "there", "which", "what"))


@dataclass(frozen=True)
class Generator:
    """A way to make rows of one type.

    Attributes:
        templates: pairs of an instruction and an input, with {fields}; one is drawn for every row.
        extract: the fields of every row that a record gives; "output" is the answer.
        keep: whether fields are good enough for a row.
    """

    templates: tuple[tuple[str, str], ...]
    extract: Callable[[dict[str, Any]], Iterator[Fields]]
    keep: Callable[[Fields], bool] = lambda fields: True


def _title(record: dict[str, Any]) -> str:
    found = re.match(r"\s*# (.+)", str(record.get("text", "")))
    return found[1].strip() if found else ""


def _abstract(record: dict[str, Any]) -> str:
    return next((body for head, body in _sections(record) if head.lower() == "abstract"), "")


def _sections(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Heading and body, without figures, tables and markers."""
    for head, body in _SECTION.findall(str(record.get("text", ""))):
        plain = _MARKED.sub("", _FLOAT.sub("", body))
        yield head.strip(), re.sub(r"\n{3,}", "\n\n", plain).strip()


def _titles(record: dict[str, Any]) -> Iterator[Fields]:
    if _title(record) and _abstract(record):
        yield {"abstract": _abstract(record), "output": _title(record)}


def _abstracts(record: dict[str, Any]) -> Iterator[Fields]:
    if _title(record) and _abstract(record):
        yield {"title": _title(record), "output": _abstract(record)}


def _keywords(record: dict[str, Any]) -> Iterator[Fields]:
    meta = record.get("meta") or {}
    words = meta.get("keywords") if isinstance(meta, dict) else None
    if words and _abstract(record):
        listed = words if isinstance(words, str) else ", ".join(map(str, words))
        yield {"abstract": _abstract(record), "output": listed}


def _passages(record: dict[str, Any]) -> Iterator[Fields]:
    for head, body in _sections(record):
        paragraphs = [part.strip() for part in body.split("\n\n") if part.strip()]
        if _title(record) and paragraphs and head.lower() != "abstract":
            yield {"title": _title(record), "head": head, "output": paragraphs[0]}


def _definitions(record: dict[str, Any]) -> Iterator[Fields]:
    for _, body in _sections(record):
        for sentence, term in _DEFINED.findall(" ".join(body.split())):
            yield {"term": term.strip(), "output": sentence.strip()}


def _captions(record: dict[str, Any]) -> Iterator[Fields]:
    for kind, inside in _FLOAT.findall(str(record.get("text", ""))):
        head, _, described = _MARKED.sub("", inside).partition("\n")
        if head.strip() and described.strip():
            yield {"kind": kind.lower(), "described": described.strip(), "output": head.strip()}


def _of(*names: str) -> Callable[[dict[str, Any]], Iterator[Fields]]:
    """The extractor of records that have these fields; the last is the answer."""

    def extract(record: dict[str, Any]) -> Iterator[Fields]:
        if all(isinstance(record.get(name), str) for name in names):
            yield {**{name: record[name].strip() for name in names}, "output": record[names[-1]].strip()}

    return extract


GENERATORS: dict[str, Generator] = {
    "title": Generator(
        (("Give a title to this abstract.", "{abstract}"), ("Which title suits this abstract?", "{abstract}")),
        _titles,
        lambda fields: 8 <= len(fields["output"]) <= 300,
    ),
    "abstract": Generator(
        (('Write an abstract for a paper called "{title}".', ""), ("Write the abstract of this paper.", "{title}")),
        _abstracts,
        lambda fields: len(fields["output"]) >= 100,
    ),
    "keywords": Generator(
        (("Give keywords for this abstract.", "{abstract}"), ("List the keywords of the paper.", "{abstract}")),
        _keywords,
    ),
    "passage": Generator(
        (
            ('What does the paper "{title}" say under "{head}"?', ""),
            ('Begin the section "{head}" of the paper "{title}".', ""),
        ),
        _passages,
        lambda fields: len(fields["output"]) >= 80,
    ),
    "definition": Generator(
        (("What is {term}?", ""), ("Explain the term {term}.", ""), ("Define {term}.", "")),
        _definitions,
        lambda fields: fields["term"].split()[0].lower() not in _PRONOUNS,
    ),
    "caption": Generator(
        (("Give a heading to the {kind} that is described here.", "{described}"),), _captions
    ),
    "entity_type": Generator(
        (("What kind of thing is {entity}?", ""), ("Give the type of this entity.", "{entity}")),
        _of("entity", "entity_type"),
    ),
    "relation": Generator(
        (("Complete the statement: {head} {relation} …", ""), ("{head} {relation} what?", "")),
        _of("head", "relation", "tail"),
    ),
    "qa": Generator((("{question}", ""),), _of("question", "answer")),
}  # fmt: skip


def make_rows(
    records: Iterable[dict[str, Any]],
    types: Iterable[str] | None = None,
    seed: int = 0,
    generators: dict[str, Generator] | None = None,
    counts: collections.Counter[tuple[str, str]] | None = None,
) -> Iterator[dict[str, str]]:
    """The rows that generators make from records, in the order of the records and of the generators' names.

    A row's template is a function of the seed, the type, and the row's fields, so it does not depend on other rows. A
    row that was made before is left out.

    Args:
        types: names of generators; None: all.
        counts: gets, by type, how many rows were "made" and how many dropped as "empty", "too long", "filtered" and
            "duplicate": found = made + dropped.

    Raises ValueError for a type that does not exist.
    """
    known = GENERATORS if generators is None else generators
    names = sorted(known if types is None else types)
    for name in names:
        if name not in known:
            raise ValueError(f"type {name!r} does not exist{nearest(name, list(known))}; there are {', '.join(known)}")
    tally = collections.Counter() if counts is None else counts
    seen: set[bytes] = set()
    for record in records:
        for name in names:
            for fields in known[name].extract(record):
                tally[name, "found"] += 1
                key = hashlib.sha256(json.dumps([seed, name, fields]).encode()).digest()
                instruction, given = random.Random(key).choice(known[name].templates)
                row = {"instruction": instruction.format(**fields), "input": given.format(**fields)}
                row["output"] = fields["output"]
                reason = _reason(row, fields, known[name], key, seen)
                tally[name, reason] += 1
                if reason == "made":
                    seen.add(key)
                    yield {**row, "type": name, "source": _source(record)}


def _reason(row: dict[str, str], fields: Fields, generator: Generator, key: bytes, seen: set[bytes]) -> str:
    if not row["output"].strip() or not all(value.strip() for value in fields.values()):
        return "empty"
    if max(map(len, row.values())) > LONGEST:
        return "too long"
    if not generator.keep(fields):
        return "filtered"
    return "duplicate" if key in seen else "made"


def _source(record: dict[str, Any]) -> str:
    """The source that a record names."""
    meta = record.get("meta") if isinstance(record.get("meta"), dict) else {}
    found = record.get("source") or next((meta[k] for k in ("source", "file", "id") if meta and meta.get(k)), "")
    return str(found)


def balanced(types: list[str], temperature: float, seed: int) -> list[int]:
    """As many row indices as there are rows, in which a type with n rows has a share ∝ n^temperature.

    A temperature of 1 changes only the order; 0 gives all types the same share. Within a type, rows are repeated
    equally often or once more; the seed decides which come once more. Shares are rounded by largest remainders (the
    earlier type wins a tie), so that the total is kept.
    """
    if not 0 <= temperature <= 1:
        raise ValueError(f"temperature={temperature!r}: must lie between 0 (equal shares) and 1 (as they are)")
    rows: dict[str, list[int]] = {}
    for index, kind in enumerate(types):
        rows.setdefault(kind, []).append(index)
    weights = {kind: len(some) ** temperature for kind, some in rows.items()}
    exact = {kind: len(types) * weight / sum(weights.values()) for kind, weight in weights.items()}
    wanted = {kind: int(value + 1e-9) for kind, value in exact.items()}
    by_remainder = sorted(rows, key=lambda kind: wanted[kind] - exact[kind])
    for kind in by_remainder[: len(types) - sum(wanted.values())]:
        wanted[kind] += 1
    chosen: list[int] = []
    for kind, some in rows.items():
        whole, rest = divmod(wanted[kind], len(some))
        chosen += some * whole + random.Random(f"{seed} {kind}").sample(some, rest)
    random.Random(seed).shuffle(chosen)
    return chosen

"""recipes/make_encoder_tasks.py: rows that say what they claim, and no held-out text in training."""

import itertools
import json
import lzma
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "recipes" / "make_encoder_tasks.py"


@pytest.fixture
def make(monkeypatch, tmp_path):
    def run(which, *words):
        folder = tmp_path / which
        monkeypatch.setattr(sys, "argv", ["make", which, *map(str, words), "-o", str(folder)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return [
            [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
            for name in ("train", "held-out")
        ]

    return run


def saved(path, rows):
    path.write_bytes(lzma.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def test_pairs_are_of_one_book_or_of_two_and_held_out_books_are_unseen(make, tmp_path):
    books = ["".join(f"{number}-{n:05} " for n in range(1000)) for number in range(10, 26)]
    train, held_out = make(
        "books", saved(tmp_path / "books.jsonl.xz", [{"text": book} for book in books]), "--rows", 60
    )
    assert len(train) == 60 and sum(row["label"] for row in train) == 30 and len(held_out) == 2000
    seen = []
    for rows in (train, held_out):
        found = set()
        for row in rows:
            inside = [next(i for i, book in enumerate(books) if row[name] in book) for name in ("text", "second")]
            assert (inside[0] == inside[1]) == row["label"] and len(row["text"]) == len(row["second"]) == 1000
            if row["label"]:
                places = [books[inside[0]].index(row[name]) for name in ("text", "second")]
                assert abs(places[0] - places[1]) >= 1000
            found |= set(inside)
        seen.append(found)
    assert seen[0].isdisjoint(seen[1]) and len(seen[1]) == 2


def article(name, number, lead=True):
    opening = f"{name}{number} is a place of which the text says {number} in its lead, and nothing more in all of it."
    body = "\n\n".join(f"{name}{number} has a paragraph {n} of words." for n in range(20))
    return {"title": f"{name}{number}", "text": f"{name}{number}\n\n" + (f"{opening}\n\n" if lead else "") + body}


@pytest.mark.parametrize("keep", [False, True])
def test_leads_are_asked_by_title_and_not_told(make, tmp_path, keep):
    train = saved(tmp_path / "train.jsonl.xz", [article("A", n) for n in range(8)])
    other = [article("B", n) for n in range(5)] + [article("A", 3), article("C", 0, lead=False)]
    words = [
        "--held-out",
        saved(tmp_path / "other.jsonl.xz", other),
        "--rows",
        30,
        "--shortest",
        1500,
        "--longest",
        4000,
    ]
    train, held_out = make("leads", train, *words, *["--keep-leads"] * keep)
    assert len(train) == 30 and sorted(row["title"] for row in held_out) == [f"B{n}" for n in range(5)]
    for row in train + held_out:
        title = row["title"]
        assert row["source"].startswith(f"Lead of: {title}\n\n") and len(row["source"]) <= 4000
        assert row["target"].startswith(f"{title} is a place") and "paragraph" not in row["target"]
        assert (row["target"] in row["source"]) == keep and (" is a place" in row["source"]) == keep
        articles = row["source"].removeprefix(f"Lead of: {title}\n\n")
        assert articles[row["before"] :].startswith(f"{title}\n") and f"{title} has a paragraph 0 of" in articles
    assert (
        min(len(row["source"]) for row in train) >= 1490
        and max(len(row["source"]) for row in train) > 2500
        and any(row["before"] > 0 for row in train)
    )


@pytest.mark.parametrize("glued", [False, True])
def test_answers_of_lookups_are_in_the_text(make, glued):
    rows = make("lookup", "--rows", 9, "--shortest", 40, "--longest", 96, *["--glued"] * glued)
    tables = runpy.run_path(str(SCRIPT))
    written = {part: part for part in map("".join, itertools.product("ABCDEFqrstuvwx", "ABCDEF0123456789"))}
    written |= {**tables["PAIRS"], **tables["ASKED"]} if glued else {}
    for row in [*rows[0], *rows[1][:40]]:
        for place, (question, digit, capital) in enumerate(zip(*[iter(row["target"])] * 3)):
            asked, pair = written[question + capital], written[capital + digit]
            assert row["source"].count(asked) == row["source"].count(pair) == 1
            assert row["distances"][place] == row["source"].index(asked) - row["source"].index(pair)
            others = [written[capital + other] for other in "0123" if other != digit] if glued else []
            behind = [row["source"].index(other) for other in others if other in row["source"]]
            assert not glued or (len(behind) == 1 and behind[0] > row["source"].index(asked))
            assert not glued or row["distances"][place] > 0
    assert {len(row["source"]) for row in rows[1]} == {96} and min(len(row["source"]) for row in rows[0]) < 96


def test_values_of_expressions_are_right(make):
    def value(tokens):
        head = tokens.pop(0)
        if head.isdigit():
            return int(head)
        values = []
        while tokens[0] != "]":
            values.append(value(tokens))
        tokens.pop(0)
        half = sorted(values)[(len(values) - 1) // 2], sorted(values)[len(values) // 2]
        return {"[MAX": max(values), "[MIN": min(values), "[SM": sum(values) % 10, "[MED": sum(half) // 2}[head]

    train, held_out = make("listops", "--rows", 50, "--depth", 3, "--longest", 60)
    assert all(value(row["text"].split()) == row["label"] for row in train + held_out)
    assert not {row["text"] for row in train} & {row["text"] for row in held_out}

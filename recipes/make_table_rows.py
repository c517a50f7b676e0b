"""Rows for the task table_to_text, from public data sets in their own formats, or made up. Ours, Apache-2.0.

    python recipes/make_table_rows.py demo runs/table_rows          # train.jsonl, held-out.jsonl, corpus.jsonl
    python recipes/make_table_rows.py e2e devset.csv rows.jsonl     # one row a table, with all its references
    python recipes/make_table_rows.py boxes train.box rows.jsonl    # with train.summary beside it (WikiBio's form)
    python recipes/make_table_rows.py fetaqa dev.jsonl rows.jsonl
    python recipes/make_table_rows.py numericnlg table_val.json rows.jsonl  # table_desc_val.json beside it
    python recipes/make_table_rows.py corpus rows.jsonl corpus.jsonl    # sentences of every second row's references
    python recipes/make_table_rows.py scigen dev.json rows.jsonl    # CC BY-NC-SA: for non-commercial use

Boxes lose what tokenising did to them: spaces before marks, and underscores in keys. FeTaQA's highlights are its marked
cells; the question is part of the caption. numericNLG names the headers that each sentence mentions: the description
is those sentences, highlights are the cells whose row and column are mentioned, or where there are none, row or column,
and background is the other sentences, and the paper's abstract where paper_val.json lies beside the tables. Of SciGen's
tables the cells that the description names are highlights, and it has no background.
"""

from __future__ import annotations

import csv
import itertools
import json
import lzma
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fathom.tables.text.linearize import sentences
from fathom.tables.text.metrics import mentioned

FIRST, LAST = ("Al", "Bo", "Cy", "Di", "Ed", "Fay", "Gus", "Hal", "Ivo", "Jo"), ("an", "is", "ton", "ley", "mond")
FOODS = ("Thai", "Greek", "Welsh", "Fijian", "Cuban", "Nepali")
PLACES = ("river", "castle", "market", "harbour", "station")
ENDS = ("It is loved by families.", "Guests give it {stars} stars.", "A meal is {price} pounds.")


def text_of(path: Path) -> str:
    """The text of a file, unpacked if it ends in .xz."""
    return lzma.open(path, "rt", encoding="utf-8").read() if path.suffix == ".xz" else path.read_text("utf-8")


def beside(path: Path, old: str, new: str) -> Path:
    return path.with_name(path.name.replace(old, new, 1))


def e2e(path: Path) -> Iterator[dict[str, Any]]:
    rows = list(csv.DictReader(text_of(path).splitlines()))
    for meaning, some in itertools.groupby(rows, key=lambda row: row["mr"]):
        slots = re.findall(r"([\w ]+)\[([^\]]*)\]", meaning)
        yield {"table": [[key.strip(), value] for key, value in slots], "references": [row["ref"] for row in some]}


def boxes(path: Path) -> Iterator[dict[str, Any]]:
    texts = text_of(beside(path, ".box", ".summary")).splitlines()
    for line, text in zip(text_of(path).splitlines(), texts, strict=True):
        slots: dict[str, list[str]] = {}
        for part in line.split("\t"):
            key, _, word = part.partition(":")
            if word != "<none>":
                slots.setdefault(re.sub(r"_\d+$", "", key).replace("_", " "), []).append(word)
        yield {"table": [[key, joined(" ".join(words))] for key, words in slots.items()], "text": joined(text)}


def joined(text: str) -> str:
    """A tokenised text with its marks where a writer puts them: "Bo 's pub ." → "Bo's pub."."""
    return re.sub(r" ([,.;:!?)]|'s\b|'re\b|'ll\b|n't\b)", r"\1", text).replace("( ", "(").replace(" - ", "-")


def fetaqa(path: Path) -> Iterator[dict[str, Any]]:
    for row in map(json.loads, text_of(path).splitlines()):
        header, *body = row["table_array"]
        cells = [row["table_array"][i][j] for i, j in row["highlighted_cell_ids"] if i < len(row["table_array"])]
        caption = f"{row['table_page_title']}: {row['table_section_title']}. {row['question']}"
        if body and all(len(line) == len(header) for line in body):
            more = {"page": row["table_page_title"], "question": row["question"]}
            yield {**grid(header, body, caption, cells, [], row["answer"]), **more}


def numericnlg(path: Path) -> Iterator[dict[str, Any]]:
    tables = {table["table_id_paper"]: table for table in json.loads(text_of(path))}
    papers = beside(path.with_suffix("") if path.suffix == ".xz" else path, "table_", "paper_")
    abstracts = (
        {paper["paper_id"]: sentences(paper["abstract"]) for paper in json.loads(text_of(papers))}
        if papers.is_file()
        else {}
    )
    for row in json.loads(text_of(beside(path, "table_", "table_desc_"))):
        table = tables[row["table_id_paper"]]
        names = [" ".join(name) for name in table["row_headers"]]
        header = ["", *(" ".join(name) for name in table["column_headers"])]
        body = [[name, *values] for name, values in zip(names, table["contents"], strict=True)]
        if any(len(line) != len(header) for line in body):
            continue
        told = [bool(some) for some in row["header_mention"]]
        said = {word for some in row["header_mention"] if some for word in some}
        sides = {
            (i, j): bool(said & set(name)) + bool(said & set(column))
            for i, name in enumerate(table["row_headers"])
            for j, column in enumerate(table["column_headers"])
        }
        cells = [body[i][j + 1] for (i, j), count in sides.items() if count and count == max(sides.values())]
        text, others = (
            [sentence for sentence, tells in zip(row["sentences"], told, strict=True) if tells == wanted]
            for wanted in (True, False)
        )
        if text:
            facts = [*others, *abstracts.get(table["paper_id"], [])]
            yield {**grid(header, body, table["caption"], cells, facts, " ".join(text)), "page": table["paper_id"]}


def scigen(path: Path) -> Iterator[dict[str, Any]]:
    for row in json.loads(text_of(path)).values():
        header, body = row["table_column_names"], row["table_content_values"]
        text = row["text"].replace("[CONTINUE]", " ").strip()
        body = [[cell.replace("[BOLD]", "").strip() for cell in line] for line in body]
        cells = [cell for line in body for cell in line[1:] if mentioned(cell, text)]
        if text and body and all(len(line) == len(header) for line in body):
            yield grid(header, body, row["table_caption"], cells, [], text)


def corpus(path: Path) -> Iterator[dict[str, Any]]:
    for line in text_of(path).splitlines()[::2]:
        row = json.loads(line)
        for text in row.get("references", [row.get("text")]):
            yield from ({"text": sentence} for sentence in sentences(text))


def grid(
    header: list[str], rows: list[list[str]], caption: str, cells: list[str], background: list[str], text: str
) -> dict[str, Any]:
    highlights = list(dict.fromkeys(cell for cell in cells if cell))
    found = {"header": header, "rows": rows, "caption": caption, "highlights": highlights, "background": background}
    return {**found, "text": text}


def demo(folder: Path) -> None:
    """Made-up restaurants: 400 to train on, 60 held out, and 300 sentences about others. No name is in two of them."""
    draw, names = (
        random.Random(0),
        [a + b + c for a in FIRST for b in LAST for c in ("", "'s Place", "'s Inn", " House")],
    )
    draw.shuffle(names)
    folder.mkdir(parents=True, exist_ok=True)
    for name, few, count in (
        ("train", names[:110], 400),
        ("held-out", names[110:140], 60),
        ("corpus", names[140:], 300),
    ):
        rows = []
        for _ in range(count):
            slots = {"name": draw.choice(few), "food": draw.choice(FOODS), "near": draw.choice(PLACES)}
            slots |= {"stars": str(draw.randint(1, 5)), "price": str(draw.randint(5, 30))}
            first = draw.choice(
                ("{name} serves {food} food near the {near}.", "Near the {near}, {name} serves {food} food.")
            )
            text = f"{first} {draw.choice(ENDS)}".format(**slots)
            kept = draw.sample(list(slots.items()), len(slots))
            rows.append({"text": text} if name == "corpus" else {"table": [list(slot) for slot in kept], "text": text})
        write(folder / f"{name}.jsonl", rows)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


KINDS = {"e2e": e2e, "boxes": boxes, "fetaqa": fetaqa, "numericnlg": numericnlg, "scigen": scigen, "corpus": corpus}

if __name__ == "__main__":
    kind, *paths = sys.argv[1:] or [""]
    if kind == "demo" and len(paths) == 1:
        demo(Path(paths[0]))
    elif kind in KINDS and len(paths) == 2:
        write(Path(paths[1]), list(KINDS[kind](Path(paths[0]))))
    else:
        raise SystemExit(__doc__)

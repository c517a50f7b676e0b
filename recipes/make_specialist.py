"""The data of the recipes specialist*.yaml: made-up facts, ours, Apache-2.0.

    python recipes/make_specialist.py runs/specialist

    general/prose.jsonl           pieces of the prose inside the package
    held-out/                     papers and prose that are in neither of the two
    corpus/papers.jsonl           short papers on minerals: to pretrain on, to make instructions of, to retrieve from
    tables/tables.jsonl           tables, arithmetic and the tools' descriptions as text
    minerals.csv, tools.py        a table, and the tools that a model may call: look_up and calculator
    rows/train.jsonl, held-out    instructions of the papers, facts of them asked without tools, and questions that
                                  tools answer, with their calls; told.jsonl and asked.jsonl: without calls, and with
    asked.jsonl                   all held-out questions; questions.jsonl: 40 of them, for `fathom evaluate --questions`
    questions/                    the same by kind: told in papers, untold there but in the table, sums

Hardnesses stand in the table alone, and no mineral and column of a held-out question is asked for in training: a right
answer needs the call, or, of what papers say, to have read them. `--papers N` writes N on each mineral.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from pathlib import Path
from typing import Any

from fathom.data import EMBEDDED, Source
from fathom.data.instructions import make_rows
from fathom.data.templates import TEMPLATES
from fathom.data.tokenizer import train_bpe
from fathom.tools import load_tools

MINERALS = (
    "quartz", "talc", "gypsum", "calcite", "fluorite", "apatite", "topaz", "corundum", "beryl", "garnet", "olivine",
    "augite", "biotite", "zircon", "pyrite", "galena", "halite", "barite", "rutile", "spinel", "kyanite", "jadeite",
    "opal", "borax", "cinnabar", "azurite", "malachite", "hematite", "magnetite", "graphite", "sulfur", "copper",
)  # fmt: skip
COLUMNS = {
    "hardness": [str(n / 2) for n in range(2, 20)],
    "colour": ["white", "green", "red", "blue", "black", "brown", "grey", "pink"],
    "lustre": ["glassy", "pearly", "silky", "dull", "waxy", "metallic"],
    "place": ["north", "south", "east", "west", "coast", "desert"],
}
PAPERS = 8  # on each mineral, and one that is held out; instructions are made of so many
PROSE = {"general": 300_000, "held-out": 30_000}  # characters
ASKED = ("What is the {column} of {row}?", "Tell me the {column} of {row}.", "{row}: what is its {column}?")
SUMS = ("What is {sum}?", "Compute {sum}.", "How much is {sum}?")
TOOLS = """\
from pathlib import Path

from fathom.tools.examples import calculator, table

TOOLS = [table(Path(__file__).with_name("minerals.csv")), calculator]
"""


def main(folder: Path, count: int = PAPERS) -> None:
    draw = random.Random(0)
    facts = {row: {column: draw.choice(values) for column, values in COLUMNS.items()} for row in MINERALS}
    for name in ("corpus", "tables", "general", "rows", "held-out", "questions"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    with (folder / "minerals.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([["mineral", *COLUMNS], *([row, *cells.values()] for row, cells in facts.items())])
    (folder / "tools.py").write_text(TOOLS, encoding="utf-8")
    tools = [tool.schema for tool in load_tools(folder / "tools.py").values()]
    papers = [paper(row, cells, draw) for row, cells in facts.items() for _ in range(count + 1)]
    write(folder / "held-out" / "papers.jsonl", papers[count :: count + 1])
    del papers[count :: count + 1]
    write(folder / "corpus" / "papers.jsonl", papers)
    asked = [lookup(row, column, facts, draw) for row in facts for column in COLUMNS for _ in ASKED]
    hidden = {pair for pair in ((row, column) for row in facts for column in COLUMNS) if draw.random() < 0.2}
    known = [one for one in asked if tuple(one["calls"][0]["arguments"].values()) not in hidden]
    unknown = [one for one in asked if tuple(one["calls"][0]["arguments"].values()) in hidden]
    sums = {total(draw): None for _ in range(1600)}
    known += [calculation(one, draw) for one in list(sums)[100:]]
    unknown += [calculation(one, draw) for one in list(sums)[:100]]
    of_papers = papers[:: max(1, count // PAPERS)]
    told = [{**row, "type": f"paper {row['type']}"} for row in make_rows(of_papers, ["definition", "title", "passage"])]
    told += [
        {"instruction": one.format(row=row, column=column), "input": "", "output": facts[row][column],
         "type": "paper fact", "source": f"paper on {row}"}
        for row in facts for column in COLUMNS if column != "hardness" and (row, column) not in hidden for one in ASKED
    ]  # fmt: skip
    parts = {"asked": [traced(one, tools) for one in known], "told": [plain(row) for row in told]}
    train = parts["asked"] + parts["told"]
    draw.shuffle(train)
    for name, some in parts.items():
        write(folder / "rows" / f"{name}.jsonl", some)
    draw.shuffle(unknown)
    write(folder / "rows" / "train.jsonl", train)
    write(folder / "rows" / "held-out.jsonl", [traced(one, tools) for one in unknown])
    write(folder / "asked.jsonl", unknown)
    write(folder / "questions.jsonl", unknown[:40])
    for kind in ("told", "untold", "sums"):
        write(folder / "questions" / f"{kind}.jsonl", [one for one in unknown if kind_of(one) == kind])
    write(folder / "tables" / "tables.jsonl", tables(facts, tools, draw))
    for name, argument in (("general", "data.train"), ("held-out", "data.validation")):
        book = next(Source(EMBEDDED, argument=argument).documents())
        pieces = [{"text": book[at : at + 3000]} for at in range(0, min(len(book), PROSE[name]), 3000)]
        write(folder / name / "prose.jsonl", pieces)
    print(f"{folder}: {len(papers)} papers, {len(train)} rows to train on, {len(unknown)} held out")


def paper(row: str, cells: dict[str, str], draw: random.Random) -> dict[str, Any]:
    """A paper on a mineral, with all that the table says but its hardness."""
    others = draw.sample([name for name in MINERALS if name != row], 3)
    told = [
        f"We describe {row} from the {cells['place']}.",
        f"It was found beside {others[0]} and {others[1]}.",
        f"Its colour was {cells['colour']} in all of the {draw.randint(5, 90)} samples.",
        f"In the {draw.choice(COLUMNS['place'])} there is {others[2]} in its stead.",
        f"Samples of {draw.choice(others)} lay near by, and were left where they were.",
    ]
    draw.shuffle(told)
    seen = [
        f"{row.capitalize()} is a {cells['lustre']} mineral of {cells['colour']} colour.",
        f"In the field it is taken for {others[2]} now and then, which has another lustre.",
        f"Of {draw.randint(5, 40)} pieces {draw.randint(2, 5)} were broken.",
        f"Who looks for {row} goes to the {cells['place']} first.",
    ]
    draw.shuffle(seen)
    title = draw.choice(("On the {row} of the {place}", "Finds of {row} in the {place}", "{row} and {other}: a survey"))
    title = title.format(row=row, other=others[0], place=cells["place"])
    text = f"# {title}\n\n## Abstract\n\n{' '.join(told[:4])}\n\n## Observations\n\n{' '.join(seen)}\n"
    return {"text": text, "meta": {"source": f"paper on {row}"}}


def kind_of(question: dict[str, Any]) -> str:
    if question["type"] == "calculator":
        return "sums"
    return "untold" if question["calls"][0]["arguments"]["column"] == "hardness" else "told"


def lookup(row: str, column: str, facts: dict[str, dict[str, str]], draw: random.Random) -> dict[str, Any]:
    call = {"name": "look_up", "arguments": {"row": row, "column": column}}
    return {
        "question": draw.choice(ASKED).format(row=row, column=column),
        "answer": facts[row][column],
        "calls": [call],
        "type": "look_up",
    }


def total(draw: random.Random) -> str:
    return f"{draw.randint(2, 99)} {draw.choice('+-*')} {draw.randint(2, 99)}"


def calculation(expression: str, draw: random.Random) -> dict[str, Any]:
    call = {"name": "calculator", "arguments": {"expression": expression}}
    answer = str(eval(expression))  # digits and one operator, made above
    return {
        "question": draw.choice(SUMS).format(sum=expression),
        "answer": answer,
        "calls": [call],
        "type": "calculator",
    }


def traced(one: dict[str, Any], tools: list[Any]) -> dict[str, Any]:
    """A question as messages: the call, what the tool returns, and the answer."""
    (call,) = one["calls"]
    messages = [
        {"role": "user", "content": one["question"]},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": call["name"], "content": one["answer"]},
        {"role": "assistant", "content": one["answer"]},
    ]
    return {"messages": messages, "tools": tools, "type": one["type"], "source": "table"}


def plain(row: dict[str, str]) -> dict[str, Any]:
    asked = f"{row['instruction']}\n\n{row['input']}".strip()
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    return {"messages": messages, "tools": None, "type": row["type"], "source": row["source"]}


def tables(facts: dict[str, dict[str, str]], tools: list[Any], draw: random.Random) -> list[dict[str, Any]]:
    """Texts of the third source: other minerals' rows as a table is written, sums, and what the tools can do."""
    words = train_bpe([], 257)
    words.chat_template = TEMPLATES["react"]
    described = words.apply_chat_template([{"role": "system", "content": "-"}], tools=tools, tokenize=False)
    found = [described.removesuffix("-\n\n")] * 8
    for _ in range(60):
        columns = draw.sample(sorted(COLUMNS), 2)
        listed = [f"| {row} | {facts[row]['colour']} | {facts[row]['place']} |" for row in draw.sample(MINERALS, 6)]
        found.append("\n".join(["| mineral | colour | place |", "|---|---|---|", *listed]))
        found.append("\n".join(called(draw.choice(MINERALS), columns[0], value) for value in COLUMNS[columns[0]][:6]))
        found.append("\n".join(f"{one} = {eval(one)}" for one in (total(draw) for _ in range(12))))
    draw.shuffle(found)
    return [{"text": text} for text in found]


def called(row: str, column: str, value: str) -> str:
    """A call as it is written, of a value that is not the table's."""
    given = json.dumps({"row": row, "column": column})
    return f"Action: look_up\nAction Input: {given}\nObservation: {value}\nFinal Answer: {value}"


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/specialist"))
    parser.add_argument("--papers", type=int, default=PAPERS)
    given = parser.parse_args()
    main(given.folder, given.papers)

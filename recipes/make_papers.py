"""Made-up papers on the minerals of a made-up moon, to curate and to train on. Ours, CC0, made from one seed.

    python recipes/make_papers.py runs/moon            # raw/ (TEI, notes), held-out.jsonl, quiz.jsonl; --papers 200

Papers are TEI as GROBID writes it: sections, citations, figures, tables, formulas. Among them is what a real folder
has: copies, near copies, another language, a scan misread, a file cut off, a question of the quiz word by word.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

BEGIN = ("ub", "kel", "mar", "tos", "vel", "dro", "fen", "gal", "hib", "jor")
MIDDLE = ("b", "or", "an", "il", "um")
ROCKS = ("basalt", "granite", "shale", "marble", "tuff", "gneiss")
COLOURS = ("red", "green", "blue", "white", "black", "brown", "yellow")
PLACES = ("the northern rim", "the southern basin", "the eastern ridge", "the western plain", "the central crater")
SECTIONS = ("Introduction", "Setting", "Samples", "Methods", "Results", "Discussion", "Comparison", "Conclusions")
VERBS = ("shows", "suggests", "confirms", "implies", "indicates")
THINGS = ("slow cooling", "rapid growth", "late water", "old impacts", "deep heat", "weak pressure", "thin crust")
REASONS = (
    "because the layers were never turned over", "although the samples are few", "as the earlier survey had found",
    "while the neighbouring rocks stayed cold", "since no younger grains were seen", "when the outer shell had formed",
)  # fmt: skip
GERMAN = "Die Proben wurden im Labor langsam erwärmt und danach mit den älteren Messungen verglichen. " * 12


def minerals(draw: random.Random) -> list[dict[str, str]]:
    names = [f"{a}{b}ite" for a in BEGIN for b in MIDDLE]
    return [
        {"name": name, "colour": draw.choice(COLOURS), "rock": draw.choice(ROCKS), "place": draw.choice(PLACES),
         "hardness": str(draw.randrange(1, 10)), "heat": str(draw.randrange(3, 19) * 50)} for name in names
    ]  # fmt: skip


def fact(draw: random.Random, stone: dict[str, str]) -> str:
    return draw.choice((
        "The mineral {name} is {colour} and has a hardness of {hardness}.", "In {place} {name} is found in {rock}.",
        "Crystals of {name} form at {heat} degrees, in {rock}.", "Grains of {name} are {colour} in fresh {rock}.",
        "The hardness of {name} is {hardness}, as scratches of {rock} show.", "Most {name} comes from {place}.",
    )).format(**stone)  # fmt: skip


def sentence(draw: random.Random, stones: list[dict[str, str]]) -> str:
    if draw.random() < 0.5:
        return fact(draw, draw.choice(stones))
    a, b = draw.sample(THINGS, 2)
    return (
        f"Layer {draw.randrange(1, 90)} of {draw.choice(PLACES)} {draw.choice(VERBS)} {a} rather than {b}, "
        f"{draw.choice(REASONS)}."
    )


def paragraph(draw: random.Random, stones: list[dict[str, str]], refs: int) -> str:
    said = [sentence(draw, stones) for _ in range(draw.randrange(4, 9))]
    cited = draw.randrange(refs)
    said[0] = said[0][:-1] + f' <ref type="bibr" target="#b{cited}">[{cited + 1}]</ref>.'
    if draw.random() < 0.3:
        number = draw.randrange(4)
        said[-1] += f' See <ref type="figure" target="#fig_{number}">Figure {number + 1}</ref>.'
    if draw.random() < 0.1:
        said[-1] += ' See <ref type="table" target="#tab_0">Table 1</ref>.'
    return f"<p>{' '.join(said)}</p>"


def paper(number: int, stones: list[dict[str, str]]) -> str:
    draw, refs = random.Random(f"paper {number}"), 24
    some = draw.sample(stones, 6)
    title = f"{some[0]['name'].capitalize()} and {some[1]['name']} of {draw.choice(PLACES)}: survey {number}"
    divs = []
    for order, name in enumerate(SECTIONS, start=1):
        body = "".join(paragraph(draw, some, refs) for _ in range(draw.randrange(3, 7)))
        formula = f"<formula>d = {draw.randrange(2, 9)} k t<label>({order})</label></formula>" if order % 3 == 0 else ""
        divs.append(f'<div><head n="{order}">{name}</head>{body}{formula}</div>')
    figures = "".join(
        f'<figure xml:id="fig_{n}"><head>Figure {n + 1}</head><figDesc>{sentence(draw, some)}</figDesc></figure>'
        for n in range(4)
    )
    rows = "".join(
        f"<row>{''.join(f'<cell>{cell}</cell>' for cell in (stone['name'], stone['hardness'], stone['heat']))}</row>"
        for stone in ({"name": "mineral", "hardness": "hardness", "heat": "degrees"}, *some)
    )
    bibliography = "".join(
        f'<biblStruct xml:id="b{n}"><analytic><title level="a">On {draw.choice(stones)["name"]} and '
        f"{draw.choice(THINGS)}</title><author><persName><surname>Reed</surname></persName></author></analytic></biblStruct>"
        for n in range(refs)
    )
    return (
        '<TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader><fileDesc><titleStmt>'
        f'<title level="a" type="main">{title}</title></titleStmt></fileDesc><profileDesc><abstract><div><p>'
        f"{' '.join(sentence(draw, some) for _ in range(5))}</p></div></abstract></profileDesc></teiHeader>\n"
        f'<text><body>{chr(10).join(divs)}{figures}<figure type="table" xml:id="tab_0"><head>Table 1</head>'
        f'<figDesc>Hardness and heat.</figDesc><table>{rows}</table></figure></body>\n<back><div type="references">'
        f"<listBibl>{bibliography}</listBibl></div></back></text></TEI>\n"
    )


def main(folder: Path, papers: int) -> None:
    draw = random.Random(0)
    stones = minerals(draw)
    raw = folder / "raw" / "papers"
    raw.mkdir(parents=True, exist_ok=True)
    for number in range(papers):
        (raw / f"paper_{number:05d}.tei.xml").write_text(paper(number, stones), encoding="utf-8")
    first = paper(0, stones)
    (raw / "copy.tei.xml").write_text(first, encoding="utf-8")
    (raw / "near.tei.xml").write_text(first.replace("survey 0", "a second survey"), encoding="utf-8")
    (raw / "cut.tei.xml").write_text(first[: len(first) // 2], encoding="utf-8")
    (raw / "german.tei.xml").write_text(
        first[: first.index("<body>")] + f"<body><p>{GERMAN}</p><p>{GERMAN}</p></body></text></TEI>", encoding="utf-8"
    )
    quiz = []
    for stone in stones:
        question = f"Which hardness and which colour has the mineral {stone['name']} that is found in {stone['place']}?"
        quiz.append(
            {"question": question, "answer": f"It is {stone['colour']} and its hardness is {stone['hardness']}."}
        )
    notes = []
    for number in range(papers):
        said = [sentence(draw, stones) for _ in range(12)]
        notes.append({"id": f"note {number}", "text": "\n".join(said)})
    notes.append({"id": "leak", "text": f"{notes[0]['text']}\n{quiz[0]['question']}\n{notes[1]['text']}"})
    misread = "".join(draw.choice("rnvwli1|") if c.isalpha() and draw.random() < 0.4 else c for c in notes[2]["text"])
    notes.append({"id": "scan", "text": misread})
    apart = random.Random("held out")
    held_out = [{"text": "\n".join(sentence(apart, stones) for _ in range(12))} for _ in range(60)]
    for name, rows in (("raw/notes", notes), ("quiz", quiz), ("held-out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{folder}: {papers + 4} papers, {len(notes)} notes, {len(quiz)} questions")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/moon"))
    parser.add_argument("--papers", type=int, default=200)
    arguments = parser.parse_args()
    main(arguments.folder, arguments.papers)

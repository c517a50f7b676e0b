"""Instruction rows: what generators find in documents and records, and types balanced by temperature."""

from __future__ import annotations

import collections
import json

import pytest

from fathom.data.instructions import GENERATORS, Generator, balanced, make_rows
from tiny_checkpoint import run_cli

PAPER = {
    "text": (
        "# Lava flows of the north\n\n## Abstract\n\nWe map lava flows. " + "They are dark and young. " * 5 + "\n\n"
        "## Rocks\n\nBasalt is a dark volcanic rock with little silica. It is a common rock of the sea floor too. "
        "[START_REF]Old paper[END_REF]\n\n"
        "[START_FIGURE]\nMap of flows\n\nFlows in red, faults in blue.\n\n[END_FIGURE]\n\n"
        "### 2.1 Ages\n\nYoung.\n"
    ),
    "meta": {"file": "a.tei.xml", "keywords": ["lava", "basalt"]},
}
RECORDS = [
    PAPER,
    {"entity": "quartz", "entity_type": "mineral", "source": "taxonomy"},
    {"head": "quartz", "relation": "is part of", "tail": "granite"},
    {"question": "How hard is talc?", "answer": "1"},
    {"question": "How hard is talc?", "answer": "1"},
    {"question": "Empty?", "answer": " "},
    {"text": "no markup"},
]


def test_rows_of_documents_and_records():
    counts = collections.Counter()
    rows = list(make_rows(RECORDS, counts=counts))
    found = {row["type"]: row for row in rows}
    assert set(found) == set(GENERATORS) and len(rows) == len(found)
    assert found["title"]["output"] == "Lava flows of the north" and found["title"]["input"].startswith("We map lava")
    assert found["keywords"]["output"] == "lava, basalt"
    assert found["definition"]["output"] == "Basalt is a dark volcanic rock with little silica."
    assert "Basalt" in found["definition"]["instruction"]
    assert found["caption"]["output"] == "Map of flows" and found["caption"]["input"] == "Flows in red, faults in blue."
    assert found["passage"]["output"].endswith("sea floor too. Old paper")  # of markers the text is kept
    assert found["entity_type"]["output"] == "mineral" and found["relation"]["output"] == "granite"
    assert {found[name]["source"] for name in ("title", "entity_type", "qa")} == {"a.tei.xml", "taxonomy", ""}
    by_reason = {(name, what): n for (name, what), n in counts.items() if what not in ("made", "found")}
    assert by_reason == {("qa", "duplicate"): 1, ("qa", "empty"): 1, ("passage", "filtered"): 1}
    for name in GENERATORS:  # found = made + dropped
        assert counts[name, "found"] == sum(n for (kind, what), n in counts.items() if kind == name and what != "found")


def test_a_row_depends_on_its_record_alone():
    rows = {row["type"]: row for row in make_rows(RECORDS)}
    assert {row["type"]: row for row in make_rows(RECORDS[::-1])} == rows
    texts = {json.dumps(row) for seed in range(8) for row in make_rows([PAPER], ["title"], seed)}
    assert len(texts) == 2  # both templates are drawn


def test_generators_of_the_caller():
    mine = {"shout": Generator((("Shout {text}", ""),), lambda record: iter([{"text": record["text"], "output": "A"}]))}
    assert next(make_rows([{"text": "a"}], generators=mine))["instruction"] == "Shout a"
    with pytest.raises(ValueError, match=r"type 'titel' does not exist \(did you mean 'title'\?\); there are title,"):
        list(make_rows([], ["titel"]))


@pytest.mark.parametrize("temperature", [0, 0.5, 1])
def test_types_are_balanced_by_temperature(temperature):
    sizes = {"a": 100, "b": 16, "c": 4}
    types = [kind for kind, n in sizes.items() for _ in range(n)]
    chosen = balanced(types, temperature, seed=3)
    shares = collections.Counter(types[index] for index in chosen)
    total = sum(n**temperature for n in sizes.values())
    assert sum(shares.values()) == 120
    for kind, n in sizes.items():
        assert abs(shares[kind] - 120 * n**temperature / total) < 1
        often = collections.Counter(index for index in chosen if types[index] == kind)
        counts = {often[index] for index, other in enumerate(types) if other == kind}
        assert max(counts) - min(counts) <= 1  # every row of a type equally often
    assert chosen == balanced(types, temperature, seed=3) != balanced(types, temperature, seed=4)
    if temperature == 1:
        assert sorted(chosen) == list(range(120))


def test_a_temperature_out_of_range_is_refused():
    with pytest.raises(ValueError, match="temperature=2: must lie between 0"):
        balanced(["a"], 2, 0)


def test_the_command(monkeypatch, capsys, tmp_path):
    file = tmp_path / "corpus.jsonl"
    papers = [
        {**PAPER, "text": PAPER["text"].replace("north", f"north {i}").replace("map", f"map {i}")} for i in range(20)
    ]
    file.write_text("".join(json.dumps(paper) + "\n" for paper in papers))
    run = lambda *options: run_cli(monkeypatch, capsys, "instruct", file, "-o", tmp_path / "rows", *options)  # noqa: E731
    code, out, _ = run("--types", "title,definition,qa", "--held-out", 0.3, "--json")
    found = json.loads(out)
    rows = {n: (tmp_path / "rows" / f"{n}.jsonl").read_text().splitlines() for n in ("train", "held-out")}
    assert code == 0 and (found["train"], found["held_out"]) == tuple(map(len, rows.values())) and found["held_out"] > 0
    assert found["types"]["title"] == {"found": 20, "made": 20}
    assert found["types"]["definition"] == {"duplicate": 19, "found": 20, "made": 1}
    assert found["types"]["qa"] == {}  # asked for and not found: said, and 0 rows in the table
    titles = {n: {json.loads(row)["output"] for row in some} for n, some in rows.items()}
    assert not titles["train"] & titles["held-out"]
    code, _, err = run()
    assert code == 2 and "rows: holds rows already; name another folder" in err
    code, _, err = run_cli(monkeypatch, capsys, "instruct", file, "-o", tmp_path / "none", "--types", "qa")
    assert code == 2 and "no row could be made of it" in err

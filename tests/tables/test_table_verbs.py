"""`fathom table`: ask, score, show; and dialogues, files and databases that are not there."""

from __future__ import annotations

import gzip
import importlib.util
import json
import lzma
from pathlib import Path

import pytest
import small_databases
import torch

from fathom import FathomT5Config, FathomT5ForConditionalGeneration
from fathom.data import DataConfig
from fathom.tables.source import answer_text
from fathom.tasks.text_to_sql import TextToSQL
from tiny_checkpoint import run_cli

QUERIES = ["SELECT name FROM town", "SELECT count(*) FROM person", "SELECT fullName FROM person WHERE age > 31"]


@pytest.fixture
def run(monkeypatch, capsys):
    return lambda *arguments: run_cli(monkeypatch, capsys, "table", *arguments)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny RASAT that has learned one answer by heart."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), small_databases.tokenizer()
    torch.manual_seed(0)
    config = FathomT5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=16, d_ff=48, num_layers=1, num_decoder_layers=1, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0, eos_token_id=0, pad_token_id=0,
        relations={"name": "rasat", "init": "small"}, source={"tokens": 200, "values": True, "links": True},
    )  # fmt: skip
    model = FathomT5ForConditionalGeneration(config)
    labels = torch.tensor([[*tokenizer(answer_text(QUERIES[0], "county"))["input_ids"], 0]])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(40):
        model(input_ids=torch.full((1, 3), 5), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_ask_prints_the_query_and_its_rows(run, checkpoint, tmp_path):
    path = small_databases.make(tmp_path)
    code, out, _ = run("ask", checkpoint, "What is the name of every town?", "--db", path, "--beams", 2)
    assert code == 0 and out.splitlines() == ["select name from town", "name", "Upper Brome", "Lind"]
    out = run("ask", checkpoint, "Every name?", "--db", path, "--before", "Which towns?", "--no-picard", "--json")[1]
    assert json.loads(out)["rows"] == [["Upper Brome"], ["Lind"]]
    code, _, error = run("ask", checkpoint, "What?", "--db", tmp_path / "none.sqlite")
    assert code == 2 and "none.sqlite: no such database file" in error
    code, _, error = run("ask", checkpoint, "name " * 300, "--db", path)
    assert code == 2 and "ask it more briefly" in error


def test_ask_says_which_names_picard_cannot_write(run, checkpoint, tmp_path):
    script = small_databases.SCRIPT + 'ALTER TABLE town ADD COLUMN "down hill" TEXT;'
    path = small_databases.make(tmp_path, "county", script)
    said = ["ask", checkpoint, "What is the name of every town?", "--db", path]
    code, out, error = run(*said)
    assert code == 0 and "Upper Brome" in out
    assert "No query could name town.down hill: PICARD's grammar has no quoted names; use --no-picard." in error
    assert "No query" not in run(*said, "--no-picard")[2]


def test_show_draws_relations_and_attention(run, checkpoint, tmp_path):
    path = small_databases.make(tmp_path)
    code, out, _ = run(
        "show", checkpoint, "What is the name of every town?", "--db", path, "-o", tmp_path / "a.png", "--json"
    )
    said = json.loads(out)
    assert code == 0 and (tmp_path / "a.png").stat().st_size > 10_000
    assert said["words"][3] == "name" and said["schema"][:3] == ["county", "town", "town_id"]
    assert said["matches"]["exact"] == 2 and sum(said["matches"].values()) == 8 * 15


def test_score_judges_anybodys_predictions(run, tmp_path):
    small_databases.make(tmp_path)
    (tmp_path / "gold.sql").write_text("".join(f"{query}\tcounty\n" for query in QUERIES))
    said = ["select name from town", "SELECT max(age) FROM person", "select fullname from person where age > 40"]
    (tmp_path / "said.txt").write_text("\n".join(said))
    code, out, _ = run("score", tmp_path / "gold.sql", tmp_path / "said.txt", "--db", tmp_path, "--json")
    found = json.loads(out)
    assert code == 0 and found["exact"] == pytest.approx(2 / 3)  # values do not count
    assert found["execution"] == pytest.approx(2 / 3) and found["runs"] == 1
    assert "interaction_exact" not in found and found["by_hardness"]["easy"]["questions"] == 3
    # a suite tells ages above 31 and above 40 apart
    out = run("score", tmp_path / "gold.sql", tmp_path / "said.txt", "--db", tmp_path, "--suites", 4, "--json")[1]
    assert json.loads(out)["execution"] == pytest.approx(1 / 3)
    shown = run("score", tmp_path / "gold.sql", tmp_path / "said.txt", "--db", tmp_path)[1]
    assert "exact                   0.667 of 3" in shown and "interaction" not in shown
    (tmp_path / "few.txt").write_text(said[0])
    code, _, error = run("score", tmp_path / "gold.sql", tmp_path / "few.txt", "--db", tmp_path)
    assert code == 2 and "has 1 queries" in error and "has 3; give one for each" in error
    (tmp_path / "bad.sql").write_text("SELECT 1\n")
    assert (
        "must be a query, a tab and the name"
        in run("score", tmp_path / "bad.sql", tmp_path / "few.txt", "--db", tmp_path)[2]
    )
    (tmp_path / "other.sql").write_text("SELECT name FROM town\tcountry\n")
    error = run("score", tmp_path / "other.sql", tmp_path / "few.txt", "--db", tmp_path)[2]
    assert "database 'country' is not there (did you mean 'county'?)" in error


def test_gold_against_itself_is_right_and_the_last_dialogue_counts(run, tmp_path):
    small_databases.make(tmp_path)
    lines = [f"{query}\tcounty" for query in QUERIES]
    (tmp_path / "gold.sql").write_text("\n".join([lines[0], lines[1], "", lines[2]]))
    (tmp_path / "said.txt").write_text("\n".join(QUERIES))
    found = json.loads(run("score", tmp_path / "gold.sql", tmp_path / "said.txt", "--db", tmp_path, "--json")[1])
    assert all(found[name] == 1 for name in ("exact", "execution", "interaction_exact", "interaction_execution"))
    wrong = [QUERIES[0], QUERIES[1], QUERIES[0]]
    (tmp_path / "said.txt").write_text("\n".join(wrong))
    found = json.loads(run("score", tmp_path / "gold.sql", tmp_path / "said.txt", "--db", tmp_path, "--json")[1])
    assert found["interaction_exact"] == found["interaction_execution"] == 0.5
    rows = [{"db_id": "county", "interaction": [{"utterance": "a", "query": q} for q in QUERIES[:2]]}]
    rows.append({"db_id": "county", "query": QUERIES[2]})
    (tmp_path / "gold.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "said.jsonl").write_text("".join(json.dumps({"query": query}) + "\n" for query in wrong))
    again = json.loads(run("score", tmp_path / "gold.jsonl", tmp_path / "said.jsonl", "--db", tmp_path, "--json")[1])
    assert again == found


def test_published_sets_are_read_as_they_come_and_parts_are_told_apart(run, tmp_path):
    """A packed JSON list of two databases, of which one has a file; as Spider-Syn's and Spider-DK's are."""
    files = tmp_path / "files"
    files.mkdir()
    small_databases.make(files)
    entry = {
        "db_id": "shop", "table_names_original": ["item"], "table_names": ["item"], "primary_keys": [1],
        "column_names_original": [[-1, "*"], [0, "id"], [0, "name"]], "foreign_keys": [],
        "column_names": [[-1, "*"], [0, "id"], [0, "name"]], "column_types": ["text", "number", "text"],
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps([entry]))
    (tmp_path / "b.json").write_text(json.dumps([{**entry, "db_id": "other"}]))
    rows = [{"db_id": "county", "query": query, "SpiderSynQuestion": "?"} for query in QUERIES]
    rows.append({"db_id": "shop", "query": "SELECT name FROM item"})
    gold, said = tmp_path / "gold.json.xz", tmp_path / "said.json"
    gold.write_bytes(lzma.compress(json.dumps(rows).encode()))
    said.write_text(json.dumps([*rows[:2], rows[0], {"query": "SELECT name FROM item"}]))
    given = ("score", gold, said, "--db", files, "--schemas", tmp_path / "b.json", "--schemas", tmp_path / "a.json")
    found = json.loads(run(*given, "--suites", 1, "--json")[1])
    assert (found["exact"], found["execution"], found["runs"]) == (0.75, 0.75, 1)
    assert {name: part["questions"] for name, part in found["by_rows"].items()} == {"the file's": 3, "made up": 1}
    assert (
        found["by_rows"]["the file's"]["execution"] == found["by_database"]["county"]["exact"] == pytest.approx(2 / 3)
    )
    shown = run(*given, "--suites", 1)[1]
    assert "  made up rows               1 questions  exact 1.000  execution 1.000" in shown
    assert "  rows of file and suite     3 questions" in shown and "the file's rows" not in shown
    assert "  the file's rows            3 questions" in run(*given)[1]
    assert json.loads(run(*given, "--json")[1])["by_rows"]["none"]["execution"] is None  # no file, no suite
    packed = tmp_path / "b.json.gz"
    packed.write_bytes(gzip.compress((tmp_path / "b.json").read_bytes()))
    assert json.loads(run(*given[:6], packed, *given[7:], "--json")[1]) == json.loads(run(*given, "--json")[1])
    kept = json.loads(run(*given, "--suites", 1, "--without", "county", "--json")[1])
    assert kept["questions"] == kept["exact"] == kept["execution"] == 1 and list(kept["by_database"]) == ["shop"]
    code, _, error = run(*given, "--without", "shops")
    assert code == 2 and "--without shops:" in error and "has no such database (did you mean 'shop'?)" in error
    assert "leaves no question" in run(*given, "--without", "shop", "--without", "county")[2]
    other = {**entry, "column_types": ["text", "text", "text"]}
    for faulty, match in (
        ([other], "c.json: describes 'shop' otherwise than a file of schemas before it; name one"),
        ([{**entry, "primary_keys": [3]}], "not a list of schemas as in Spider's tables.json"),
        ([{**entry, "column_names_original": [[-1, "*"], [1, "id"], [0, "name"]]}], "that there is not"),
        ([{**entry, "column_names_original": [[-1, "*"], [0, "id"], [0, "ID"]]}], "shop: has 'id' twice"),
        ([{**entry, "column_types": []}], "not a list of schemas"),
    ):
        (tmp_path / "c.json").write_text(json.dumps(faulty))
        code, _, error = run(*given, "--schemas", tmp_path / "c.json")
        assert code == 2 and match in error and len(error.splitlines()) == 1
    for name, text, match in (
        ("bad.json", "{}", "must be a list of objects"), ("bad.json", "[1]", "bad.json, row 0: must be an object"),
        ("bad.json", '{"a": 1}\n{"a": 2}', "rows one a line belong in a file named .jsonl"),
        ("bad.json.xz", "no archive", "damaged or truncated .xz file"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
        code, _, error = run("score", gold, tmp_path / name, "--db", files)
        assert code == 2 and match in error and len(error.splitlines()) == 1


def test_a_view_has_no_made_up_rows_and_is_judged_on_the_files(run, tmp_path):
    """Else right predictions would be undecided, and wrong ones counted. The file is one of SParC's, by its field."""
    view = "CREATE VIEW old AS SELECT * FROM person WHERE age > 35;"
    small_databases.make(tmp_path, "county", small_databases.SCRIPT + view)
    queries = ["SELECT fullName FROM old", "SELECT fullName FROM person WHERE age > 31"]
    turns = [{"utterance": "?", "query": query} for query in queries]
    final = {"utterance": "?", "query": queries[0]}
    (tmp_path / "gold.json").write_text(json.dumps([{"database_id": "county", "interaction": turns, "final": final}]))
    for said, right in ((queries, 1), (["SELECT max(age) FROM old", queries[0]], 0)):
        (tmp_path / "said.txt").write_text("\n".join(said))
        given = ("score", tmp_path / "gold.json", tmp_path / "said.txt", "--db", tmp_path, "--suites", 2, "--json")
        found = json.loads(run(*given)[1])
        assert (found["execution"], found["execution_of"], found["runs"]) == (right, 2, 1), said


def test_evaluation_sets_become_rows_and_folds_part_databases(run, tmp_path, monkeypatch, capsys):
    data, out, found = tmp_path / "data", tmp_path / "out", {}
    dialogue = {"interaction": [{"utterance": "a", "query": QUERIES[0]}]}
    sets = {
        "spider/tables.json": [{"db_id": "a"}], "spider-variants/spider_dk_new_tables.json": [{"db_id": "b"}],
        "spider/train_spider.jsonl": [{"db_id": "a", "question": "?", "query": "q", "more": 1}],
        "spider-variants/spider_syn_dev.json": [
            {"db_id": "a", "SpiderQuestion": "plain", "SpiderSynQuestion": "other words", "query": "q"}
        ],
        "sparc/dev.jsonl": [{"db_id": name, **dialogue} for name in "aaabbcdefg"],
    }  # fmt: skip
    for name, rows in sets.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        text = "\n".join(map(json.dumps, rows)) if name.endswith("l") else json.dumps(rows)
        (data / f"{name}.xz").write_bytes(lzma.compress(text.encode()))
    (data / "databases").mkdir()
    small_databases.make(data / "databases")
    path = Path(__file__).parents[2] / "recipes" / "make_text2sql.py"
    spec = importlib.util.spec_from_file_location("make_text2sql", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("sys.argv", ["make_text2sql.py", str(data), str(out)])
    module.main()
    assert json.loads((out / "syn.jsonl").read_text())["question"] == "other words"
    assert [entry["db_id"] for entry in json.loads((out / "tables.json").read_text())] == ["a", "b"]
    assert (out / "databases" / "county.sqlite").is_file() and not (out / "dk.jsonl").exists()
    for number in range(5):
        parts = [
            [json.loads(line) for line in (out / "sparc" / f"fold-{number}" / f"{part}.jsonl").open()]
            for part in ("train", "held-out")
        ]
        assert parts[0][0]["question"] == "?" and len(parts[0]) + len(parts[1]) == 11
        held = {row["db_id"] for row in parts[1]}
        assert held.isdisjoint(row["db_id"] for row in parts[0][1:]) and found.keys().isdisjoint(held)
        found.update(dict.fromkeys(held, len(parts[1])))
    assert set(found) == set("abcdefg") and max(found.values()) == 3
    small_databases.make(tmp_path)
    held = tmp_path / "held.jsonl"  # a fold's rows are gold queries
    held.write_text(json.dumps({"db_id": "county", **dialogue}))
    (tmp_path / "said.txt").write_text(QUERIES[0])
    assert json.loads(run("score", held, tmp_path / "said.txt", "--db", tmp_path, "--json")[1])["exact"] == 1


def test_predictions_stay_beside_their_questions(run, tmp_path):
    """An empty prediction, a BOM, Windows line ends, and line ends of Unicode within a text."""
    small_databases.make(tmp_path)
    gold, said = tmp_path / "gold.sql", tmp_path / "said.txt"
    queries = [QUERIES[0], "SELECT name FROM town WHERE name != 'a\u2028b'", QUERIES[1]]
    gold.write_text("".join(f"{query}\tcounty\n" for query in queries), encoding="utf-8-sig", newline="\r\n")
    said.write_text("\n".join([queries[0], "", queries[2]]), encoding="utf-8-sig")
    found = json.loads(run("score", gold, said, "--db", tmp_path, "--json")[1])
    assert found["exact"] == found["execution"] == found["runs"] == pytest.approx(2 / 3)
    said.write_text("\n".join(queries), encoding="utf-8")
    assert json.loads(run("score", gold, said, "--db", tmp_path, "--json")[1])["execution"] == 1
    rows = [json.dumps({"query": query, "db_id": "county"}, ensure_ascii=False) for query in queries]
    (tmp_path / "gold.jsonl").write_text("\n".join(rows), encoding="utf-8")
    found = json.loads(run("score", tmp_path / "gold.jsonl", tmp_path / "gold.jsonl", "--db", tmp_path, "--json")[1])
    assert found["exact"] == found["execution"] == 1 and found["questions"] == 3


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.jsonl", '{"query": "x"}\n{"queri": "x"}', "line 2: no text in field 'query' (found: queri)"),
        ("a.jsonl", '{"query": null}', "line 1: no text in field 'query'"),
        ("a.jsonl", "\n[1]", "line 2: must be an object"),
        ("a.jsonl", "{", "line 1: is no JSON"),
        ("a.txt", "select 1\n", "has 1 queries, and"),
        ("a.txt", b"select \xff", "is no UTF-8"),
    ],
)
def test_files_of_predictions_that_say_nothing_are_refused(run, tmp_path, name, text, match):
    small_databases.make(tmp_path)
    (tmp_path / "gold.sql").write_text("".join(f"{query}\tcounty\n" for query in QUERIES))
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    code, _, error = run("score", tmp_path / "gold.sql", tmp_path / name, "--db", tmp_path)
    assert code == 2 and match in error and len(error.splitlines()) == 1
    (tmp_path / "gold.jsonl").write_text('{"db_id": "county", "interaction": ["a"]}')
    error = run("score", tmp_path / "gold.jsonl", tmp_path / name, "--db", tmp_path)[2]
    assert "'interaction' must be a list of turns" in error


def test_a_model_that_learns_on_says_what_its_sources_are_now(checkpoint):
    """So that it is asked in the form that it has learned last."""
    task = TextToSQL(databases="x", values=False)
    config = task.model_config(
        {"checkpoint": str(checkpoint)}, DataConfig(train="x.jsonl", block_size=96, tokenizer=str(checkpoint)), None
    )
    assert config.source == {"tokens": 96, "values": False, "links": True}

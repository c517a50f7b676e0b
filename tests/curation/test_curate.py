"""`fathom curate` from end to end: the account adds up, a killed run goes on to the same bytes, errors say where."""

import gzip
import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from raw_texts import TEI, prose

from fathom.curation import Curation, curate, run
from fathom.curation.read import Unreadable, documents, shards
from fathom.data.sources import Source
from tiny_checkpoint import run_cli

GERMAN = "Der Fluss floss langsam über die alten Steine, während warmer Regen auf das stille Tal fiel. " * 5
QUESTION = "Which of the following minerals forms the hard outer layer of the made-up moon called Ubbo?"


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    """Papers, rows and texts, with a specimen of everything that is dropped."""
    folder = tmp_path_factory.mktemp("in") / "raw"
    (folder / "papers").mkdir(parents=True)
    (folder / "papers" / "good.tei.xml").write_text(TEI.replace("Plates move", f"Plates move {prose(0, 300)}"))
    (folder / "papers" / "untitled.tei.xml").write_text(re.sub("<title .*?</title>", "", TEI, flags=re.DOTALL))
    (folder / "papers" / "broken.tei.xml").write_text(TEI.replace("</abstract>", ""))
    (folder / "papers" / "empty.tei.xml").write_text("<TEI><text><body/></text></TEI>")
    rows = [{"text": prose(seed), "id": seed} for seed in range(1, 30)]
    rows += [{"text": GERMAN}, {"text": prose(3)}, {"text": prose(4, 119)}, {"text": ""}, {"text": None}]
    rows += [
        {"text": f"{prose(50)} {QUESTION}"},
        {"text": "Journal of Mud\n\n12\n"},
        {"text": "short but english words"},
    ]
    lines = [json.dumps(row) for row in rows]
    lines.insert(10, '{"text": "cut off')
    lines.insert(12, '{"text": "half a pair \\ud800"}')
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    with gzip.open(folder / "more.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": f"{prose(60)}\n7\n{prose(61)}", "id": "m"}) + "\n")
    (folder / "note.txt").write_text(prose(70))
    (folder / "latin.txt").write_bytes(prose(71).encode() + b"\nna\xefve")
    (folder / "quiz.ignored").write_text("not read")
    (folder.parent / "quiz.jsonl").write_text(json.dumps({"question": QUESTION}) + "\n")
    return folder


def config(raw: Path, **options) -> Curation:
    fields = {"benchmarks": {"quiz": str(raw.parent / "quiz.jsonl")}, "shard_bytes": 4000, "max_duplicate_lines": None}
    return Curation(**(fields | options))


@pytest.fixture(scope="module")
def made(raw, tmp_path_factory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("out") / "corpus"
    return curate(raw, folder, config(raw), workers=1), folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*.jsonl")}


def test_the_account_adds_up_and_names_every_reason(made, raw):
    account, folder = made
    assert account["dropped"] == {
        "reading": {"malformed": 4, "no text": 3},
        "language": {"language": 2},  # and two words of a running head
        "parse": {"no title": 1},
        "quality": {"too short": 1},
        "decontamination": {"benchmark": 1},
        "duplicates": {"equal text": 1, "near duplicate": 1},
    }
    assert list(account["dropped"])[:5] == ["reading", "language", "parse", "quality", "decontamination"]
    dropped = sum(sum(reasons.values()) for reasons in account["dropped"].values())
    assert account["documents"] == account["kept"] + dropped == 4 + 39 + 1 + 2
    kept = [row for row, _ in Source(str(folder / "corpus")).rows()]
    assert len(kept) == account["kept"] and all(set(row) == {"text", "meta"} for row in kept)
    assert sum(len(row["text"]) for row in kept) == account["kept_characters"]
    lost = [row for row, _ in Source(str(folder / "dropped")).rows()]
    assert len(lost) == dropped and all(row["reason"] and row["id"] for row in lost)
    lines = [row for row, _ in Source(str(folder / "lines")).rows()]
    assert [(row["id"], row["line"], row["rule"], row["text"]) for row in lines if "more" in row["id"]] == [
        ("more.jsonl.gz, row 1", 13, "page numbers", "7")
    ]
    taken = sum(account["lines_taken"].values())
    assert account["lines"] == account["kept_lines"] + taken + account["lines_of_dropped"] and taken == len(lines)
    assert sum(account["kept_lengths"].values()) == account["kept"]
    assert sum(account["dropped_lengths"].values()) == dropped


def test_where_things_were_is_said(made, raw):
    _, folder = made
    details = {row["id"]: row["detail"] for row, _ in Source(str(folder / "dropped")).rows()}
    assert details["papers/broken.tei.xml"].startswith(
        "papers/broken.tei.xml, line 5: malformed TEI (Opening and ending"
    )
    assert details["rows.jsonl, line 11"].startswith("rows.jsonl, line 11: not JSON")
    assert "no text" in details["rows.jsonl, line 13"]
    assert "latin.txt: not UTF-8 at byte" in details["latin.txt"]
    assert (
        details["rows.jsonl, line 34"] == "of rows.jsonl, line 4, 0.98 alike"
        or "alike" in details["rows.jsonl, line 34"]
    )
    assert any(detail.startswith("quiz: ") and "minerals" in detail for detail in details.values())
    kept = {row["meta"]["id"]: row["meta"] for row, _ in Source(str(folder / "corpus")).rows()}
    assert kept["rows.jsonl, line 1"]["row"] == {"id": 1} and kept["rows.jsonl, line 1"]["language"] == "en"
    assert kept["papers/good.tei.xml"]["title"] == "On the drift of made-up plates"
    page = (folder / "report.html").read_text()
    for said in ("decontamination: benchmark", "malformed TEI", "page numbers", ">de<", "near duplicate", "minerals"):
        assert said in page
    assert "http" not in page.replace("http-equiv", "")


def test_neither_processes_nor_a_stop_change_a_byte(made, raw, tmp_path):
    """Killed with its children in the middle of a shard; then finished by two processes."""
    _, folder = made
    out = tmp_path / "again"

    def slowly():
        os.setsid()
        passes = run._passes
        run._passes = lambda *given: (time.sleep(0.02), passes(*given))[1]
        curate(raw, out, config(raw), workers=2)

    process = multiprocessing.get_context("fork").Process(target=slowly)
    process.start()
    until = time.monotonic() + 120
    while len(list(out.glob("work/sift/completions/*"))) < 2 and process.is_alive():
        assert time.monotonic() < until
        time.sleep(0.02)
    assert process.is_alive()
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert not (out / "account.json").exists()
    done = len(list(out.glob("work/sift/completions/*")))
    assert 0 < done < len(shards(raw, 4000))
    account = curate(raw, out, config(raw), workers=2)
    assert contents(out) == contents(folder) and not (out / "work").exists()
    ours = {key: value for key, value in made[0].items() if key not in ("seconds", "workers")}
    assert ours == {key: value for key, value in account.items() if key not in ("seconds", "workers")}
    before = (out / "report.html").stat().st_mtime_ns
    assert curate(raw, out, config(raw)) == account and (out / "report.html").stat().st_mtime_ns == before


def test_a_run_that_an_earlier_version_began_goes_on(made, raw, tmp_path, monkeypatch):
    """Which kept a shard's keys in one file, with all permutations of a document side by side."""

    def stopped(*arguments):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(run, "_match", stopped)
        curate(raw, out, config(raw), workers=1)
    sift = out / "work" / "sift"
    for rank in range(0, len(shards(raw, 4000)), 2):  # the others are done by this one
        digests, bands = (np.load(sift / f"{name}_{rank}.npy") for name in ("digests", "bands"))
        signatures = np.concatenate(list(bands), axis=1)
        assert signatures.shape == (len(digests), 128)
        np.savez(sift / f"keys_{rank}.npz", digests=digests, signatures=signatures)
        for name in ("digests", "bands"):
            (sift / f"{name}_{rank}.npy").unlink()
    curate(raw, out, config(raw), workers=1)
    assert contents(out) == contents(made[1])


def test_a_worker_that_is_killed_ends_the_run(raw, tmp_path, monkeypatch):
    parent = os.getpid()

    def die(*arguments):
        assert os.getpid() != parent
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr("fathom.curation.run._passes", die)
        with pytest.raises(
            ChildProcessError, match="a worker was killed, perhaps for want of memory; rerun with fewer --workers"
        ):
            curate(raw, tmp_path / "out", config(raw), workers=2)
    assert curate(raw, tmp_path / "out", config(raw), workers=2)["documents"] == 46


def test_a_large_file_is_cut_into_the_same_rows(raw):
    def read(size):
        found = [d for shard in shards(raw, size) for piece in shard for d in documents(raw, piece, Curation())]
        return [(d.id, d.why if isinstance(d, Unreadable) else d.text) for d in found]

    assert read(300) == read(4000) == read(10**9) and len(shards(raw, 300)) > len(shards(raw, 4000)) > 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"malformed": "stop"}, r"latin\.txt: not UTF-8 at byte .*; mend it, or set malformed to drop"),
        ({"text_field": "body"}, r"more\.jsonl\.gz, row 1: no field 'body' \(found: text, id\); set text_field"),
        ({"language": "xx"}, "language='xx': py3langid knows .*en"),
        ({"known_words": "none.txt"}, "known_words='none.txt': no such file"),
        ({"filters": {"GopherQualitFilter": {}}}, r"datatrove has no such filter \(did you mean 'GopherQualityFilter'"),
        ({"benchmarks": {"q": "none.jsonl"}}, "benchmarks.q='none.jsonl': no such file"),
    ],
)
def test_what_stops_a_run(raw, tmp_path, options, said):
    with pytest.raises((ValueError, OSError), match=said):
        curate(raw, tmp_path / "out", config(raw, **options), workers=1)


def test_a_run_that_stopped_before_it_had_anything_makes_room(raw, tmp_path):
    with pytest.raises(ValueError, match="no field 'body'"):
        curate(raw / "rows.jsonl", tmp_path / "out", Curation(text_field="body"), workers=1)
    assert curate(raw / "rows.jsonl", tmp_path / "out", Curation(), workers=1)["documents"] == 39


def test_rows_nested_too_deeply_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("[" * 200_000 + f'\n{{"text": "{prose(1)}"}}\n'.replace("\n", " ")[1:] + "\n")
    (found,) = documents(tmp_path / "a.jsonl", shards(tmp_path / "a.jsonl", 10**9)[0][0], Curation())
    assert isinstance(found, Unreadable) and found.why.startswith("a.jsonl, line 1: not JSON")


def test_a_folder_that_another_process_works_in_or_that_is_read(raw, tmp_path):
    with pytest.raises(ValueError, match="would be read as text of it; name a folder elsewhere"):
        curate(raw, raw / "out", config(raw))
    (tmp_path / "out").mkdir()
    curate(raw / "note.txt", tmp_path / "out", Curation(), workers=1)
    with FileLock(tmp_path / "out" / ".lock"), pytest.raises(FileExistsError, match="another process curates into it"):
        curate(raw / "note.txt", tmp_path / "out", Curation(), workers=1)


def test_a_filter_of_datatrove(raw, tmp_path):
    found = curate(raw / "note.txt", tmp_path / "out", Curation(filters={"RegexFilter": {"regex_exp": "river"}}), 1)
    assert found["dropped"] == {"RegexFilter": {"RegexFilter": 1}}


def test_the_verb(raw, tmp_path, monkeypatch, capsys):
    (tmp_path / "c.yaml").write_text("shard_bytes: 100000\nmin_characters: 300\n")
    out = tmp_path / "out"
    command = ("curate", raw, "-o", out, "--config", tmp_path / "c.yaml", "--workers", 1)
    code, said, err = run_cli(monkeypatch, capsys, *command)
    assert code == 0 and "46 documents in" in said and "dropped, quality: too short" in said and "kept" in said
    assert "Dropped: papers/broken.tei.xml, line 5: malformed TEI" in err
    assert json.loads(run_cli(monkeypatch, capsys, *command, "--json")[1])["config"]["min_characters"] == 300
    (tmp_path / "c.yaml").write_text("min_characters: 301\n")
    assert run_cli(monkeypatch, capsys, *command)[::2] == (
        2, f"fathom: {out}: holds another run, with other config (min_characters, shard_bytes); name a new folder\n"
    )  # fmt: skip
    (tmp_path / "c.yaml").write_text("min_character: 301\n")
    assert "unknown key min_character (did you mean 'min_characters'?)" in run_cli(monkeypatch, capsys, *command)[2]
    (tmp_path / "nothing").mkdir()
    for folder, error in ((tmp_path / "nothing", "holds no text"), (tmp_path / "none", "no such file or folder")):
        assert error in run_cli(monkeypatch, capsys, "curate", folder, "-o", tmp_path / "b")[2]
    assert "is not empty and no run of curation" in run_cli(monkeypatch, capsys, "curate", raw, "-o", raw.parent)[2]

"""docs/claims.md, its summary in the README, its picture and the cards say what the raw files hold."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from fathom_cli.catalogue import entries

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("claims_page", ROOT / "docs/site/claims.py")
assert spec is not None and spec.loader is not None
claims = importlib.util.module_from_spec(spec)
sys.modules["claims_page"] = claims  # where its dataclasses look for their module
spec.loader.exec_module(claims)

CLAIM = {
    "name": "treekv", "wing": "caches", "paper": "p", "claim": "c", "setting": "s", "verdict": "holds",
    "ours": "{gap} nats", "numbers": {"gap": {"file": "raw.json", "path": ["rows", {"name": "a"}, "nll"]}},
}  # fmt: skip


FROM = {"commit": "abcdef123456", "device": "cpu", "command": "fathom compare a.yaml"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "raw.json").write_text(
        json.dumps({"rows": [{"name": "a", "nll": 2.5}, {"name": "b", "nll": 2.25}], "gap": 0.09, "error": 0.1, **FROM})
    )
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    return tmp_path


def with_number(**entry: Any) -> dict[str, Any]:
    return {**CLAIM, "numbers": {"gap": {**CLAIM["numbers"]["gap"], **entry}}}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    found, left_out = claims.read(yaml.safe_load(claims.SOURCE.read_text(encoding="utf-8")))
    assert not left_out
    return found


def test_the_list_of_results_names_every_page_once():
    listed = re.findall(r"^\| \[[^\]]+\]\(([^)]+)\)", (ROOT / "docs/results/README.md").read_text(), re.M)
    assert len(set(listed)) == len(listed)
    pages = {path.name for path in (ROOT / "docs/results").glob("*.md")} - {"README.md"}
    assert {page.partition("#")[0] for page in listed} == pages


def test_page_readme_and_picture_are_what_the_raw_files_say(rows: list[dict[str, Any]]) -> None:
    readme = claims.README.read_text(encoding="utf-8")
    assert claims.PAGE.read_text(encoding="utf-8") == claims.page(rows, []), "run python docs/site/claims.py"
    assert readme == claims.with_summary(readme, claims.summary(rows)), "run python docs/site/claims.py"
    drawn = Image.open(claims.PICTURE).info["Description"]
    assert drawn == claims.digest(claims.points(rows)), "run python docs/site/claims.py"


def test_a_card_begins_its_verdict_with_the_verdict_of_the_claim(rows: list[dict[str, Any]]) -> None:
    said = {entry.name: entry.verdict for entry in entries()}  # of `fathom methods` and the site's list, too
    for row in rows:
        start = said[row.get("card", row["name"])].split(". ")[0]
        assert start == row["verdict"], f"{row['name']}: the card says {start!r}, docs/claims.yml {row['verdict']!r}"


def test_a_point_is_the_gain_over_what_it_is_set_against(folder: Path) -> None:
    other = ["rows", {"name": "b"}, "nll"]
    claim = {**with_number(minus=other), "plot": {"number": "gap", "better": "lower", "against": "b"}}
    (point,) = claims.points([claims.written(claim)])
    assert point.gain == pytest.approx(-100 * 0.25 / 2.25) and point.interval is None
    b = {"file": "raw.json", "path": other}
    two = {**CLAIM, "numbers": {**CLAIM["numbers"], "b": b}, "ours": "{gap} and {b}"}
    plot = {"number": "gap", "minus": "b", "better": "lower", "against": "b"}
    assert claims.points([claims.written({**two, "plot": plot})]) == [point]
    recorded = with_number(of=other, error=["error"])["numbers"]["gap"] | {"path": ["gap"]}
    claim = {**CLAIM, "numbers": {"gap": recorded}, "plot": {"number": "gap", "better": "higher", "against": "b"}}
    (point,) = claims.points([claims.written(claim)])
    assert point.gain == pytest.approx(100 * 0.09 / 2.25)
    assert point.interval == pytest.approx((100 * (0.09 - 0.196) / 2.25, 100 * (0.09 + 0.196) / 2.25))
    assert claims.written(claim)["ours"] == "0.09 ± 0.196 nats"
    claims.draw([point], folder / "picture.png")
    assert Image.open(folder / "picture.png").info["Description"] == claims.digest([point])
    with pytest.raises(claims.ClaimError, match="treekv: plot needs"):
        claims.points([claims.written({**CLAIM, "plot": {"number": "gap", "better": "lower", "against": "b"}})])


def test_every_card_exists_and_no_system_stands_twice() -> None:
    listed = yaml.safe_load(claims.SOURCE.read_text(encoding="utf-8"))
    names = [claim["name"] for claim in listed]
    assert len(names) == len(set(names))
    for claim in listed:
        assert (ROOT / "docs/methods" / f"{claim.get('card', claim['name'])}.md").is_file(), claim["name"]


def test_numbers_are_read_subtracted_and_divided(folder: Path) -> None:
    other = ["rows", {"name": "b"}, "nll"]
    assert claims.written(CLAIM)["ours"] == "2.5 nats"
    assert claims.written(with_number(minus=other, format="+.2f"))["ours"] == "+0.25 nats"
    assert claims.written(with_number(over=other, format=".3f"))["ours"] == "1.111 nats"


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (with_number(path=["rows", {"name": "c"}, "nll"]), "names 0 entries"),
        (with_number(path=["rows", 0, "loss"]), "nothing lies at 'loss'"),
        (with_number(path=["rows", 0, "name"]), "not a number"),
        (with_number(file="gone.json"), "gone.json does not exist"),
        ({**CLAIM, "verdict": "proved"}, "is none of"),
        ({**CLAIM, "verdict": "not measured yet"}, "with 1 numbers"),
        ({**CLAIM, "numbers": {}}, "with 0 numbers"),
        ({**CLAIM, "ours": "lower"}, "are not shown"),
        ({**CLAIM, "verdict": "not told apart"}, "none of its numbers has an interval"),
        (
            {**with_number(path=["gap"], error=["error"]), "verdict": "does not hold at this size"},
            "is 'not told apart'",
        ),
        ({**CLAIM, "ours": "{gap} and {other}"}, "other"),
    ],
)
def test_a_number_that_no_raw_file_holds_is_refused(folder: Path, claim: dict[str, Any], message: str) -> None:
    with pytest.raises(claims.ClaimError, match=f"treekv.*{message}"):
        claims.written(claim)


@pytest.mark.parametrize("missing", ["commit", "device", "command"])
def test_a_raw_file_that_does_not_say_where_it_comes_from_is_named_and_left_out(folder: Path, missing: str) -> None:
    content = json.loads((folder / "raw.json").read_text())
    other = {**content, "runs": [{key: content.pop(key)} for key in FROM if key != missing]}  # anywhere in the file
    other.pop(missing)
    (folder / "raw.json").write_text(json.dumps({key: value for key, value in other.items() if key not in FROM}))
    said = missing.replace("command", "recipe")
    rows, left_out = claims.read([CLAIM, {**CLAIM, "name": "awm", "verdict": "not measured yet", "numbers": {}}])
    assert left_out == [f"treekv: docs/results/raw.json does not say its {said}"] and [r["name"] for r in rows] == [
        "awm"
    ]
    page = claims.page(rows, left_out)
    assert "2.5 nats" not in page and page.endswith(f"- {left_out[0]}\n")
    if missing == "command":  # a claim may say it
        assert claims.written({**CLAIM, "command": "python a.py"})["commits"] == "abcdef1"
    else:
        (folder / "origins.yml").write_text(f"raw.json: {{{missing}: abc1234}}\n")
        assert claims.written(CLAIM)["commits"] == ("≤ abc1234" if missing == "commit" else "abcdef1")


def test_a_commit_stated_by_hand_is_of_a_file_that_names_none() -> None:
    for name, told in yaml.safe_load((claims.RESULTS / "origins.yml").read_text(encoding="utf-8")).items():
        assert claims.origin(name, "a command") == [f"≤ {told['commit']}"], f"{name} says it itself"


@pytest.mark.parametrize("said", [None, "", [], [None, ""]], ids=str)
@pytest.mark.parametrize("field", ["device", "command"])
def test_an_origin_that_is_empty_says_nothing(folder: Path, field: str, said: Any) -> None:
    content = json.loads((folder / "raw.json").read_text())
    (folder / "raw.json").write_text(json.dumps({**content, field: said}))
    with pytest.raises(claims.NoOrigin, match=f"does not say its {field.replace('command', 'recipe')}$"):
        claims.written(CLAIM)


def test_no_commit_of_a_bare_copy_is_a_commit(folder: Path) -> None:
    content = json.loads((folder / "raw.json").read_text())
    (folder / "raw.json").write_text(json.dumps({**content, "commit": "not a checkout"}))
    with pytest.raises(claims.NoOrigin, match=r"raw\.json does not say its commit"):
        claims.written(CLAIM)


def test_of_two_files_that_claim_a_row_the_newer_is_read_and_said(folder: Path) -> None:
    content = json.loads((ROOT / "docs/results/depth_campaign_h200.json").read_text(encoding="utf-8"))
    content["runs"] = [
        {**run, "history": [], "held_out": {}, "pictures": {}, "samples": []}
        for run in content["runs"]
        if run["method"] in ("vanilla", "loop") and run["seed"] == 0 and not run["again"]
    ]

    def save(name: str, score: float, **more: Any) -> None:
        runs = [
            {**run, **({"scores": {"bits_per_byte": score}, "bits_per_byte": score} if run["method"] == "loop" else {}),
             **more} for run in content["runs"]
        ]  # fmt: skip
        (folder / name).write_text(json.dumps({**content, "runs": runs}))

    row = {"file": "old.json", "method": "loop", "baseline": "vanilla", "budget": "tokens"}
    claim = {**CLAIM, "numbers": {"gap": row}}
    save("old.json", 1.5)  # of a time without dates
    base = next(run["bits_per_byte"] for run in content["runs"] if run["method"] == "vanilla")
    assert claims.written(claim)["ours"] == f"{1.5 - base:+.3f} (one seed) nats".replace("-", "−")
    save("again.json", 1.4)  # nor this one says when: the named file stands
    assert "newer" not in claims.written(claim)["ours"]
    save("newer.json", 1.3, date="2026-12-01T10:00+00:00", commit="1234567")
    found = claims.written(claim)
    assert found["ours"] == f"{1.3 - base:+.3f} (one seed) (newer than in old.json) nats".replace("-", "−")
    assert found["commits"] == "1234567" and "newer.json" in found["files"] and "old.json]" not in found["files"]


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or chrome on PATH")
def test_the_sites_table_is_sorted_and_filtered_in_a_browser(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    tables = []
    for table in re.findall(r"(?:^\|.*\n)+", claims.page(rows, []), re.MULTILINE):
        head, _, *lines = [[html.escape(cell.strip()) for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        cells = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines)
        tables.append(f"<table><thead><tr><th>{'</th><th>'.join(head)}</th></tr></thead><tbody>{cells}</tbody></table>")
    script = (ROOT / "docs/site/claims.js").read_text(encoding="utf-8")
    assert "http" not in script  # it works offline
    use = """
        const list = document.querySelector("select[name=verdict]");
        list.value = "does not hold at this size";
        list.dispatchEvent(new Event("change"));
        [...document.querySelectorAll("th button")].find((one) => one.textContent === "verdict").click();
        document.querySelectorAll("th button")[0].click();
        document.querySelectorAll("th button")[0].click();
    """
    page = tmp_path / "claims.html"
    page.write_text("<meta charset=utf-8>" + "".join(tables) + f"<script>{script}</script><script>{use}</script>")
    flags = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-dev-shm-usage"
    )
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    table = dom[dom.rindex("<tbody>") :]
    shown = re.findall(r"<tr><td>\[(\w+)\]", table)  # a row that is filtered out says hidden
    expected = sorted((row["name"] for row in rows if row["verdict"] == "does not hold at this size"), reverse=True)
    assert shown == expected
    assert f"{len(expected)} of {len(rows)} systems" in dom and 'aria-sort="descending"' in dom
    verdicts = re.findall(r'<option value="([^"]+)"', dom[dom.index("<select") : dom.index("</select>")])
    assert verdicts == [verdict for verdict in claims.VERDICTS if any(row["verdict"] == verdict for row in rows)]

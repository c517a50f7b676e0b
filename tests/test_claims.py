"""docs/claims.md says what the raw files hold: a number that none holds, or a page written by hand, fails."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("claims_page", ROOT / "docs/site/claims.py")
assert spec is not None and spec.loader is not None
claims = importlib.util.module_from_spec(spec)
spec.loader.exec_module(claims)

CLAIM = {
    "name": "treekv", "wing": "caches", "paper": "p", "claim": "c", "setting": "s", "verdict": "holds",
    "ours": "{gap} nats", "numbers": {"gap": {"file": "raw.json", "path": ["rows", {"name": "a"}, "nll"]}},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "raw.json").write_text(json.dumps({"rows": [{"name": "a", "nll": 2.5}, {"name": "b", "nll": 2.25}]}))
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    return tmp_path


def with_number(**entry: Any) -> dict[str, Any]:
    return {**CLAIM, "numbers": {"gap": {**CLAIM["numbers"]["gap"], **entry}}}


def test_the_page_is_what_the_raw_files_say() -> None:
    text = claims.page(yaml.safe_load(claims.SOURCE.read_text(encoding="utf-8")))
    assert (ROOT / "docs/claims.md").read_text(encoding="utf-8") == text, "run python docs/site/claims.py"


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
        ({**CLAIM, "ours": "{gap} and {other}"}, "other"),
    ],
)
def test_a_number_that_no_raw_file_holds_is_refused(folder: Path, claim: dict[str, Any], message: str) -> None:
    with pytest.raises(claims.ClaimError, match=f"treekv.*{message}"):
        claims.written(claim)

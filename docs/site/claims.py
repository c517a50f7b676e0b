"""Write docs/claims.md from docs/claims.yml and the raw files of docs/results: `python docs/site/claims.py [--check]`.

claims.yml holds words: claim, setting, verdict, and where each number lies. The numbers themselves come from the raw
files, so a page with a number that no raw file holds cannot be made. `--check` writes nothing and fails where the page
is not what the command would write; the tests call it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

from fathom.report.results import Results, tables  # noqa: E402  of this checkout

RESULTS, SOURCE, PAGE = ROOT / "docs/results", ROOT / "docs/claims.yml", ROOT / "docs/claims.md"
VERDICTS = ("holds", "holds partly", "does not hold at this size", "not testable here", "not measured yet")
KEYS = {"name", "card", "wing", "paper", "claim", "setting", "ours", "numbers", "verdict", "command"}


class ClaimError(Exception):
    """What is wrong with a claim, in one line that names it."""


def raw(name: str) -> Any:
    """The content of a raw file."""
    if not (RESULTS / name).is_file():
        raise ClaimError(f"docs/results/{name} does not exist")
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def walk(content: Any, path: list[Any]) -> float:
    """The number at a path of keys; in a list, an entry is named by an index or by what some of its fields are."""
    for step in path:
        if isinstance(step, dict):
            found = [entry for entry in content if all(entry.get(key) == value for key, value in step.items())]
            if len(found) != 1:
                raise ClaimError(f"{step} names {len(found)} entries, not one")
            content = found[0]
        else:
            try:
                content = content[step]
            except (KeyError, IndexError, TypeError):
                raise ClaimError(f"nothing lies at {step!r} of {path}") from None
    if isinstance(content, bool) or not isinstance(content, int | float):
        raise ClaimError(f"{path} holds {type(content).__name__}, not a number")
    return content


def number(entry: dict[str, Any]) -> str:
    """A number as the page shows it. What `entry` names:

    file, path [, minus | over: another path] [, scale]: a value, a difference or a ratio of two values
    file, method, baseline, budget: the headline score's difference in a comparison, with the 95 % interval over seeds
    """
    entry = dict(entry)
    file, form = entry.pop("file"), entry.pop("format", ".3g")
    if "method" in entry:
        results = Results.load(RESULTS / file)
        table = next(table for table in tables(results) if table.budget == entry["budget"])
        rows = {row.method: row for row in table.rows}
        for name in (entry["method"], entry["baseline"]):
            if name not in rows:
                raise ClaimError(f"{file} has no {name!r} under the budget {entry['budget']!r}")
        gap = rows[entry["method"]].minus(rows[entry["baseline"]])
        mine, theirs = ({run.seed for run in rows[entry[side]].runs} for side in ("method", "baseline"))
        seeds = len(mine & theirs)
        margin = f" ± {gap.margin:.3f} ({seeds} seeds)" if gap.margin is not None else " (one seed)"
        return f"{gap.value:+.3f}{margin}".replace("-", "−")
    content = raw(file)
    value = walk(content, entry["path"]) * entry.get("scale", 1)
    if "minus" in entry:
        value -= walk(content, entry["minus"]) * entry.get("scale", 1)
    if "over" in entry:
        value /= walk(content, entry["over"])
    return format(value, form).replace("-", "−")


def written(claim: dict[str, Any]) -> dict[str, str]:
    """A claim with its numbers in its words."""
    name = claim.get("name", "?")
    missing = {"name", "wing", "paper", "claim", "verdict"} - set(claim)
    if missing or set(claim) - KEYS:
        raise ClaimError(f"{name}: missing {sorted(missing)}, unknown {sorted(set(claim) - KEYS)}")
    if claim["verdict"] not in VERDICTS:
        raise ClaimError(f"{name}: verdict {claim['verdict']!r} is none of {', '.join(VERDICTS)}")
    measured = claim["verdict"] not in ("not measured yet", "not testable here")
    if measured != bool(claim.get("numbers")):
        raise ClaimError(f"{name}: a verdict {claim['verdict']!r} with {len(claim.get('numbers') or {})} numbers")
    if not measured:
        return {**claim, "ours": claim.get("ours", ""), "files": ""}
    try:
        numbers = {key: number(entry) for key, entry in claim["numbers"].items()}
        ours = claim["ours"].format(**numbers)
    except (ClaimError, KeyError, ValueError) as error:
        raise ClaimError(f"{name}: {error}") from None
    unused = [key for key in numbers if "{" + key + "}" not in claim["ours"]]
    if unused:
        raise ClaimError(f"{name}: the numbers {unused} are not shown")
    files = sorted({entry["file"] for entry in claim["numbers"].values()})
    return {**claim, "ours": ours, "files": ", ".join(f"[{file}](results/{file})" for file in files)}


def page(claims: list[dict[str, Any]]) -> str:
    """docs/claims.md."""
    rows = [written(claim) for claim in claims]
    count = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS}
    lines = [
        "# What the papers claim, and what we measured",
        "",
        "One row a system. `python docs/site/claims.py` makes this page and reads every number from a raw file; CI",
        "fails where page and files differ. Our models are small, and a verdict is about the size that was measured.",
        "± is half the width of the 95 % interval over paired seeds.",
        "",
        "| verdict | systems |",
        "|---|---|",
        *(f"| {verdict} | {count[verdict]} |" for verdict in VERDICTS if count[verdict]),
        "",
        "| system | wing | the paper says | our setting | we measured | verdict | raw file, command |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        card = f"[{row['name']}](methods/{row.get('card', row['name'])}.md)"
        source = " ".join(part for part in (row["files"], f"`{row['command']}`" if row.get("command") else "") if part)
        cells = (
            card,
            row["wing"],
            f"{row['claim']} ({row['paper']})",
            row.get("setting", ""),
            row["ours"],
            row["verdict"],
            source,
        )
        lines.append("| " + " | ".join(" ".join(str(cell).split()) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is another")
    args = parser.parse_args()
    try:
        text = page(yaml.safe_load(SOURCE.read_text(encoding="utf-8")))
    except ClaimError as error:
        sys.exit(f"docs/claims.yml: {error}")
    if args.check:
        if PAGE.read_text(encoding="utf-8") != text:
            sys.exit("docs/claims.md is not what docs/claims.yml and the raw files say: python docs/site/claims.py")
        return
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {text.count('methods/')} systems")


if __name__ == "__main__":
    main()

"""Write docs/claims.md, its summary in the README and the picture of it: `python docs/site/claims.py [--check]`.

docs/claims.yml holds words: claim, setting, verdict, and where each number lies. The numbers themselves come from the
raw files of docs/results, so a page with a number that no raw file holds cannot be made. `--check` writes nothing and
fails where page, README or picture are not what the command would write; the tests call it.
A claim whose raw file does not say its commit, device, and recipe or command is left out of the page and named there.
Where two comparisons of one name hold the row of a claim, the one that ran later is read, and the page says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure
from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

from fathom.report.results import Results, tables  # noqa: E402  of this checkout
from fathom.report.style import COLOURS, MARKERS  # noqa: E402

RESULTS, SOURCE, PAGE = ROOT / "docs/results", ROOT / "docs/claims.yml", ROOT / "docs/claims.md"
README, PICTURE = ROOT / "README.md", ROOT / "docs/images/claims.png"
BEGIN, END = "<!-- made by docs/site/claims.py -->\n", "<!-- end -->"

# what a verdict means; the first words of the verdict on the method's card are the same
VERDICTS = {
    "holds": "the claim's difference is there, in its direction and about its size",
    "holds partly": "a part of the claim is there; another part is not, or is not measured",
    "not told apart": "the claim is of a difference, and ours lies inside its interval: neither borne out nor refuted",
    "does not hold at this size": "our difference is absent or the other way round, by more than its interval if known",
    "not testable here": "it cannot be tried at a size that we can afford",
    "not measured yet": "what ran says nothing of the claim, or nothing ran",
}
KEYS = {"name", "card", "wing", "paper", "claim", "setting", "ours", "numbers", "plot", "verdict", "command"}
NORMAL = 1.96  # standard errors in half of a 95 % interval


class ClaimError(Exception):
    """What is wrong with a claim, in one line that names it."""


class NoOrigin(ClaimError):
    """A raw file does not say where it comes from: a claim that stands on it is left out of the page, and named."""


@dataclass(frozen=True)
class Number:
    """A number of a raw file: as the page shows it, with its 95 % interval and the value that it is compared with,
    where they are known."""

    text: str
    value: float
    interval: tuple[float, float] | None = None
    other: float | None = None
    file: str = ""

    @property
    def inside(self) -> bool:
        """Whether it is a difference that cannot be told from none."""
        return self.interval is not None and self.interval[0] <= 0 <= self.interval[1]


def raw(name: str) -> Any:
    """The content of a raw file."""
    if not (RESULTS / name).is_file():
        raise ClaimError(f"docs/results/{name} does not exist")
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def origin(name: str, command: str | None) -> list[str]:
    """The commits of a raw file, "≤ " before one that is not recorded but known to be the latest that it can be.

    It names them itself, with device and recipe or command, anywhere in it; or `origins.yml` beside it states what is
    missing. Raises NoOrigin for what neither says.
    """
    stated = RESULTS / "origins.yml"
    told = (yaml.safe_load(stated.read_text(encoding="utf-8")) if stated.is_file() else {}).get(name, {})
    found: dict[str, set[str]] = {"commit": set(), "device": set(), "recipe": set()}

    def look(value: Any) -> None:
        for key, item in value.items() if isinstance(value, dict) else ():
            kind = {"command": "recipe", "commands": "recipe"}.get(key, key.removesuffix("s"))
            if kind in found:
                found[kind].update(str(one) for one in (item if isinstance(item, list) else [item]) if one)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            look(item)

    look(raw(name))
    commits = sorted({commit[:7] for text in found["commit"] for commit in re.findall(r"\b[0-9a-f]{7,40}\b", text)})
    if not commits and "commit" in told:
        commits = [f"≤ {told['commit']}"]
    known = {
        "commit": commits,
        "device": found["device"] or told.get("device"),
        "recipe": found["recipe"] or command or told.get("recipe"),
    }
    missing = [kind for kind, what in known.items() if not what]
    if missing:
        raise NoOrigin(f"docs/results/{name} does not say its {' and '.join(missing)}")
    return commits


def newest(file: str, entry: dict[str, Any]) -> str:
    """The raw file to read an entry from: among comparisons of one name that hold its row, the one whose runs began
    last, or the named file if no other says when."""

    def began(name: str) -> str | None:
        """When the latest run of the row began; None where the file has no such row."""
        runs = [run for run in raw(name)["runs"] if run["budget"] == entry["budget"]]
        if not {entry["method"], entry["baseline"]} <= {run["method"] for run in runs}:
            return None
        return max(run.get("date") or "" for run in runs if run["method"] == entry["method"])

    experiment, latest = raw(file)["name"], began(file)
    for path in sorted(RESULTS.glob("*.json")):
        other = raw(path.name) if path.name != file and '"runs"' in path.read_text(encoding="utf-8") else None
        if isinstance(other, dict) and other.get("name") == experiment and "budget" in (other["runs"] or [{}])[0]:
            date = began(path.name)
            if date is not None and latest is not None and date > latest:
                file, latest = path.name, date
    return file


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


def number(entry: dict[str, Any]) -> Number:
    """A number as the page shows it. What `entry` names:

    file, path [, minus | over: another path] [, scale]: a value, a difference or a ratio of two values
        [, error: path of its standard error | interval: paths of its two ends]: a difference's 95 % interval
        [, of: path]: the value that a recorded difference is from
    file, method, baseline, budget: the headline score's difference in a comparison, with the 95 % interval over seeds
    """
    entry = dict(entry)
    file, form = entry.pop("file"), entry.pop("format", ".3g")
    if "method" in entry:
        named, file = file, newest(file, entry)
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
        interval = None if gap.margin is None else (gap.value - gap.margin, gap.value + gap.margin)
        older = f" (newer than in {named})" if file != named else ""
        text = f"{gap.value:+.3f}{margin}".replace("-", "−") + older
        return Number(text, gap.value, interval, rows[entry["baseline"]].result, file)
    content, scale = raw(file), entry.get("scale", 1)
    value, other, interval, margin = walk(content, entry["path"]) * scale, None, None, ""
    if "minus" in entry:
        other = walk(content, entry["minus"]) * scale
        value -= other
    if "of" in entry:
        other = walk(content, entry["of"]) * scale
    if "over" in entry:
        value /= walk(content, entry["over"])
    if "error" in entry:
        half = NORMAL * walk(content, entry["error"]) * scale
        interval, margin = (value - half, value + half), f" ± {format(half, form.lstrip('+'))}"
    if "interval" in entry:
        low, high = (walk(content, path) * scale for path in entry["interval"])
        interval, margin = (low, high), f" [{format(low, form)}, {format(high, form)}]"
    return Number((format(value, form) + margin).replace("-", "−"), value, interval, other, file)


def written(claim: dict[str, Any]) -> dict[str, Any]:
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
        return {**claim, "ours": claim.get("ours", ""), "files": "", "commits": ""}
    try:
        numbers = {key: number(entry) for key, entry in claim["numbers"].items()}
        ours = claim["ours"].format(**{key: one.text for key, one in numbers.items()})
        files = sorted({one.file for one in numbers.values()})
        commits = dict.fromkeys(commit for file in files for commit in origin(file, claim.get("command")))
    except NoOrigin as error:
        raise NoOrigin(f"{name}: {error}") from None
    except (ClaimError, KeyError, ValueError) as error:
        raise ClaimError(f"{name}: {error}") from None
    unused = [key for key in numbers if "{" + key + "}" not in claim["ours"]]
    if unused:
        raise ClaimError(f"{name}: the numbers {unused} are not shown")
    inside = [one.inside for one in numbers.values()]
    if claim["verdict"] == "not told apart" and not any(inside):
        raise ClaimError(f"{name}: 'not told apart', and none of its numbers has an interval with zero in it")
    if claim["verdict"] == "does not hold at this size" and all(inside):
        raise ClaimError(f"{name}: zero is in every interval, which is 'not told apart'")
    links = ", ".join(f"[{file}](results/{file})" for file in files)
    return {**claim, "ours": ours, "files": links, "numbers": numbers, "commits": ", ".join(commits)}


def read(claims: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Claims with their numbers, and why the others are left out."""
    rows, left_out = [], []
    for claim in claims:
        try:
            rows.append(written(claim))
        except NoOrigin as error:
            left_out.append(str(error))
    return rows, left_out


def page(rows: list[dict[str, Any]], left_out: list[str]) -> str:
    """docs/claims.md, of claims with their numbers, and of those that are left out."""
    count = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS}
    lines = [
        "# What the papers claim, and what we measured",
        "",
        "One row a system. `python docs/site/claims.py` makes this page and reads every number from a raw file; CI",
        "fails where page and files differ. Our models are small, and a verdict is about the size that was measured.",
        "± is half the width of the 95 % interval over paired seeds or, of one seed, over held-out texts.",
        "The commit is the code that ran. ≤: the raw file does not record it, and the code is this commit's or older",
        "([origins](results/origins.yml)). Words in capitals stand for files of your own; the page of results has the",
        "whole command.",
        "",
        "| verdict | systems | meaning |",
        "|---|---|---|",
        *(f"| {verdict} | {count[verdict]} | {meaning} |" for verdict, meaning in VERDICTS.items() if count[verdict]),
        "",
        "![The difference of each system from what its paper sets it against](images/claims.png)",
        "",
        "| system | wing | the paper says | our setting | we measured | verdict | raw file, command | commit |",
        "|---|---|---|---|---|---|---|---|",
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
            row["commits"],
        )
        lines.append("| " + " | ".join(" ".join(str(cell).split()) for cell in cells) + " |")
    if left_out:
        lines += [
            "",
            "Left out, as a raw file does not say where it comes from:",
            "",
            *(f"- {why}" for why in left_out),
        ]
    return "\n".join(lines) + "\n"


def summary(rows: list[dict[str, Any]]) -> str:
    """What the README says of the page: how many systems have which verdict, and the picture."""
    listed = {verdict: [row["name"] for row in rows if row["verdict"] == verdict] for verdict in VERDICTS}
    lines = [f"Of {len(rows)} systems:", "", "| verdict | | systems |", "|---|---|---|"]
    for verdict, names in listed.items():
        cards = ", ".join(f"[{name}](docs/methods/{name}.md)" for name in names)
        lines += [f"| {verdict} | {len(names)} | {cards} |"] if names else []
    drawn = sum("plot" in row for row in rows)
    said = "By how many per cent each system is better or worse than what its paper sets it against"
    picture = f"![{said}](docs/images/claims.png)"
    note = (
        f"{drawn} of them are differences from one rival and are drawn. Scores, sizes and budgets are each row's own:\n"
        "a row is to be read against what stands at its right, not against another row."
    )
    return "\n".join([*lines, "", picture, "", note, ""])


@dataclass(frozen=True)
class Point:
    """One row of the picture: by how many per cent a system is better than what it is set against."""

    name: str
    against: str
    verdict: str
    gain: float
    interval: tuple[float, float] | None


def points(rows: list[dict[str, Any]]) -> list[Point]:
    """Those of claims with a `plot`: {number: one of its numbers [, minus: another], better: lower or higher, against:
    words}. A picture cannot show what its row does not say."""
    found = []
    for row in (row for row in rows if "plot" in row):
        plot, numbers = row["plot"], row["numbers"]
        one, better, against = numbers[plot["number"]], plot["better"], plot["against"]
        if "minus" in plot:
            other = numbers[plot["minus"]].value
            one = Number("", one.value - other, other=other)
        if not one.other or better not in ("lower", "higher"):
            raise ClaimError(f"{row['name']}: plot needs a difference, what it is from, and better: lower or higher")
        per_cent = (-100 if better == "lower" else 100) / one.other
        ends = None if one.interval is None else tuple(sorted(per_cent * end for end in one.interval))
        found.append(Point(row["name"], against, row["verdict"], per_cent * one.value, ends))
    order = list(VERDICTS)
    return sorted(found, key=lambda point: (order.index(point.verdict), -point.gain))


def digest(shown: list[Point]) -> str:
    """What the picture keeps of the rows that it was drawn from."""
    rows = [
        [point.name, point.against, point.verdict, *_digits(point.gain, *(point.interval or ()))] for point in shown
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def _digits(*values: float) -> list[str]:
    return [f"{value:.4g}" for value in values]  # as many as every platform agrees on


def draw(shown: list[Point], path: Path) -> None:
    """A row a system: gain over what it is set against, with its interval; verdicts by colour and marker."""
    places, headings, height = [], [], 0.0
    for verdict in dict.fromkeys(point.verdict for point in shown):
        headings.append((height, verdict))
        for point in (point for point in shown if point.verdict == verdict):
            height += 1
            places.append((height, point))
        height += 1.3
    figure = Figure(figsize=(9.6, 0.27 * height + 1.1), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("symlog", linthresh=1, linscale=0.6)
    axes.axvline(0, color="#667080", linewidth=1)
    for y, point in places:
        look = list(VERDICTS).index(point.verdict)
        colour, known = COLOURS[look][0], point.interval is not None
        if point.interval is not None:
            axes.plot(point.interval, (y, y), color=colour, linewidth=1.8, solid_capstyle="butt")
        axes.plot(
            point.gain, y, MARKERS[look], color=colour, markersize=7, markerfacecolor=colour if known else "white"
        )
        axes.annotate(
            point.against, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8, color="#4a5462"
        )
    for y, verdict in headings:
        look = COLOURS[list(VERDICTS).index(verdict)][0]
        axes.annotate(
            verdict,
            (-0.005, y),
            xycoords=("axes fraction", "data"),
            va="center",
            ha="right",
            color=look,
            weight="bold",
            fontsize=9,
        )
    axes.annotate(
        "set against", (1.01, -0.9), xycoords=("axes fraction", "data"), fontsize=8, color="#667080", style="italic"
    )
    axes.set_yticks([y for y, _ in places], [point.name for _, point in places], fontsize=9)
    axes.set_ylim(height - 0.5, -0.9)
    ticks = [-10, -1, 0, 1, 10, 100, 1000, 10000]
    axes.set_xticks(ticks, [f"{tick:+,} %".replace("-", "−") if tick else "0" for tick in ticks], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(
        "better than what it is set against, in % of that one's score (bar: 95 %; hollow: no interval)", fontsize=9
    )
    axes.grid(axis="x", color="#e3e7ec")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=110, metadata={"Description": digest(shown)})


def with_summary(readme: str, text: str) -> str:
    """The README with the text between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    if not after:
        raise ClaimError(f"README.md: {BEGIN.strip()} and {END} do not stand around the summary")
    return before + BEGIN + "\n" + text + "\n" + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where something is another")
    args = parser.parse_args()
    try:
        rows, left_out = read(yaml.safe_load(SOURCE.read_text(encoding="utf-8")))
        shown = points(rows)
        made = {PAGE: page(rows, left_out), README: with_summary(README.read_text(encoding="utf-8"), summary(rows))}
    except ClaimError as error:
        sys.exit(f"docs/claims.yml: {error}")
    old = {path: path.read_text(encoding="utf-8") for path in made}
    drawn = PICTURE.is_file() and Image.open(PICTURE).info.get("Description") == digest(shown)
    if args.check:
        others = [path for path in made if old[path] != made[path]] + [PICTURE] * (not drawn)
        if others:
            names = ", ".join(str(path.relative_to(ROOT)) for path in others)
            sys.exit(f"not what docs/claims.yml and the raw files say: {names}. Run python docs/site/claims.py")
        return
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    if not drawn:
        draw(shown, PICTURE)
    for why in left_out:
        print(f"left out: {why}")
    print(f"{PAGE.relative_to(ROOT)}: {len(rows)} systems; {PICTURE.relative_to(ROOT)}: {len(shown)} of them")


if __name__ == "__main__":
    main()

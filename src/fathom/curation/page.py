"""The account as one self-contained HTML page: counters, lengths, languages, examples of what was dropped."""

from __future__ import annotations

import html
from collections import Counter
from pathlib import Path
from typing import Any

from fathom.curation.account import Account, bin_start
from fathom.writing import write_text

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}table{border-collapse:collapse;width:100%}
td,th{padding:.2rem .6rem;text-align:right;vertical-align:top;font-variant-numeric:tabular-nums}
th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}tr{border-bottom:1px solid #e4e4e4}
.bar{display:flex;height:1rem;min-width:12rem}.kept{background:#0072B2}.dropped{background:#C46A00}
.sum td{font-weight:600}small{color:#555}summary{cursor:pointer}
blockquote{margin:.3rem 0 .8rem;color:#333;overflow-wrap:anywhere}
@media(prefers-color-scheme:dark){body{color:#e8e8e8;background:#161616}tr{border-color:#333}blockquote{color:#ccc}
small{color:#aaa}
.kept{background:#56B4E9}.dropped{background:#F0A830}}
"""
_LEVELS = {"perplexity": "model", "classes": "model", "judge": "judge"}  # every other step goes by rules


def write_page(made: dict[str, Any], raw: str, path: Path) -> None:
    """Write the page for the result of `curate`, whole or not at all."""
    account = Account.from_dict({key: value for key, value in made.items() if hasattr(Account(), key)})
    write_text(path, page(account, made, raw))


def page(account: Account, made: dict[str, Any], raw: str) -> str:
    """The page as a string; nothing is loaded from elsewhere."""
    speed = account.characters / 1e6 / max(made["seconds"], 1e-3)
    note = (
        f"{account.documents:,} documents in, {account.kept:,} kept. {account.characters:,} characters in, "
        f"{account.kept_characters:,} kept. {made['seconds']:,.1f} s since the last start with {made['workers']} "
        f"processes ({speed:,.1f} million characters a second)."
    )
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Corpus of {_e(raw)}</title>
<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>
<h1>What became of {_e(raw)}</h1><p>{note}</p>
<h2>Documents</h2>{_documents(account)}
<h2>Quality control by level</h2>{_levels(account)}
<h2>Lines</h2><p><small>Lines that are not empty. A hyphenated word that is made whole takes a line.</small></p>
{_lines(account)}
<h2>Lengths</h2><p><small>Characters of a document: <span style="color:#0072B2">■</span> kept,
<span style="color:#C46A00">■</span> dropped.</small></p>{_lengths(account)}
<h2>Languages</h2>{_languages(account)}
{_benchmarks(made["benchmarks"])}
<h2>Examples</h2>{_examples(account)}
<h2>Settings</h2><table>{_rows((name, "", value) for name, value in made["config"].items())}</table>
<p><small>fathom {_e(made["fathom"])}</small></p></body></html>"""


def _e(value: Any) -> str:
    return html.escape(str(value))


def _rows(rows: Any) -> str:
    return "".join("<tr>" + "".join(f"<td>{_e(cell)}</td>" for cell in row) + "</tr>" for row in rows)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "–"


def _documents(account: Account) -> str:
    rows = [("in", "", f"{account.documents:,}", "100 %")]
    for step, reasons in account.dropped.items():
        rows += [
            (f"− {step}", reason, f"{number:,}", _share(number, account.documents))
            for reason, number in sorted(reasons.items(), key=lambda item: -item[1])
        ]
    total = ("kept", "", f"{account.kept:,}", _share(account.kept, account.documents))
    return f"""<table><tr><th>step</th><th>reason</th><th>documents</th><th>of all</th></tr>{_rows(rows)}
<tr class="sum">{"".join(f"<td>{_e(cell)}</td>" for cell in total)}</tr></table>"""


def _levels(account: Account) -> str:
    dropped: Counter[str] = Counter()
    for step, reasons in account.dropped.items():
        dropped[_LEVELS.get(step, "document")] += sum(reasons.values())
    rows, left = [], account.documents
    for level, what in (("document", "rules and duplicates"), ("model", "perplexity, classes"), ("judge", "scores")):
        rows.append((level, what, f"{left:,}", f"{dropped[level]:,}", f"{left - dropped[level]:,}"))
        left -= dropped[level]
    head = "<tr><th>level</th><th>by</th><th>in</th><th>dropped</th><th>kept</th></tr>"
    return f"<table>{head}{_rows(rows)}</table>"


def _lines(account: Account) -> str:
    rows = [("in", "", f"{account.lines:,}")]
    rows += [("− cleaning", rule, f"{number:,}") for rule, number in account.lines_taken.most_common()]
    rows += [("− dropped documents", "", f"{account.lines_of_dropped:,}"), ("kept", "", f"{account.kept_lines:,}")]
    return f"<table><tr><th>step</th><th>rule</th><th>lines</th></tr>{_rows(rows)}</table>"


def _bar(kept: int, dropped: int, most: int) -> str:
    parts = (("kept", kept), ("dropped", dropped))
    inner = "".join(f'<span class="{name}" style="width:{100 * n / most:.2f}%"></span>' for name, n in parts if n)
    return f'<td><div class="bar">{inner}</div></td>'


def _lengths(account: Account) -> str:
    kept, dropped = account.kept_lengths, account.dropped_lengths
    bins = sorted({*kept, *dropped})
    if not bins:
        return "<p>No documents.</p>"
    first = next((b for b in bins if b), 0)  # what could not be read has no length
    span = [b for b in range(bins[0], bins[-1] + 1) if b in bins or b > first]
    most = max(kept[b] + dropped[b] for b in bins)
    rows = "".join(
        f"<tr><td>{bin_start(b) if b else 0:,.0f} to {bin_start(b + 1):,.0f}</td>{_bar(kept[b], dropped[b], most)}"
        f"<td>{kept[b]:,}</td><td>{dropped[b]:,}</td></tr>" for b in span
    )  # fmt: skip
    return f"<table><tr><th>characters</th><th></th><th>kept</th><th>dropped</th></tr>{rows}</table>"


def _languages(account: Account) -> str:
    if not account.languages:
        return "<p>Not asked for.</p>"
    most = max(account.languages.values())
    rows = "".join(
        f"<tr><td>{_e(language)}</td>{_bar(number, 0, most)}<td>{number:,}</td></tr>"
        for language, number in account.languages.most_common(20)
    )
    rest = len(account.languages) - 20
    more = f"<p><small>and {rest} more</small></p>" if rest > 0 else ""
    return f"<table><tr><th>language</th><th></th><th>documents</th></tr>{rows}</table>{more}"


def _benchmarks(found: dict[str, dict[str, int]]) -> str:
    if not found:
        return ""
    rows = _rows((name, "", f"{n['rows']:,}", f"{n['too_short']:,}") for name, n in found.items())
    head = "<tr><th>benchmark</th><th></th><th>rows</th><th>too short to look for</th></tr>"
    return f"<h2>Decontamination</h2><table>{head}{rows}</table>"


def _examples(account: Account) -> str:
    parts = []
    for of, examples in sorted(account.examples.items()):
        said = "".join(
            f"<p><b>{_e(one['where'])}</b> {_e(one['detail'])}</p><blockquote>{_e(one['excerpt'])}</blockquote>"
            for one in examples
        )
        parts.append(f"<details><summary>{_e(of)}</summary>{said}</details>")
    return "".join(parts) or "<p>Nothing was dropped.</p>"

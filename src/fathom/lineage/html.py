"""A comparison as one self-contained HTML page: verdict, null distribution, per-layer heat map, alignment, coverage."""

import html
import math
from pathlib import Path

from fathom.lineage.pairs import Comparison
from fathom.writing import whole

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse}
td,th{padding:.2rem
.6rem;text-align:right;font-variant-numeric:tabular-nums}th:first-child,td:first-child{text-align:left}
.word{font-size:1.6rem;font-weight:600}.map td{min-width:3.2rem;color:#111}td{white-space:nowrap}small{color:#555}
"""


_MEANING = {
    "related": "Models that start from the same random weights count as related, whatever they were trained on.",
    "shares parts": "The models as wholes do not look alike; the parts listed below are the same in both.",
    "inconclusive": "The numbers fit a common origin and they fit its absence; neither may be concluded from them.",
    "unrelated": "No trace was found. That does not exclude a disguise, distillation or shared data: distillation "
    "raises some scores a little, the others not at all.",
}


def page(c: Comparison) -> str:
    """The page as a string; nothing is loaded from elsewhere."""
    word = html.escape(c.verdict)
    reasons = "".join(f"<li>{html.escape(r)}</li>" for r in c.reasons)
    methods = "".join(_method_row(name, record) for name, record in c.details.items())
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Lineage: {word}</title>
<style>{_STYLE}</style></head><body>
<h1>Do these weights share an origin?</h1>
<p><b>A</b> {html.escape(c.a)}<br><b>B</b> {html.escape(c.b)}</p>
<p class="word">{word}</p><ul>{reasons}</ul>
<p><small>Statistical evidence about weights, not a statement about anyone's conduct. {_MEANING[c.verdict]}</small></p>
<h2>Measured against independent models</h2>
<table><tr><th>method</th><th>score</th><th>agreement</th><th>p</th><th>independent pairs: median, highest
(pairs)</th><th>verdict</th></tr>
{methods}</table>{_null_source(c)}
{_parts("Parts that both hold", c.shared)}{_parts("Alike, but without effect in one of them: no evidence", c.inert)}
<h2>Layers</h2>{_heat_map(c)}
<h2>Files</h2>{_files(c)}
</body></html>"""


def _files(c: Comparison) -> str:
    lines = []
    for side, files in c.files.items():
        line = f"{side.upper()}: {', '.join(files['read']) or 'in memory'}"
        if files["beside"]:
            line += f"; not read, as transformers would not load it: {', '.join(files['beside'])}"
        lines.append(f"<p><small>{html.escape(line)}</small></p>")
    return "".join(lines)


def _number(value: float | None, digits: str = ".4f") -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, digits)


def p_words(record: dict) -> str:
    """The corrected p, "< x" where no null score was as high."""
    if record["p_corrected"] is None:
        return "–"
    return ("< " if record["p_is_bound"] else "") + f"{record['p_corrected']:.2g}"


def _method_row(name: str, record: dict) -> str:
    null = record["null"]
    about = "not measured" if null is None else f"{null['median']:.3f}, {null['max']:.3f} ({null['pairs']})"
    cells = (name, _number(record["score"]), _number(record["judged"], ".3f"), p_words(record), about,
             record["verdict"])  # fmt: skip
    return "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>"


def _parts(title: str, parts: list[dict]) -> str:
    if not parts:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(p['a'])}</td><td>{html.escape(p['b'])}</td>"
        f"<td>{'every number equal' if p['equal'] else _number(p['cosine'], '.4f')}</td></tr>"
        for p in parts
    )
    return f"<h2>{title}</h2><table><tr><th>in A</th><th>in B</th><th>alike</th></tr>{rows}</table>"


def _null_source(c: Comparison) -> str:
    lines = [
        "Agreement is what is judged: how far layers agree beyond what neighbouring layers share (AWM), or the middle "
        "of six terms (HuRef). p is the share of independent pairs that agree as much, corrected for the number of "
        "methods (Holm) and never below what their number supports."
    ]
    lines += sorted({f"Independent pairs: {r['null']['source']}" for r in c.details.values() if r["null"]})
    return "".join(f"<p><small>{html.escape(line)}</small></p>" for line in lines)


def _heat_map(c: Comparison) -> str:
    if not c.layers:
        return "<p>No layer by layer evidence for this method.</p>"
    columns = ["q", "k", "agreement", *c.layers[0].get("parts", {})]
    head = "".join(f"<th>{name}</th>" for name in columns)
    rows = []
    for layer in c.layers:
        values = [layer["q"], layer["k"], layer["agreement"], *layer.get("parts", {}).values()]
        cells = "".join(f'<td style="background:{_shade(v)}">{v:.3f}</td>' for v in values)
        rows.append(f"<tr><td>{layer['layer_a']} – {layer['layer_b']}</td>{cells}</tr>")
    return f'<table class="map"><tr><th>layer A – B</th>{head}</tr>{"".join(rows)}</table>'


def _shade(value: float) -> str:
    """White at 0 to blue at 1; readable in print."""
    t = min(max(value, 0.0), 1.0)
    return f"rgb({255 - int(150 * t)},{255 - int(95 * t)},255)"


def write_page(c: Comparison, path: Path) -> None:
    """Write the page so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as partial:
        partial.write_text(page(c), encoding="utf-8")

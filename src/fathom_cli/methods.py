"""`fathom methods`."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from fathom_cli import nearest
from fathom_cli.catalogue import Entry, entries
from fathom_cli.options import Json

VERBS = {  # where a registry's methods are asked for on the command line, or in a recipe
    "audiovideo": "mova: {{…}} of a recipe's model or methods",
    "block_cache": "fathom generate MODEL --block-cache {name}",
    "curation": "fathom curate RAW -o FOLDER --config FILE, of these options",
    "growth": "fathom grow MODEL --method {name} -o FOLDER",
    "latents": "codar: {{…}} of a recipe's model",
    "policy": "fathom generate MODEL --policy {name}",
    "table_to_text": "table: {{name: {name}}} of a recipe's methods",
    "tables": "fathom table ask, picard: {{…}} of a recipe's task text_to_sql",
    "vision": "fathom vision see MODEL --method {name}",
}


def complete(incomplete: str) -> list[str]:
    """Names of methods, for the shell."""
    return [entry.name for entry in entries() if entry.name.startswith(incomplete)]


def command(
    name: Annotated[
        str | None, typer.Argument(help="One method; without it, all are listed.", autocompletion=complete)
    ] = None,
    json_output: Json = False,
) -> None:
    """List every method, or show one: equation, options with defaults, paper, cost, measured verdict, card.

    The list has each method's wing, and the config section or API that takes it.

    \b
    Examples:
      fathom methods
      fathom methods treekv
      fathom methods --json
    """
    if name is None:
        typer.echo(_json([_row(entry) for entry in entries()]) if json_output else _table(entries()))
        return
    chosen = [entry for entry in entries() if entry.name == name]
    if not chosen:
        known = [entry.name for entry in entries()]
        word = name.lower().replace("-", "_")
        begun = max((other for other in known if word.startswith(f"{other}_")), key=len, default="")
        raise ValueError(  # a paper's name may be longer than its method's: fourier_transformer, fourier
            f"method {name!r} does not exist{nearest(begun or word, known)}; `fathom methods` lists all"
        )
    if json_output:
        typer.echo(_json(_record(chosen[0])))
    else:
        typer.echo("\n\n".join(_page(entry) for entry in chosen))


def _row(entry: Entry) -> dict[str, str]:
    return {column: getattr(entry, column) for column in ("name", "wing", "registry", "paper", "summary")}


def _record(entry: Entry) -> dict[str, Any]:
    options = [dataclasses.asdict(option) for option in entry.options]
    more = {"equation": entry.equation, "use": _use(entry), "cost": entry.cost, "verdict": entry.verdict}
    return {**_row(entry), **more, "options": options, "source": entry.source, "card": str(entry.card or "")}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _table(listed: tuple[Entry, ...]) -> str:
    """A table without lines, for a terminal and for grep."""
    rows = [{**_row(entry), "paper": _arxiv_id(entry.paper)} for entry in listed]
    widths = {column: max(len(row[column]) for row in rows) for column in ("name", "wing", "registry", "paper")}
    head = {column: column for column in (*widths, "summary")}
    return "\n".join(
        "  ".join([*(row[column].ljust(width) for column, width in widths.items()), row["summary"]])
        for row in (head, *rows)
    )


def _page(entry: Entry) -> str:
    """The page of one method."""
    arxiv = _arxiv_id(entry.paper)
    paper = f"{entry.paper.removesuffix(arxiv).removesuffix('arXiv ').strip()} https://arxiv.org/abs/{arxiv}".strip()
    card = entry.card
    parts = {
        "equation": entry.equation,
        "use": _use(entry),
        "paper": paper if arxiv else entry.paper or "none",
        "options": "" if entry.options else "none",
        "cost": _without_links(entry.cost) or "not on its card",
        "verdict": _without_links(entry.verdict) or "not on its card",
        "card": _shown(card) if card else "none",
        "code": entry.source,
    }
    lines = [entry.name, *_wrapped(entry.summary, "  "), ""]
    for title, text in parts.items():
        lines += _wrapped(text, " " * 10, f"{title:10}")
        if title == "options":
            for option in entry.options:
                lines += _wrapped(f"{option.name} = {option.default!r}", "      ", "  ")
                lines += _wrapped(option.meaning, "      ")
    return "\n".join(line.rstrip() for line in lines)


def _use(entry: Entry) -> str:
    """The code or command that uses the method."""
    if entry.section:
        section = f"{entry.registry}: {{name: {entry.name}}} in a recipe"
        return f"{section}, {entry.registry}={{'name': '{entry.name}'}} in Python"
    if entry.registry == "cache":
        return f"fathom cache MODEL --method {entry.name}, or with compress(model, fathom.{entry.call}(…)): in Python"
    verb = entry.verb or VERBS.get(entry.registry, "").format(name=entry.name)
    return f"{verb}, or {entry.call}(…) in Python" if verb else f"{entry.call}(…) in Python"


def _without_links(text: str) -> str:
    """Markdown with the texts of its links: nobody follows the addresses in a terminal, and lines break within them."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)


def _wrapped(text: str, indent: str, first: str | None = None) -> list[str]:
    lines = textwrap.wrap(
        text,
        min(shutil.get_terminal_size().columns, 110),
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return lines or [first or ""]


def _shown(path: Path) -> str:
    """Relative to the working directory, if it is in it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _arxiv_id(paper: str) -> str:
    found = re.search(r"\d{4}\.\d{5}", paper)
    return found.group() if found else ""

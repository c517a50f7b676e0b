"""`fathom methods`."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from typing import Annotated, Any

import typer

# Wings outside the config's registries list their methods in a mapping METHODS: name → class with `paper` and either
# `summary` or a docstring.
WINGS = {"caches": "cache", "lineage": "lineage"}


def command(json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List every method: name, wing, registry (the config section or API that takes it), paper, one line.

    \b
    Example:
      fathom methods --json
    """
    rows = list_methods()
    if json_output:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    lines = [{**row, "paper": _arxiv_id(row["paper"])} for row in rows]
    widths = {column: max(len(line[column]) for line in lines) for column in ("name", "wing", "registry", "paper")}
    for line in [{column: column for column in (*widths, "summary")}, *lines]:
        cells = [line[column].ljust(width) for column, width in widths.items()]
        typer.echo("  ".join([*cells, line["summary"]]).rstrip())


def list_methods() -> list[dict[str, str]]:
    """`[{"name", "wing", "registry", "paper", "summary"}]`, the registries first, then the other wings."""
    import fathom  # noqa: F401  fills the registries
    from fathom.models.registry import REGISTRIES

    rows = [
        _row(name, cls, cls.wing, registry)  # type: ignore[attr-defined]
        for registry, methods in REGISTRIES.items()
        for name, cls in sorted(methods.items())
    ]
    for wing, registry in WINGS.items():
        methods = getattr(importlib.import_module(f"fathom.{wing}"), "METHODS", {})
        rows += [_row(name, cls, wing, registry) for name, cls in sorted(methods.items())]
    return rows


def _row(name: str, cls: Any, wing: str, registry: str) -> dict[str, str]:
    summary = getattr(cls, "summary", None) or (inspect.getdoc(cls) or "").split("\n\n")[0]
    return {
        "name": name, "wing": wing, "registry": registry, "paper": getattr(cls, "paper", ""),
        "summary": " ".join(summary.split()),
    }  # fmt: skip


def _arxiv_id(paper: str) -> str:
    found = re.search(r"\d{4}\.\d{5}", paper)
    return found.group() if found else ""

"""`fathom export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fathom_cli.options import Json


def command(
    checkpoint: Annotated[str, typer.Argument(help="Folder or hub name of a model.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New folder; without it, list the forms that are possible.")
    ] = None,
    to: Annotated[str, typer.Option(help="stock, llada or gguf.")] = "stock",
    json_output: Json = False,
) -> None:
    """Write a checkpoint as a stock model, in LLaDA's layout or as GGUF, or say why that is impossible.

    \b
    Example:
      fathom export runs/base/model
      fathom export runs/base/model -o stock
      fathom export runs/base/model --to gguf -o gguf
    """
    from fathom.export import export, forms_of
    from fathom.export.forms import read_config

    if output is not None:
        made = export(checkpoint, output, to)
        typer.echo(
            json.dumps(made, indent=2)
            if json_output
            else f"{made['what']}: {output}. Read again, its logits differ by at most {made['difference']:.1g} of the "
            "largest one."
        )
        return
    forms = forms_of(read_config(checkpoint))
    if json_output:
        said = {name: {"can": not isinstance(what, ValueError), "what": str(what)} for name, what in forms.items()}
        typer.echo(json.dumps({"checkpoint": checkpoint, "forms": said}, indent=2))
        return
    for name, what in forms.items():
        typer.echo(f"{name:6} {'no: ' if isinstance(what, ValueError) else ''}{what}")

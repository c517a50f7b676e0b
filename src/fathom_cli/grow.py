"""`fathom grow`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fathom_cli.options import Json


def command(
    checkpoint: Annotated[str, typer.Argument(help="Folder of the dense model: Llama, Qwen2, Qwen3 or Fathom's.")],
    method: Annotated[str, typer.Option(help="What to grow; `fathom methods` lists them under the wing growth.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder for the grown checkpoint.")],
    branch: Annotated[
        list[str] | None, typer.Option(help="Folder of a model trained from it on one text; give one for each.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="An option of the method, as name=value.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.", min=0, max=2**31 - 1)] = 0,
    json_output: Json = False,
) -> None:
    """Make a mixture of experts of a dense checkpoint, layer by layer.

    \b
    Example:
      fathom grow runs/base/model --method innovator --set disciplines=2 --branch physics --branch biology -o grown
    """
    from fathom.growth import methods
    from fathom.growth.grow import grow
    from fathom.models.registry import nearest

    known = methods()
    if method not in known:
        raise ValueError(
            f"--method {method}: no such method{nearest(method, list(known))}; there are {', '.join(known)}"
        )
    made = grow(checkpoint, _built(known[method], set_ or []), output, branch or [], seed)
    if json_output:
        typer.echo(json.dumps(made, indent=2))
        return
    idle = made["parameters"] - made["active_parameters"]
    active = f", {made['active_parameters']:,} of them active" if idle else ""
    typer.echo(f"{method}: {made['parameters']:,} parameters{active}. Before training it is {made['start']}.")
    typer.echo(f"Model: {output}")


def _built(kind: Any, given: list[str]) -> Any:
    """The method with the options given as name=value."""
    import dataclasses
    import typing

    from fathom.models.registry import nearest
    from fathom.train.loading import convert, parse_yaml

    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    options = {}
    for entry in given:
        name, equals, value = entry.partition("=")
        if not equals or name not in names:
            raise ValueError(
                f"--set {entry}: give name=value{nearest(name, names)}; {kind.name} has "
                f"{', '.join(names) or 'no options'}"
            )
        options[name] = convert(parse_yaml(value), hints[name], f"--set {name}")
    return kind(**options)

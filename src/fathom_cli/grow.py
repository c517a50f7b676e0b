"""`fathom grow`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fathom_cli.options import Json


def command(
    checkpoint: Annotated[
        str, typer.Argument(help="Folder of a dense Llama, Qwen2, Qwen3 or Fathom model; or a recipe (YAML file).")
    ],
    method: Annotated[
        str | None, typer.Option(help="A method of the wing growth; `fathom methods` lists them.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="New folder for the grown checkpoint; for a recipe, the folder of its runs."
        ),
    ] = None,
    branch: Annotated[
        list[str] | None, typer.Option(help="Folder of a model trained from it on one text; give one for each.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="An option of the method, as name=value.")] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Text that router=prompt and split=clustered read with the base model; one for each discipline."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random numbers.", min=0, max=2**31 - 1)] = 0,
    jobs: Annotated[int, typer.Option(help="For a recipe: stages at the same time, shared out among the GPUs.")] = 1,
    minutes: Annotated[
        float | None, typer.Option(help="For a recipe: start no stage after this many minutes; rerun to resume.", min=0)
    ] = None,
    json_output: Json = False,
) -> None:
    """Turn a dense checkpoint into a mixture of experts, layer by layer; or train all stages of a recipe and compare.

    \b
    Example:
      fathom grow runs/base/model --method innovator --set disciplines=2 --branch physics --branch biology -o grown
      fathom grow recipes/growth_cpu.yaml --jobs 2
    """
    if checkpoint.endswith((".yaml", ".yml")):
        if method is not None or branch or set_ or text or seed:
            raise ValueError(
                f"{checkpoint}: is a recipe, which names methods, branches, options and seeds; leave them out"
            )
        _recipe(Path(checkpoint), output or Path("runs"), jobs, minutes, json_output)
        return
    if (jobs, minutes) != (1, None):
        raise ValueError(f"{checkpoint}: --jobs and --minutes are of a recipe (.yaml); leave them out")
    if method is None or output is None:
        raise ValueError(f"--{'method' if method is None else 'output'} is missing: {checkpoint} is no recipe (.yaml)")
    from fathom.growth import methods
    from fathom.growth.grow import grow
    from fathom.models.registry import nearest

    known = methods()
    if method not in known:
        raise ValueError(
            f"--method {method}: no such method{nearest(method, list(known))}; there are {', '.join(known)}"
        )
    made = grow(checkpoint, _built(known[method], set_ or []), output, branch or [], seed, text or [])
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


def _recipe(path: Path, output: Path, jobs: int, minutes: float | None, json_output: bool) -> None:
    """All stages of a recipe, a table and a picture."""
    import contextlib
    import sys

    from fathom.report.growing import RESULTS, run_growths, show
    from fathom.report.growths import load_growths

    try:
        with contextlib.redirect_stdout(sys.stderr if json_output else sys.stdout):
            results = run_growths(load_growths(path), output, jobs, minutes=minutes)
    except KeyboardInterrupt:
        typer.echo("Interrupted. Rerun the command to resume.", err=True)
        raise typer.Exit(130) from None
    folder = output / results["name"]
    picture = show(results, folder / "growths.png")
    if json_output:
        typer.echo(json.dumps(results, indent=2))
    else:
        groups = results["groups"]
        typer.echo(f"\n{'bits per byte':<28}{''.join(f'{group:>28}' for group in groups)}{'training FLOPs':>16}")
        for row in results["methods"]:
            cells = ""
            for group in groups:
                deviation = row[f"{group}_deviation"]
                spread = "" if deviation is None else f" ±{deviation:.4f}"
                cells += f"{row[group]:>12.4f}{row[f'{group}_change']:>+8.4f}{spread:>8}"
            seeds = "" if row["seeds"] == 1 else f", {row['seeds']} seeds"
            typer.echo(f"{row['method'] + seeds:<28}{cells}{row['train_flops']:>16.3g}")
        typer.echo("Beside each: the change against the base, and ± the standard deviation over seeds.")
        _asked(results["methods"])
        typer.echo(f"Results: {folder / RESULTS}, {picture}")
    if results["failures"]:
        typer.echo("Failed:\n" + "\n".join(f"  {failure}" for failure in results["failures"]), err=True)
        raise typer.Exit(1)


def _asked(methods: list[dict[str, Any]]) -> None:
    """What the questions of a recipe came to."""
    rows = [row for row in methods if "asked" in row]
    if not rows:
        return
    kinds = list(rows[0]["asked"])
    typer.echo(f"\n{'questions answered right':<28}{''.join(f'{kind:>28}' for kind in kinds)}")
    for row in rows:
        shares = [row["asked"][kind] for kind in kinds]
        cells = "".join(f"{one['answer']:>14.0%}{one['answer_without_tools']:>14.0%}" for one in shares)
        typer.echo(f"{row['method']:<28}{cells}")
    typer.echo("Of each kind: with the tools, and without any; means over seeds.")

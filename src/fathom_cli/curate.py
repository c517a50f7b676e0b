"""`fathom curate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fathom_cli.options import Json


def command(
    raw: Annotated[Path, typer.Argument(help="File or folder of papers (GROBID's TEI), JSONL, Parquet and texts.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the corpus and its account.")],
    config: Annotated[
        Path | None, typer.Option(help="YAML file of options; `fathom methods geogalactica` lists them.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: one a usable core.")] = None,
    json_output: Json = False,
) -> None:
    """Clean a folder of papers and texts into a corpus. Rerun the command to resume it.

    The output folder says what was dropped and why: account.json, report.html, dropped/ and lines/. A recipe's
    `data.train` may name its corpus/.

    \b
    Example:
      fathom curate papers/ -o corpus --config curate.yaml
    """
    from fathom.curation import Curation, curate
    from fathom.train.loading import build, parse_yaml

    options = Curation()
    if config is not None:
        try:
            options = build(Curation, parse_yaml(config.read_text(encoding="utf-8")) or {})
        except ValueError as error:
            raise ValueError(f"{config}: {error}") from None
    try:
        made = curate(raw, output, options, workers)
    except KeyboardInterrupt:
        typer.echo("Interrupted. Rerun the command to resume with the remaining shards.", err=True)
        raise typer.Exit(130) from None
    if json_output:
        typer.echo(json.dumps(made, indent=2, ensure_ascii=False))
        return
    for example in made["examples"].get("reading: malformed", []):
        typer.echo(f"Dropped: {example['detail']}", err=True)
    typer.echo(f"{made['documents']:,} documents in")
    for step, reasons in made["dropped"].items():
        for reason, number in sorted(reasons.items(), key=lambda item: -item[1]):
            typer.echo(f"{number:>9,} dropped, {step}: {reason}")
    typer.echo(f"{made['kept']:>9,} kept, {made['kept_characters']:,} of {made['characters']:,} characters")
    typer.echo(f"Corpus: {output / 'corpus'}   Report: {output / 'report.html'}")

"""`fathom video`: pictures together with their sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fathom_cli.options import Json

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Pictures together with their sound.",
)


@app.callback()
def video() -> None:
    """Pictures together with their sound."""


@app.command()
def score(
    files: Annotated[list[Path], typer.Argument(help="Clips with sound: .mp4, or what else PyAV reads.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A page that holds the clips and opens offline.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Is what is heard when it is seen? Onsets of the sound against impacts and flashes in the picture, of any clip.

    Before a plain, still wall impacts and flashes are found to within 10 ms; in other scenes peaks of motion stand in,
    which are as exact as a picture is long. Pictures whose shorter side has more than 240 pixels are made smaller.

    \b
    Examples:
      fathom video score dog.mp4
      fathom video score runs/clips/*.mp4 -o scores.html
    """
    from fathom.audiovideo.clips import read_clip
    from fathom.audiovideo.metrics import COLUMNS, summary
    from fathom.audiovideo.metrics import score as measure

    if output is not None and not output.parent.is_dir():
        raise FileNotFoundError(f"--output {output}: no folder {output.parent}; make it first")
    clips = [read_clip(file, shorter_side=240) for file in files]
    rows = [measure(clip) for clip in clips]
    means = summary(rows, [column.name for column in COLUMNS])
    if json_output:
        named = [{"file": str(file), **row} for file, row in zip(files, rows)]
        typer.echo(json.dumps({"clips": named, "summary": means}, indent=2))
    else:
        from fathom.report.clip_page import said

        wide = max(len(str(file)) for file in [*files, "95 % interval"])
        typer.echo(" ".join([" " * wide, *(f"{column.name:>12}" for column in COLUMNS)]))
        for file, row in zip(files, rows):
            cells = [said(row[column.name], column.unit) for column in COLUMNS]
            typer.echo(" ".join([f"{file!s:{wide}}", *(f"{cell:>12}" for cell in cells)]))
        if len(files) > 1:
            found = [means[column.name] for column in COLUMNS]
            cells = [said(one["mean"], column.unit) for one, column in zip(found, COLUMNS)]
            typer.echo(" ".join([f"{'mean':{wide}}", *(f"{cell:>12}" for cell in cells)]))
            spans = ["–".join(said(end, "") for end in one["interval"]) if one["interval"] else "" for one in found]
            typer.echo(" ".join([f"{'95 % interval':{wide}}", *(f"{span:>12}" for span in spans)]))
        if any(row["scene"] != "plain" for row in rows):
            others = [str(file) for file, row in zip(files, rows) if row["scene"] != "plain"]
            typer.echo(f"not a plain scene, so by peaks of motion: {', '.join(others)}")
    if output is not None:
        from fathom.report.clip_page import Scored, write_clip_page

        scored = [Scored(file.name, clip, row, file) for file, clip, row in zip(files, clips, rows)]
        title = files[0].name if len(files) == 1 else f"{len(files)} clips"
        write_clip_page(title, scored, means, output)
        typer.echo(f"Page: {output}", err=json_output)

"""`fathom compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    recipe: Annotated[Path, typer.Argument(help="YAML file, see recipes/.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the run folders.")] = Path("runs"),
    jobs: Annotated[int, typer.Option(help="Runs at the same time, shared out among the GPUs.")] = 1,
) -> None:
    """Train every method of a recipe under its budgets and write one report. Rerun the command to resume it.

    \b
    Example:
      fathom compare recipes/demo.yaml

    \b
    On a machine with 8 GPUs, one run on each:
      fathom compare recipes/compare_gpu.yaml --jobs 8
    """
    from fathom.report.compare import compare
    from fathom.report.results import tables
    from fathom.report.wording import TITLES, at_edge, disturbances, overall

    try:
        results = compare(recipe, output, jobs, say=typer.echo)
    except KeyboardInterrupt:
        typer.echo("Interrupted. Rerun the command to resume.", err=True)
        raise typer.Exit(130) from None
    found = tables(results)
    for table in found:
        typer.echo(f"\n{TITLES[table.budget]}")
        for row in table.rows:
            scores = ", ".join(
                f"{row.mean(score.name):.3f} {score.unit_of(row.first.exact)}" for score in results.scores
            )
            typer.echo(f"  {row.method:<20} {scores}")
        reference = f"{results.task_class.reference_name} model"
        typer.echo(f"  {reference:<20} {results.reference:.3f} {results.scores[0].unit}")
    typer.echo("")
    for score in results.scores:
        typer.echo(f"{score.heading}, {score.better} is better: {score.meaning.format(block_size=results.block_size)}")
    said = overall(found, results.reference)
    typer.echo("\n" + "\n".join([said.headline, *said.details]))
    for warning in filter(None, [at_edge(results.edges), *disturbances(results.runs)]):
        typer.echo(warning)
    typer.echo(f"Report: {output / results.name / 'report.html'}")
    if results.failures:
        typer.echo("Failed:\n" + "\n".join(f"  {failure}" for failure in results.failures), err=True)
        typer.echo("Run the command again to repeat the failed runs.", err=True)
        raise typer.Exit(1)

"""`fathom train`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    recipe: Annotated[Path, typer.Argument(help="YAML file, see recipes/.")],
    method: Annotated[str | None, typer.Option(help="The method to train, if the recipe lists several.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Default: the first of the method's, or of the recipe's.", min=0, max=2**32 - 1)
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the run folders.")] = Path("runs"),
) -> None:
    """Train one model of a recipe, for the length of `training`. Rerun the command to resume it.

    Budgets and retraining belong to a comparison: `fathom compare` reads them.
    If the recipe has several learning rates, the one with the best held-out score is taken. It is found once for each
    method, with the first of the recipe's seeds; `fathom compare` and this command share the result.

    \b
    Example:
      fathom train recipes/demo.yaml --method pondering --seed 1

    \b
    On several GPUs, which share every batch of the recipe:
      torchrun --nproc-per-node 8 -m fathom train recipes/demo.yaml --method vanilla
    """
    from fathom.train import check_extras, load_recipe, model_config, sequences_per_process, sweep_lr, train_run
    from fathom.train.recipe import of_comparison

    loaded = load_recipe(recipe)
    if method is None and len(loaded.methods) > 1:
        names = ", ".join(entry.name for entry in loaded.methods)
        raise ValueError(f"--method is missing: {recipe} lists {names}; choose one (`fathom compare` trains all)")
    chosen = loaded.methods[0] if method is None else loaded.method(method)
    seed = (chosen.seeds or loaded.seeds)[0] if seed is None else seed
    folder = output / loaded.name / f"{chosen.name}-seed{seed}"
    model_config(loaded, chosen)  # a wrong option is found before the text is tokenised
    sequences_per_process(loaded.training)
    check_extras(loaded.training)
    if loaded.downstream is not None:
        loaded.downstream.load()
    first = os.environ.get("RANK", "0") == "0"
    unread = [section for section in of_comparison(loaded) if section != "downstream"]
    if unread and first:
        typer.echo(
            f"Only `fathom compare` reads {' and '.join(unread)}: this run has the length of `training`.", err=True
        )
    data = loaded.task.prepare(loaded.data, output / ".data")
    trials = output / loaded.name / chosen.name / "sweep"  # one a method, shared with `fathom compare`
    try:
        sweep = sweep_lr(loaded, chosen, seed=loaded.seeds[0], folder=trials, data=data)
        result = train_run(loaded, chosen, seed=seed, folder=folder, data=data, lr=sweep.best)
    except KeyboardInterrupt:
        typer.echo("Interrupted. Rerun the command to resume from the last complete checkpoint.", err=True)
        raise typer.Exit(130) from None
    if not first:
        return
    for trial in sweep.trials:
        typer.echo(f"lr {trial.lr:g}: validation loss {_number(trial.validation_loss)}, {_scores(loaded.task, trial)}")
    if sweep.at_edge:
        typer.echo(f"The best, {sweep.best:g}, is at the edge of the candidates: a better one may lie outside.")
    spread = result.tokens_per_second_interval
    typer.echo(
        f"{result.method}: {result.tokens:,} tokens, {result.train_flops:.3g} FLOPs, {result.tokens_per_second:,.0f} "
        f"tokens/s{f' ({spread[0]:,.0f} to {spread[1]:,.0f})' if spread else ''}, "
        f"train loss {_number(result.train_loss)}, validation loss {_number(result.validation_loss)}, "
        f"{_scores(loaded.task, result)}"
    )
    for score in loaded.task.scores:
        meaning = score.meaning.format(block_size=loaded.data.block_size)
        typer.echo(f"{score.heading}, {score.better} is better: {meaning}")
    for note in result.notes:
        typer.echo(note)
    if loaded.downstream is not None:
        from fathom.report.measure import downstream_scores

        for name, found in downstream_scores(loaded, chosen, result, data).items():
            typer.echo(
                f"{name}: {found.metric} {found.value:.4f} ± {found.error:.4f}, guessing {found.chance:.4f} "
                f"({found.documents} documents)"
            )
    typer.echo(f"Model: {result.model}")


def _scores(task: Any, result: Any) -> str:
    return ", ".join(f"{score.heading} {_number(result.scores[score.name])}" for score in task.scores)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"

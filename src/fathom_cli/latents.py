"""`fathom latents`: train a latent diffusion model in stages, see what rounding loses, compare it as a writer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fathom_cli.options import Device

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Continuous diffusion over vectors of tokens (CoDAR): train in stages, study, compare.",
)
SECTIONS = ("recovery", "writers", "judge")
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for what is made.")]


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="YAML file with stages, such as recipes/codar_cpu.yaml.")],
    judge: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of the causal model that judges fluency; default: the recipe's."),
    ] = None,
    output: Output = Path("runs"),
    device: Device = None,
) -> None:
    """Train every stage of a recipe, then study and compare the model of the last stage.

    Rerun the command to resume it. Writes recovery.json and its plot, writers.json, and prints sampled texts.

    \b
    Example:
      fathom latents run recipes/codar_cpu.yaml
    """
    from fathom.latents.model import load
    from fathom.train.stages import load_stages, run_stages

    stages = load_stages(recipe, SECTIONS)
    check(recipe, stages)
    if judge is not None and "writers" not in stages.more:
        raise ValueError(f"--judge {judge}: {recipe} has no section writers, whose texts it would judge; leave it out")
    for seed in stages.seeds:
        found = run_stages(stages, output, seed, typer.echo)
        folder = output / stages.name / f"seed-{seed}"
        last, result = found[next(reversed(stages.stages))]
        model, tokenizer = load(result.model, device)
        data = last.task.prepare(last.data, output / ".data")
        train, held_out = rows(data.train), rows(data.validation)
        if "recovery" in stages.more:
            recovered(model, train, held_out, stages.more["recovery"], folder)
        if "writers" in stages.more:
            judges = judge_of(judge or stages.more.get("judge"), found, device)
            compared(model, tokenizer, train, held_out, stages.more["writers"], folder, judges)
        typer.echo(f"Model: {result.model}")
        for text in tokenizer.batch_decode(model.generate(rows=2, temperature=0.7), skip_special_tokens=True):
            typer.echo(f"> {text}")


def check(recipe: Path, stages: Any) -> None:
    """Raise ValueError, before anything is trained, for a recipe that the study after it cannot use."""
    from fathom.latents.recovery import RecoveryConfig
    from fathom.latents.writers import WritersConfig
    from fathom.tasks.base import DEFAULT, Task
    from fathom.train.loading import build

    name = next(reversed(stages.stages))
    task = Task.from_yaml(stages.stages[name].get("task", DEFAULT), f"stages.{name}.task")
    if getattr(task, "stage", None) != "contextual_decoder":
        raise ValueError(f"{recipe}: the last stage is a {task.name!r}; end with a 'contextual_decoder', which writes")
    if "judge" in stages.more and "writers" not in stages.more:
        raise ValueError(f"{recipe}: judge: there is no section writers, whose texts it would judge; leave it out")
    for section, kind in (("recovery", RecoveryConfig), ("writers", WritersConfig)):
        if section in stages.more:
            build(kind, stages.more[section], section)
            if stages.stages[name]["data"].get("validation", "") is None:
                raise ValueError(f"{recipe}: {section} asks for held-out text; set data.validation of stage {name!r}")


@app.command()
def recovery(
    model: Annotated[str, typer.Argument(help="Folder of a latent diffusion model, of any stage.")],
    train: Annotated[str, typer.Option(help="Text to train the heads on, as data.train names one.")] = "embedded",
    held_out: Annotated[str, typer.Option(help="Text to ask for, as data.validation names one.")] = "embedded",
    steps: Annotated[int, typer.Option(help="Training steps of each head.", min=1)] = 400,
    output: Output = Path("."),
    device: Device = None,
) -> None:
    """Measure how much of a text each head recovers from noised vectors: recovery.json and a plot."""
    from fathom.data import DataConfig, prepare
    from fathom.evaluate.load_model import refuse_other_families
    from fathom.latents.model import load

    refuse_other_families(model, ("fathom_latent",), "a model of a stage that `fathom latents run` has trained")
    loaded, _ = load(model, device)
    config = DataConfig(train=train, validation=held_out, tokenizer=model, block_size=loaded.config.length)
    data = prepare(config, output / ".data")
    recovered(loaded, rows(data.train), rows(data.validation), {"steps": steps}, output)


def rows(blocks: Any) -> Any:
    """Token ids [N, L] of whole blocks."""
    return blocks.with_format("torch")["input_ids"][:].long()


def recovered(model: Any, train: Any, held_out: Any, options: dict[str, Any], folder: Path) -> None:
    """Run the token-recovery study, and write its rows and plot to the folder."""
    from fathom.latents.recovery import RecoveryConfig, draw, study, terms
    from fathom.report.plots import SUFFIX, THEMES
    from fathom.report.provenance import provenance
    from fathom.train.loading import build
    from fathom.writing import write_json

    folder.mkdir(parents=True, exist_ok=True)

    def keep(found: dict[str, Any]) -> None:
        write_json(folder / "recovery.json", {**found, "terms": terms(found), **provenance(1)})

    found = study(model, train, held_out, build(RecoveryConfig, options, "recovery"), typer.echo, keep)
    for theme, colours in THEMES.items():
        draw(found, folder / f"recovery{SUFFIX[theme]}.png", "What heads recover from noised vectors", colours)
    typer.echo(f"Recovery: {folder / 'recovery.json'}, {folder / 'recovery.png'}")


def judge_of(named: Any, found: dict[str, Any], device: str | None) -> Any:
    """The judge that a recipe names: a stage, or a folder or hub name of a causal language model."""
    from fathom.evaluate import load_checkpoint
    from fathom.latents.writers import judged_by

    if named is None:
        return None
    name = str(named).removeprefix("stage:")
    checkpoint = str(found[name][1].model) if name in found else str(named)
    return judged_by(*load_checkpoint(checkpoint, device))


def compared(
    model: Any, tokenizer: Any, train: Any, held_out: Any, options: dict[str, Any], folder: Path, judge: Any
) -> None:
    """Write controls and the scores of CoDAR and its rivals to writers.json, and all their texts to texts.json."""
    import torch

    from fathom.latents.controls import controls
    from fathom.latents.writers import WritersConfig, at_entropy, table
    from fathom.report.provenance import provenance
    from fathom.tasks.contextual_decoder import ContextualDecoding
    from fathom.train.loading import build
    from fathom.writing import write_json

    config = build(WritersConfig, options, "writers")
    task = ContextualDecoding()
    said = controls(model, held_out[: task.examples].to(model.device), None, task)
    remarks = task.remarks(said)
    texts: list[dict[str, Any]] = []

    def keep(lines: list[dict[str, Any]], written: list[str]) -> None:
        wanted, last = lines[0]["entropy"], lines[-1]
        matched = {name: at_entropy(lines, name, wanted) for name in dict.fromkeys(line["writer"] for line in lines)}
        write_json(folder / "writers.json", {
            "config": dataclasses.asdict(config), "rows": lines, "controls": said, "remarks": remarks,
            "entropy_of_data": wanted, "perplexity_at_that_entropy": matched,
            "parameters": model.part_parameters(), "threads": torch.get_num_threads(), **provenance(1),
        })  # fmt: skip
        texts.append({"writer": last["writer"], "temperature": last["temperature"], "texts": written})
        write_json(folder / "texts.json", texts)

    table(model, tokenizer, train, held_out, config, judge, typer.echo, keep)
    typer.echo("Controls: " + json.dumps({name: round(value, 4) for name, value in said.items()}))
    for remark in remarks:
        typer.echo(f"Note: {remark}")
    typer.echo(f"Writers: {folder / 'writers.json'}")

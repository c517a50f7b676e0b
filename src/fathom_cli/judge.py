"""`fathom judge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fathom_cli.options import Device, Json


def command(
    checkpoints: Annotated[list[str], typer.Argument(help="Models that write: diffusion and autoregressive ones.")],
    judge: Annotated[str, typer.Option(help="Causal language model that reads: folder or hub name.")],
    text: Annotated[Path, typer.Option(help="Held-out text, whose stretches are the prompts.")],
    samples: Annotated[int, typer.Option(help="Texts of each writer and temperature.", min=2)] = 256,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 32,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of a continuation.", min=1)] = 64,
    temperatures: Annotated[
        str, typer.Option(help="Rising; a writer takes those around the data's entropy.")
    ] = "0.4,0.5,0.6,0.7,0.8,0.9,1,1.1,1.2,1.4,1.6",
    steps: Annotated[
        str | None, typer.Option(help="Diffusion: numbers of steps; default: one, two, four and eight tokens a step.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Diffusion: policies, separated by commas.")] = "low_confidence",
    block_cache: Annotated[str, typer.Option(help="Diffusion: block caches, separated by commas.")] = "none",
    block_length: Annotated[
        int | None, typer.Option(help="Diffusion: default: the model's own, else all new tokens.", min=1)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts at once.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0)] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for judged.json and the plot.")] = Path(
        "judged"
    ),
    device: Device = None,
    json_output: Json = False,
) -> None:
    """Let an outside model read what models write, and compare them where they are equally diverse.

    A judge likes texts of few different words, so each writer's perplexity is taken at the temperature at which its
    texts have the entropy of held-out ones. The last lines say how many tokens a second every model writes at equal
    quality: with at most 1.02 times the perplexity of one token a step.

    \b
    Example:
      fathom judge MASKED TWIN --judge HuggingFaceTB/SmolLM2-135M --text books.txt --block-cache none,dual
    """

    from fathom.evaluate import load_checkpoint, read_documents
    from fathom.evaluate.samples import SamplesConfig, compare_samples, draw
    from fathom.report.plots import SUFFIX, THEMES
    from fathom.report.provenance import provenance
    from fathom.writing import write_json

    names = _names(checkpoints)
    if Path(judge).resolve() in [Path(name).resolve() for name in checkpoints]:
        raise ValueError(
            f"--judge {judge}: is one of the models that write, and likes what it would write itself; give another"
        )
    config = SamplesConfig(
        samples, prompt_tokens, max_new_tokens, _numbers("--temperatures", temperatures, float),
        None if steps is None else _numbers("--steps", steps, int), _words(policy), _words(block_cache), block_length,
        batch_size, seed,
    )  # fmt: skip
    documents = read_documents(text)
    models = {name: load_checkpoint(one, device) for name, one in zip(names, checkpoints, strict=True)}
    output.mkdir(parents=True, exist_ok=True)

    def keep(result: dict[str, Any]) -> None:
        about = {"judge": judge, "text": str(text), "checkpoints": checkpoints}
        write_json(output / "judged.json", {**about, **result, **provenance(1)})

    say = (lambda said: None) if json_output else typer.echo
    result = compare_samples(models, load_checkpoint(judge, device), documents, config, say, keep)
    for theme, colours in THEMES.items():
        draw(result, output / f"judged{SUFFIX[theme]}.png", colours, theme)
    if json_output:
        typer.echo((output / "judged.json").read_text(encoding="utf-8").rstrip())
        return
    typer.echo("\nTokens a second at equal quality")
    for best in result["equal_quality"]:
        sure = "" if best["kept"] else "; the interval of its quality goes beyond 1.02"
        speed = f"{best['tokens_per_second']:,.0f}, {best['times']:.2f} times one token a step"
        typer.echo(f"  {best['model']}: {speed} ({best['way']}){sure}")
    for name in [name for name in names if name not in {best["model"] for best in result["equal_quality"]}]:
        typer.echo(
            f"  {name}: unknown, as its first way is not seen on both sides of the data's entropy; give wider "
            "--temperatures, or more --samples"
        )
    typer.echo(f"Judged: {output / 'judged.json'}, {output / 'judged.png'}")


def _numbers(option: str, given: str, kind: Any) -> tuple[Any, ...]:
    try:
        return tuple(kind(word) for word in given.split(","))
    except ValueError:
        raise ValueError(f"{option}={given!r}: give numbers separated by commas") from None


def _words(given: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in given.split(","))


def _names(checkpoints: list[str]) -> list[str]:
    """The paths without the parts that all begin with, and without a last part "model"."""
    parts = [Path(name).parts[: -1 if Path(name).name == "model" else None] or (name,) for name in checkpoints]
    shared = 0
    while all(len(one) > shared + 1 and one[shared] == parts[0][shared] for one in parts):
        shared += 1
    names = ["/".join(one[shared:]) for one in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"{' '.join(checkpoints)}: the same checkpoint twice; give each one once")
    return names

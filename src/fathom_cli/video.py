"""`fathom video`: make clips with sound, and measure how far sound and picture agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fathom_cli.options import Device, Json

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Make clips with sound, and measure how far sound and picture agree.",
)


@app.callback()
def video() -> None:
    """Make clips with sound, and measure how far sound and picture agree."""


@app.command()
def make(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a trained model: RUN/model of task audiovideo.")],
    prompt: Annotated[str, typer.Option(help="What to see and hear.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .mp4 to write.")] = Path("clip.mp4"),
    image: Annotated[Path | None, typer.Option(help="The first picture; without it, a white one.")] = None,
    negative: Annotated[str, typer.Option(help="Prompt that guidance by text leads away from.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Sampling steps.")] = 50,
    text_scale: Annotated[float, typer.Option(help="s_T: 1 is no guidance by text.")] = 5.0,
    bridge_scale: Annotated[float, typer.Option(help="s_B: 1 is no guidance by the bridge.")] = 3.5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    in_turn: Annotated[
        bool, typer.Option(help="Evaluate the branches of guidance one after another, which needs less memory.")
    ] = False,
    offload: Annotated[
        bool, typer.Option(help="Keep only the parts on the GPU that the step under way needs.")
    ] = False,
    device: Device = None,
    json_output: Json = False,
) -> None:
    """Make a clip with sound, and measure the delay between picture and sound.

    \b
    Example:
      fathom video make runs/mova_demo/both/tokens-1760000-seed-0/model --prompt "a red block flashes" -o clip.mp4
    """
    import torch

    from fathom.audiovideo import MovaPipeline
    from fathom.audiovideo.clips import Clip, write_clip
    from fathom.audiovideo.metrics import score as measure
    from fathom.evaluate.load_model import refuse_other_families
    from fathom.models.device import device_of
    from fathom_cli.vision import read

    if output.suffix != ".mp4":
        raise ValueError(f"--output {output}: name a file that ends in .mp4")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"--output {output}: no folder {output.parent}; make it first")
    picture = None if image is None else read(image)
    refuse_other_families(str(checkpoint), ("fathom_mova",), "a model that task audiovideo has trained")
    pipeline = MovaPipeline.from_pretrained(checkpoint)
    place = device_of(device)
    if offload:
        pipeline.enable_model_cpu_offload(device=place)
    else:
        pipeline.to(place)
    found = pipeline(
        prompt,
        negative,
        picture,
        steps=steps,
        text_scale=text_scale,
        bridge_scale=bridge_scale,
        generator=torch.Generator().manual_seed(seed),
        batched=not in_turn,
    )
    clip = Clip(found.frames[0], found.frame_rate, found.audio[0].astype("float32"), found.sample_rate, prompt)
    write_clip(clip, output)
    with_unit = measure(clip)
    if json_output:
        typer.echo(json.dumps({"clip": str(output), "prompt": prompt, "seed": seed, **with_unit}, indent=2))
        return
    offset = "no sound belongs to an event"
    if with_unit["offset_ms"] is not None:
        offset = f"sounds are {with_unit['offset_ms']:.0f} ms from what is seen"
    typer.echo(f"{output}: {len(clip.frames)} pictures, {clip.duration:.2f} s; {offset}")


@app.command()
def score(
    files: Annotated[list[Path], typer.Argument(help="Clips with sound: .mp4, or any other format that PyAV reads.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A page that holds the clips and opens offline.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Measure in any clip whether sounds come when something happens: onsets of sound against impacts and flashes.

    In front of a plain, still wall, impacts and flashes are found to within 10 ms. In other scenes peaks of motion are
    used instead, to within one picture. Pictures whose shorter side has more than 240 pixels are made smaller.

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
        from fathom.report.clip_page import with_unit

        wide = max(len(str(file)) for file in [*files, "95 % interval"])
        typer.echo(" ".join([" " * wide, *(f"{column.name:>12}" for column in COLUMNS)]))
        for file, row in zip(files, rows):
            cells = [with_unit(row[column.name], column.unit) for column in COLUMNS]
            typer.echo(" ".join([f"{file!s:{wide}}", *(f"{cell:>12}" for cell in cells)]))
        if len(files) > 1:
            found = [means[column.name] for column in COLUMNS]
            cells = [with_unit(one["mean"], column.unit) for one, column in zip(found, COLUMNS)]
            typer.echo(" ".join([f"{'mean':{wide}}", *(f"{cell:>12}" for cell in cells)]))
            spans = [
                "–".join(with_unit(end, "") for end in one["interval"]) if one["interval"] else "" for one in found
            ]
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

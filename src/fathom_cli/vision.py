"""`fathom vision`: answer about an image with fewer vision tokens; compare methods; show what they keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fathom_cli.catalogue import entries
from fathom_cli.options import Device, Json

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Fewer vision tokens for LLaVA, LLaVA-NeXT, SmolVLM and Qwen2.5-VL models.",
)


def complete_method(incomplete: str) -> list[str]:
    """Names of compressors, for the shell."""
    return [entry.name for entry in entries() if entry.registry == "vision" and entry.name.startswith(incomplete)]


Model = Annotated[str, typer.Argument(help="Folder or hub name of a vision-language model.")]
Image = Annotated[Path, typer.Option(help="An image file.")]
Method = Annotated[str, typer.Option(help="`fathom methods` lists them.", autocompletion=complete_method)]
Tokens = Annotated[int | None, typer.Option(help="Vision tokens kept of every image or tile.")]
Ratio = Annotated[str | None, typer.Option(help="Kept share of each side, such as 2/3; instead of --tokens.")]


def chosen(method: str, tokens: int | None, ratio: str | None, rescale: str | None = None) -> Any:
    """The compressor of a command line: the method with the options that were given."""
    from fathom.vision import METHODS, from_dict

    if tokens is None and ratio is None and method in METHODS and method != "all_tokens":
        share = ", or the kept share of each side by --ratio" if METHODS[method].makes_a_grid else ""
        raise ValueError(f"--tokens: say how many vision tokens of every image --method {method} keeps{share}")

    options = {"tokens": tokens, "ratio": ratio, "rescale": rescale}
    return from_dict({"name": method, **{name: value for name, value in options.items() if value is not None}})


def load(model: str, device: str | None) -> tuple[Any, Any]:
    """Model and processor. Raises OSError or ValueError with what to do."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from fathom.evaluate.load_model import refuse_other_families
    from fathom.models.device import device_of
    from fathom.vision.families import FAMILIES, REFUSED

    known = (*FAMILIES, *(f"fathom_{name}" for name in FAMILIES), *REFUSED)  # REFUSED: said why, once it is loaded
    refuse_other_families(model, known, f"one of {', '.join(family.title for family in FAMILIES.values())}")
    place = device_of(device)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(model, dtype="auto")
    return loaded.to(place).eval(), AutoProcessor.from_pretrained(model)


def read(path: Path) -> Any:
    """The picture of --image, as RGB. Raises OSError or ValueError that names the file; ImportError without Pillow."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"--image {path} needs Pillow: pip install 'fathom-lm[media]'") from error

    if not path.is_file():
        raise FileNotFoundError(f"--image {path}: no such file")
    try:
        image = Image.open(path)
        if image.mode[0] in "IF":  # Pillow would cut all values above 255 off
            raise ValueError(f"its pixels are {image.mode}; save it with 8 bits a channel")
        return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"--image {path}: not a readable image, or cut short ({error})") from error


@app.command()
def see(
    model: Model,
    image: Image,
    prompt: Annotated[str, typer.Option(help="What to ask.")],
    method: Method = "fourier_vlm",
    tokens: Tokens = None,
    ratio: Ratio = None,
    rescale: Annotated[str | None, typer.Option(help="none or amplitude, for fourier_vlm.")] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to generate.")] = 64,
    device: Device = None,
    json_output: Json = False,
) -> None:
    """Answer about an image.

    \b
    Example:
      fathom vision see MODEL --image cat.png --prompt "What is this?" --tokens 144
    """
    from fathom.vision import compress_vision
    from fathom.vision.bench import inputs_of

    compressor, picture = chosen(method, tokens, ratio, rescale), read(image)
    loaded, processor = load(model, device)
    with compress_vision(loaded, processor, compressor):
        inputs = inputs_of(loaded, processor, [picture], prompt)
        made = loaded.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    answer = processor.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    kept = int((inputs["input_ids"] == processor.image_token_id).sum())
    if json_output:
        typer.echo(json.dumps({"answer": answer, "vision_tokens": kept, "method": compressor.to_dict()}, indent=2))
    else:
        typer.echo(answer)


@app.command()
def bench(
    model: Model,
    image: Image,
    tokens: Annotated[int, typer.Option(min=1, help="Vision tokens that every method keeps.")] = 144,
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "Describe the image.",
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens that are generated to time a step.")] = 16,
    device: Device = None,
    json_output: Json = False,
) -> None:
    """Compare all methods at equal numbers of tokens: FLOPs, KV bytes, time to first token, tokens per second.

    \b
    Example:
      fathom vision bench MODEL --image cat.png --tokens 144
    """
    from fathom.vision.bench import bench as measure

    picture = read(image)
    loaded, processor = load(model, device)
    rows = measure(loaded, processor, picture, tokens, prompt, new_tokens)
    if json_output:
        typer.echo(json.dumps(rows, indent=2))
        return
    heads = f"{'prefill GFLOP':>15}{'its layers':>12}{'closed form':>13}{'step GFLOP':>12}{'closed form':>13}"
    heads += f"{'KV MB':>9}{'first token s':>15}{'tokens/s':>10}"
    typer.echo(f"{'method':18}{'tokens':>8}{heads}")
    for row in rows:
        if "refused" in row:
            typer.echo(f"{row['method']:18}  {row['refused']}")
            continue
        prefill, layers, layers_closed, step, step_closed = (
            row[name] / 1e9
            for name in (
                "prefill_flops", "language_flops", "language_flops_closed", "step_flops", "step_flops_closed"
            )
        )  # fmt: skip
        costs = f"{prefill:15.3f}{layers:12.3f}{layers_closed:13.3f}{step:12.3f}{step_closed:13.3f}"
        costs += f"{row['kv_bytes'] / 1e6:9.3f}"
        times = f"{row['first_token_seconds']:15.3f}{row['tokens_per_second']:10.1f}"
        typer.echo(f"{row['method']:18}{row['vision_tokens']:8}{costs}{times}")


@app.command()
def show(
    model: Model,
    image: Image,
    tokens: Annotated[int, typer.Option(min=1, help="Vision tokens that every method keeps.")] = 144,
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture to write.")] = Path("vision.png"),
    device: Device = None,
    json_output: Json = False,
) -> None:
    """Draw what each method keeps of an image's features, and their spectrum.

    \b
    Example:
      fathom vision show MODEL --image cat.png --tokens 144 -o kept.png
    """
    from fathom.vision.bench import show as draw

    picture = read(image)
    if not output.parent.is_dir():
        raise FileNotFoundError(f"--output {output}: no folder {output.parent}; make it first")
    loaded, processor = load(model, device)
    said = draw(loaded, processor, picture, tokens, output)
    if json_output:
        typer.echo(json.dumps({"picture": str(output), **said}, indent=2))
    else:
        typer.echo(
            f"{output}: the low frequencies of {tokens} tokens hold {said['energy']:.1%} of the features' energy, "
            f"{said['energy_without_mean']:.1%} of what is left without the mean"
        )
        for name, why in said["refused"].items():
            typer.echo(f"not shown: {name}: {why}")


@app.command()
def convert(
    model: Annotated[Path, typer.Argument(help="Folder of a stock model.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new folder.")],
    method: Method = "fourier_vlm",
    tokens: Tokens = None,
    ratio: Ratio = None,
    rescale: Annotated[str | None, typer.Option(help="none or amplitude, for fourier_vlm.")] = None,
) -> None:
    """Write a checkpoint whose config names a compressor of vision tokens; AutoModelForImageTextToText loads it after
    `import fathom`.

    \b
    Example:
      fathom vision convert my-llava -o my-llava-144 --tokens 144
    """
    from fathom.vision import convert_vision

    convert_vision(model, output, chosen(method, tokens, ratio, rescale))
    typer.echo(f"{output}")

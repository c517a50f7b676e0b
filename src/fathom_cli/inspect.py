"""`fathom inspect`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fathom_cli.options import Device, Json


def command(
    checkpoint: Annotated[str, typer.Argument(help="Folder or hub name.")],
    text: Annotated[Path, typer.Option(help="What the checkpoint reads: a file, or a folder as training reads it.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for the PNG files and inspect.html; with --json: none."),
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens read at once; cut to the model's positions.", min=2)] = 1024,
    batch_size: Annotated[int, typer.Option(help="Windows at once.", min=1)] = 8,
    device: Device = None,
    json_output: Json = False,
) -> None:
    """Draw what a checkpoint does with a text. Its methods decide which pictures there are.

    depth_attention: the earlier layers that every layer takes its values from, and for which tokens.
    act, adaponderlm, adaptive_latent_cot, exit_gate, ponderlm3: how many steps each token runs, against its loss and
    kind.
    moe: the experts and groups that tokens run, layer by layer, and the text shaded by group; for the model of a run
    also the load of its experts over training.
    masked: the step of its block in which every token is revealed.
    rope_pp: attention by distance in real and imaginary heads, and the loss that noise on either adds.
    fovea: what every block of tokens reads at which resolution, and what stays unseen (of --window tokens).
    Encoders (our classifiers, BART, T5, LongT5, BERT): energy by frequency along the sequence, layer by layer.

    \b
    Example:
      fathom inspect runs/mine/depth_attention-seed0/model --text book.txt --output inspect
    """
    import torch

    from fathom.evaluate import load_checkpoint, read_documents
    from fathom.evaluate.load_model import load_config, load_encoder
    from fathom.evaluate.text import encode, with_prefix
    from fathom.inspect import Spectrum, nothing_to_show, offered
    from fathom.models.registry import ENCODER, SECTIONS
    from fathom.report.page import describe_options
    from fathom.report.pictures import write_inspection

    documents = read_documents(text)
    stands_alone = not Path(checkpoint).is_dir() or Path(checkpoint, "config.json").is_file()  # is no peft adapter
    encoder = stands_alone and Spectrum.offered(load_config(checkpoint))
    model: Any
    tokenizer: Any
    model, tokenizer = (load_encoder if encoder else load_checkpoint)(checkpoint, device)
    kinds = offered(model.config)
    if not kinds:
        raise nothing_to_show(checkpoint, model.config)
    if encoder:
        ids = torch.cat([torch.tensor(tokens) for tokens in encode(documents, tokenizer)])
    else:
        ids = torch.cat([with_prefix(tokenizer, document) for document in documents])
    pictures = [kind.measure(model, tokenizer, ids, window, batch_size) for kind in kinds]
    if json_output:
        numbers = {picture.name: dataclasses.asdict(picture) for picture in pictures}
        typer.echo(json.dumps({"checkpoint": checkpoint, "text": str(text), **numbers}, indent=2))
    else:
        typer.echo("\n\n".join("\n".join(picture.summary()) for picture in pictures))
        output = output or Path("inspect")
    if output is not None:
        if encoder:
            options = {ENCODER: getattr(model.config, ENCODER, {"name": "full"})}
        else:
            options = {name: getattr(model.config, name) for name in SECTIONS}
        page = write_inspection(checkpoint, str(text), describe_options(options), pictures, output)
        typer.echo(f"Page: {page}", err=json_output)

"""`fathom evaluate`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fathom_cli.options import Device, Json


def command(
    checkpoint: Annotated[str, typer.Argument(help="Folder or hub name; a Fathom or a stock checkpoint.")],
    text: Annotated[Path | None, typer.Option(help="UTF-8 file: perplexity and bits per byte.")] = None,
    tasks: Annotated[str | None, typer.Option(help="lm_eval tasks, separated by commas.")] = None,
    task_dir: Annotated[Path | None, typer.Option(help="Folder of further lm_eval task YAML files.")] = None,
    window: Annotated[int, typer.Option(help="Tokens read at once; cut to the model's positions.", min=1)] = 1024,
    stride: Annotated[int | None, typer.Option(help="Tokens the window moves by; default: half of it.")] = None,
    batch_size: Annotated[int, typer.Option(help="Windows or requests at once.", min=1)] = 8,
    limit: Annotated[int | None, typer.Option(help="Documents scored of each task; default: all.", min=1)] = None,
    device: Device = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Perplexity and bits per byte of a text, or scores on lm_eval tasks.

    Every token of the text is scored once, with at least window - stride tokens of context beyond the first window. The
    text is preceded by the BOS token, or by EOS if the tokenizer has no BOS.

    \b
    Example:
      fathom evaluate runs/demo/vanilla/tokens-700000-seed-0/model --text book.txt --window 512 --stride 256
      fathom evaluate EleutherAI/pythia-160m --tasks lambada_openai,piqa
    """
    if (text is None) == (tasks is None):
        raise ValueError("give either --text FILE or --tasks NAME,NAME")
    if tasks is None and (task_dir is not None or limit is not None):
        raise ValueError("--task-dir and --limit go with --tasks")

    from transformers.utils import logging

    from fathom.evaluate import evaluate_tasks, evaluate_text, load_checkpoint, read_text

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    if text is not None:
        content = read_text(text)
        model, tokenizer = load_checkpoint(checkpoint, device, trust_remote_code)
        score = evaluate_text(model, tokenizer, content, window, stride, batch_size)
        numbers = {"perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte, **dataclasses.asdict(score)}
        result: dict[str, Any] = {"checkpoint": checkpoint, "text": str(text), **numbers}
        lines = [
            f"perplexity     {score.perplexity:.4f} per token ({score.tokens:,} tokens)",
            f"bits per byte  {score.bits_per_byte:.4f} ({score.bytes:,} bytes)",
            f"window {score.window}, stride {score.stride}",
        ]
    else:
        names = [name.strip() for name in str(tasks).split(",") if name.strip()]
        if not names:
            raise ValueError(f"--tasks={tasks!r}: names no task")
        model, tokenizer = load_checkpoint(checkpoint, device, trust_remote_code)
        scores = evaluate_tasks(model, tokenizer, names, task_dir, limit, batch_size)
        result = {"checkpoint": checkpoint, "tasks": scores, "limit": limit}
        lines = [
            f"{task}  {metric}  {value:.4f}" for task, metrics in scores.items() for metric, value in metrics.items()
        ]
    typer.echo(json.dumps(result, indent=2) if json_output else "\n".join(lines))

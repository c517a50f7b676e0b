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
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file, or folder read as training reads it: perplexity and bits per byte."),
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="lm_eval tasks, separated by commas.")] = None,
    task_dir: Annotated[Path | None, typer.Option(help="Folder of further lm_eval task YAML files.")] = None,
    window: Annotated[int, typer.Option(help="Tokens read at once; cut to the model's positions.", min=1)] = 1024,
    stride: Annotated[int | None, typer.Option(help="Tokens the window moves by; default: half of it.")] = None,
    batch_size: Annotated[int, typer.Option(help="Windows or requests at once.", min=1)] = 8,
    limit: Annotated[int | None, typer.Option(help="Documents scored of each task; default: all.", min=1)] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before each question; default: as each task says.", min=0)
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Write questions in the tokenizer's chat template.")
    ] = False,
    device: Device = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Perplexity and bits per byte of a text, or scores on lm_eval tasks.

    Every token of the text is scored once, with at least window - stride tokens of context beyond the first window. The
    text is preceded by the BOS token, or by EOS if the tokenizer has no BOS. Of a folder, and of a JSONL or Parquet
    file, every document is scored so by itself.

    \b
    Example:
      fathom evaluate runs/demo/vanilla/tokens-700000-seed-0/model --text book.txt --window 512 --stride 256
      fathom evaluate EleutherAI/pythia-160m --tasks lambada_openai,piqa
    """
    if (text is None) == (tasks is None):
        raise ValueError("give either --text FILE or --tasks NAME,NAME")
    if tasks is None and (task_dir or limit or num_fewshot is not None or apply_chat_template):
        raise ValueError("--task-dir, --limit, --num-fewshot and --apply-chat-template go with --tasks")

    from transformers.utils import logging

    from fathom.evaluate import (
        TextBound,
        evaluate_tasks,
        evaluate_text,
        find_tasks,
        load_checkpoint,
        read_documents,
    )

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    if text is not None:
        documents = read_documents(text)
        model, tokenizer = load_checkpoint(checkpoint, device, trust_remote_code)
        score = evaluate_text(model, tokenizer, documents, window, stride, batch_size)
        numbers = {"perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte, **dataclasses.asdict(score)}
        result: dict[str, Any] = {"checkpoint": checkpoint, "text": str(text), **numbers}
        lines = [
            f"perplexity     {score.perplexity:.4f} per token ({score.tokens:,} tokens)",
            f"bits per byte  {score.bits_per_byte:.4f} ({score.bytes:,} bytes)",
            *([f"documents      {score.documents:,}, each by itself"] if score.documents > 1 else []),
            f"window {score.window}, stride {score.stride}",
        ]
        if isinstance(score, TextBound):
            result["upper_bound"], result["bits_per_byte_error"] = True, score.bits_per_byte_error
            lines[0] = lines[0] + ", upper bound"
            lines[1] = f"{lines[1]}, upper bound ± {score.bits_per_byte_error:.4f} ({score.draws} draws)"
    else:
        names = [name.strip() for name in str(tasks).split(",") if name.strip()]
        if not names:
            raise ValueError(f"--tasks={tasks!r}: names no task")
        manager = find_tasks(names, task_dir)
        model, tokenizer = load_checkpoint(checkpoint, device, trust_remote_code)
        options: dict[str, Any] = {"num_fewshot": num_fewshot, "apply_chat_template": apply_chat_template}
        scores = evaluate_tasks(model, tokenizer, names, task_dir, limit, batch_size, **options, manager=manager)
        result = {"checkpoint": checkpoint, "tasks": scores, "limit": limit, **options}
        lines = [line for task, metrics in scores.items() for line in _lines(task, metrics)]
    typer.echo(json.dumps(result, indent=2) if json_output else "\n".join(lines))


def _lines(task: str, metrics: dict[str, float]) -> list[str]:
    """'task  acc  0.5000 ± 0.0250', ± being lm_eval's standard error."""
    found = []
    for name, value in metrics.items():
        metric, comma, rest = name.partition(",")
        if not metric.endswith("_stderr"):
            error = metrics.get(f"{metric}_stderr{comma}{rest}")
            found.append(f"{task}  {name}  {value:.4f}" + ("" if error is None else f" ± {error:.4f}"))
    return found

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
    long: Annotated[
        str | None,
        typer.Option(help="Retrieval from long texts: passkey, niah (all four, or one: niah_single …), vt, words."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="With --long: tokens of a text; 1k is 1024.")] = "1k",
    samples: Annotated[int, typer.Option(help="With --long: texts of each task and length.", min=1)] = 40,
    seed: Annotated[int, typer.Option(help="With --long: other texts.")] = 0,
    cache: Annotated[str | None, typer.Option(help="With --long: a cache method; `fathom methods` lists them.")] = None,
    budget: Annotated[int | None, typer.Option(help="With --cache: tokens stored per key/value head.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="With --cache: another option, name=value; repeatable.")
    ] = None,
    chunk: Annotated[int, typer.Option(help="With --cache: tokens read before each compression.", min=1)] = 512,
    device: Device = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Perplexity and bits per byte of a text, scores on lm_eval tasks, or retrieval from long texts (--long).

    Every token of the text is scored once, with at least window - stride tokens of context beyond the first window. The
    text is preceded by the BOS token, or by EOS if the tokenizer has no BOS. Of a folder, and of a JSONL or Parquet
    file, every document is scored so by itself. With --long, TEXT is what secrets are hidden in (default: the embedded
    corpus).

    \b
    Example:
      fathom evaluate runs/demo/vanilla/tokens-700000-seed-0/model --text book.txt --window 512 --stride 256
      fathom evaluate EleutherAI/pythia-160m --tasks lambada_openai,piqa
      fathom evaluate MODEL --long niah,vt --lengths 1k,4k --cache treekv --budget 256 --json
    """
    if long is not None:
        if tasks is not None:
            raise ValueError("give either --tasks NAME,NAME or --long NAME,NAME")
        if task_dir or limit or num_fewshot is not None or apply_chat_template:
            raise ValueError("--task-dir, --limit, --num-fewshot and --apply-chat-template go with --tasks")
        if cache is None and (budget is not None or option):
            raise ValueError("--budget and --option go with --cache NAME")
        _long(
            checkpoint,
            long,
            lengths,
            text,
            samples,
            seed,
            cache,
            budget,
            option,
            chunk,
            batch_size,
            device,
            trust_remote_code,
            json_output,
        )
        return
    if (lengths, samples, seed, chunk, cache, budget, option or None) != ("1k", 40, 0, 512, None, None, None):
        raise ValueError("--lengths, --samples, --seed, --cache, --budget, --option and --chunk go with --long")
    if (text is None) == (tasks is None):
        raise ValueError("give either --text FILE, --tasks NAME,NAME or --long NAME,NAME")
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


def _long(
    checkpoint: str,
    names: str,
    lengths: str,
    text: Path | None,
    samples: int,
    seed: int,
    cache: str | None,
    budget: int | None,
    option: list[str] | None,
    chunk: int,
    batch_size: int,
    device: str | None,
    trust_remote_code: bool,
    json_output: bool,
) -> None:
    """`--long`."""
    from transformers.utils import logging

    from fathom.data.config import EMBEDDED
    from fathom.data.sources import Source
    from fathom.evaluate import evaluate_long, load_checkpoint, read_documents
    from fathom.evaluate.long_context import task_names
    from fathom_cli.cache import parse_method

    tasks = task_names([name.strip() for name in names.split(",") if name.strip()])
    if not tasks:
        raise ValueError(f"--long={names!r}: names no task")
    counts = [_tokens(part) for part in lengths.split(",")]
    method = None if cache is None else parse_method(cache, budget, option)
    documents = Source(EMBEDDED, argument="data.validation").documents() if text is None else read_documents(text)
    filler = "\n\n".join(documents)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    model, tokenizer = load_checkpoint(checkpoint, device, trust_remote_code)
    found = evaluate_long(model, tokenizer, tasks, counts, filler, method, samples, seed, batch_size, chunk)
    settings = {
        "checkpoint": checkpoint,
        "text": EMBEDDED if text is None else str(text),
        "cache": None if method is None else method.to_dict(),
        "samples": samples,
        "seed": seed,
        "chunk": None if method is None else chunk,
    }
    if json_output:
        typer.echo(json.dumps({**settings, **found}, indent=2))
        return
    for kind, chance in found["chance"].items():
        typer.echo(f"{kind} (chance {chance:g}), 95 % intervals of {samples} samples")
        for task, scores in found["tasks"].items():
            cells = [
                f"{n}: {c['score']:.2f} [{c['low']:.2f}, {c['high']:.2f}]" for n, c in scores[kind]["lengths"].items()
            ]
            typer.echo(f"  {task:16} {'  '.join(cells)}{'' if scores[kind]['signal'] else '  no signal'}")
        means = [f"{n}: {'none' if mean is None else f'{mean:.2f}'}" for n, mean in found["mean"][kind].items()]
        typer.echo(f"  {'mean':16} {'  '.join(means)}")


def _tokens(length: str) -> int:
    """'4k' → 4096, '500' → 500."""
    number = length.strip().lower()
    factor = 1024 if number.endswith("k") else 1
    if not number.removesuffix("k").isdecimal() or int(number.removesuffix("k")) == 0:
        raise ValueError(f"--lengths: {length!r} is no number of tokens; write 500, or 4k for 4096")
    return int(number.removesuffix("k")) * factor

"""`fathom evaluate`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fathom_cli.options import Device, Json


def command(
    checkpoint: Annotated[str, typer.Argument(help="Folder or hub name; a Fathom or a stock checkpoint.")],
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            help="UTF-8 file, or folder read as training reads it: perplexity and bits per byte; repeatable.",
        ),
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
        typer.Option(
            help="Long texts: passkey, niah (four), vt, words, frequent_words, facts (three); or position (loss)."
        ),
    ] = None,
    lengths: Annotated[str, typer.Option(help="With --long: tokens of a text; 1k is 1024.")] = "1k",
    samples: Annotated[int, typer.Option(help="With --long: texts of each task and length.", min=1)] = 40,
    seed: Annotated[int, typer.Option(help="With --long: seed of the texts.")] = 0,
    cache: Annotated[str | None, typer.Option(help="With --long: a cache method; `fathom methods` lists all.")] = None,
    budget: Annotated[int | None, typer.Option(help="With --cache: tokens stored per key/value head.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="With --cache: another option, name=value; repeatable.")
    ] = None,
    chunk: Annotated[int, typer.Option(help="With --cache: tokens read before each compression.", min=1)] = 512,
    choices: Annotated[
        str | None,
        typer.Option(help="Files of multiple-choice questions, separated by commas; scored by the predicted letter."),
    ] = None,
    style: Annotated[str, typer.Option(help="With --choices: woa, or wa (prompts end with 'The answer is:').")] = "woa",
    shots: Annotated[
        Path | None,
        typer.Option(
            help="With --choices: file of examples; each subject's first 4 (--num-fewshot) stand before a question."
        ),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="With --choices: folder to write them into as lm_eval tasks.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(help='JSONL of {"question", "answer", "calls"}: score calls of tools (--tools).')
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(help="With --questions: Python file of functions. It is run, so use only a file you trust."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="With --questions: the most calls.", min=0)] = 5,
    device: Device = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Perplexity and bits per byte of a text, scores on lm_eval tasks, retrieval from long texts (--long), multiple
    choice by letters (--choices), or calls of tools (--questions).

    Every token of the text is scored once, with at least window - stride tokens of context beyond the first window. The
    text is preceded by the BOS token, or by EOS if the tokenizer has no BOS. In a folder, and in a JSONL or Parquet
    file, every document is scored by itself. With --long, TEXT is the filler that secrets are hidden in (default: the
    embedded corpus).

    \b
    Example:
      fathom evaluate runs/demo/vanilla/tokens-700000-seed-0/model --text book.txt --window 512 --stride 256
      fathom evaluate EleutherAI/pythia-160m --tasks lambada_openai,piqa
      fathom evaluate MODEL --long niah,vt --lengths 1k,4k --cache treekv --budget 256 --json
      fathom evaluate MODEL --text general.txt --text corpus/domain
      fathom evaluate MODEL --choices mmlu_test.jsonl.xz,geobench_apstudy.json --shots mmlu_dev.jsonl.xz
      fathom evaluate MODEL --questions questions.jsonl --tools my_tools.py
    """
    text = texts[0] if texts else None
    if texts and len(texts) > 1 and long is not None:
        raise ValueError("--long takes one --text")
    if (style, shots, export) != ("woa", None, None) and choices is None:
        raise ValueError("--style, --shots and --export go with --choices FILE,FILE")
    if (questions is None) != (tools is None):
        raise ValueError("--questions and --tools go together: give both")
    if rounds != 5 and questions is None:
        raise ValueError("--rounds goes with --questions")
    modes = {"--text": text if long is None else None, "--tasks": tasks, "--long": long}
    modes |= {"--choices": choices, "--questions": questions}
    if choices is not None or questions is not None:
        given = [name for name, value in modes.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: give one of them at a time")
        model = (checkpoint, device, trust_remote_code)
        if choices is not None:
            _choices(model, choices, style, shots, num_fewshot, export, limit, batch_size, json_output)
        else:
            _tool_calls(model, questions, tools, rounds, limit, json_output)
        return
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

    from fathom.evaluate import (
        evaluate_tasks,
        evaluate_text,
        find_tasks,
        load_checkpoint,
        read_documents,
    )

    if texts:
        domains = [read_documents(path) for path in texts]
        model, tokenizer = load_checkpoint(checkpoint, device, trust_remote_code)
        losses = [evaluate_text(model, tokenizer, documents, window, stride, batch_size) for documents in domains]
        found = [_numbers(path, loss) for path, loss in zip(texts, losses)]
        result: dict[str, Any] = {"checkpoint": checkpoint}
        result |= found[0] if len(found) == 1 else {"texts": found}
        lines = _text_lines(losses[0])
        if len(found) > 1:
            lines = [line for path, loss in zip(texts, losses) for line in (f"{path}:", *_text_lines(loss))]
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


def _numbers(path: Path, score: Any) -> dict[str, Any]:
    """A text's score for --json."""
    from fathom.evaluate import TextBound

    found = {"text": str(path), "perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte}
    found |= dataclasses.asdict(score)
    if isinstance(score, TextBound):
        found |= {"upper_bound": True, "bits_per_byte_error": score.bits_per_byte_error}
    return found


def _text_lines(score: Any) -> list[str]:
    """A text's score for the terminal."""
    from fathom.evaluate import TextBound

    lines = [
        f"perplexity     {score.perplexity:.4f} per token ({score.tokens:,} tokens)",
        f"bits per byte  {score.bits_per_byte:.4f} ({score.bytes:,} bytes)",
        *([f"documents      {score.documents:,}, each by itself"] if score.documents > 1 else []),
        f"window {score.window}, stride {score.stride}",
    ]
    if isinstance(score, TextBound):
        lines[0] = lines[0] + ", upper bound"
        lines[1] = f"{lines[1]}, upper bound ± {score.bits_per_byte_error:.4f} ({score.draws} draws)"
    return lines


def _choices(
    checkpoint: tuple[str, str | None, bool],
    files: str,
    style: str,
    shots: Path | None,
    num_fewshot: int | None,
    export: Path | None,
    limit: int | None,
    batch_size: int,
    json_output: bool,
) -> None:
    """`--choices`."""
    from fathom.evaluate import load_checkpoint
    from fathom.evaluate.letters import (
        SHOTS,
        evaluate_choices,
        export_choices,
        mean_with_signal,
        read_choices,
        scores_of,
    )

    if shots is None and num_fewshot is not None:
        raise ValueError("--num-fewshot goes with --shots FILE here: the questions that are shown come from it")
    paths = [Path(name.strip()) for name in files.split(",") if name.strip()]
    names = [path.name.split(".")[0] for path in paths]
    if not paths or len(set(names)) < len(names):
        raise ValueError(f"--choices={files!r}: names no file, or two of one name")
    if shots is not None and shots.resolve() in {path.resolve() for path in paths}:
        raise ValueError(f"--shots={str(shots)!r}: is scored too; show questions of another file")
    read = {name: read_choices(path)[:limit] for name, path in zip(names, paths)}
    count = SHOTS if num_fewshot is None else num_fewshot
    shown = [] if shots is None else read_choices(shots)
    if export is not None:
        for name, asked in read.items():
            export_choices(export, f"{name}_{style}", asked, style, shown, count)
    model, tokenizer = load_checkpoint(*checkpoint)
    found = {
        name: evaluate_choices(model, tokenizer, asked, style, shown, batch_size, count) for name, asked in read.items()
    }
    mean = mean_with_signal(found)
    if json_output:
        typer.echo(json.dumps({"checkpoint": checkpoint[0], "limit": limit, "choices": found, "mean": mean}, indent=2))
        return
    for name, result in found.items():
        typer.echo(
            "\n".join([f"{name}, {style}, {result['shots']} shown", *(f"  {line}" for line in scores_of(result))])
        )
    if len(found) > 1:
        average = "none differs from guessing" if mean is None else f"{mean:.4f}"
        typer.echo(f"mean, without files at the level of guessing: {average}")


def _tool_calls(
    checkpoint: tuple[str, str | None, bool],
    questions: Any,
    tools: Any,
    rounds: int,
    limit: int | None,
    json_output: bool,
) -> None:
    """`--questions`."""
    from fathom.evaluate import load_checkpoint
    from fathom.evaluate.tool_calls import evaluate_tool_calls, read_questions
    from fathom.tools import load_tools

    asked = read_questions(questions)[:limit]
    known = load_tools(tools)
    model, tokenizer = load_checkpoint(*checkpoint)
    found = evaluate_tool_calls(model, tokenizer, asked, known.values(), rounds)
    if json_output:
        typer.echo(json.dumps({"checkpoint": checkpoint[0], "questions": str(questions), **found}, indent=2))
        return
    for name, share in found.items():
        if isinstance(share, dict):
            error = "" if share["error"] is None else f" ± {share['error']:.4f}"
            typer.echo(f"{name.replace('_', ' '):21} {share['share']:.4f}{error}  n {share['n']:,}")
    typer.echo(f"\n{found['traces'][0]}")


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

    from fathom.data.config import EMBEDDED
    from fathom.data.packing import encode
    from fathom.data.sources import Source
    from fathom.evaluate import evaluate_long, load_checkpoint, nats_by_position, read_documents
    from fathom.evaluate.long_context import task_names
    from fathom_cli.cache import parse_method

    given = [name.strip() for name in names.split(",") if name.strip()]
    tasks = task_names([name for name in given if name != "position"])
    if not given:
        raise ValueError(f"--long={names!r}: names no task")
    if "position" in given and cache is not None:
        raise ValueError(f"--long position with --cache {cache}: it reads a text in one forward; leave out --cache")
    if not tasks and (samples, seed, chunk, batch_size) != (40, 0, 512, 8):
        raise ValueError("--long position: leave out --samples, --seed, --chunk and --batch-size")
    counts = [_tokens(part) for part in lengths.split(",")]
    method = None if cache is None else parse_method(cache, budget, option)
    documents = list(Source(EMBEDDED, argument="data.validation").documents() if text is None else read_documents(text))
    filler = "\n\n".join(documents)
    model, tokenizer = load_checkpoint(checkpoint, device, trust_remote_code)
    found: dict = {}
    if "position" in given:  # first: it is the one to refuse a text, before the tasks have taken their time
        edges = [0, *sorted(set(counts))]
        rows = nats_by_position(model, encode(documents, tokenizer), edges)  # type: ignore[arg-type]
        found["position"] = {"edges": edges, "nats": [sum(column) / len(rows) for column in zip(*rows)], "rows": rows}
    if tasks:
        found |= evaluate_long(model, tokenizer, tasks, counts, filler, method, samples, seed, batch_size, chunk)
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
    if "position" in found:
        edges, nats = found["position"]["edges"], found["position"]["nats"]
        typer.echo(f"nats a token by position, over {len(found['position']['rows'])} documents")
        for low, high, value in zip(edges, edges[1:], nats):
            typer.echo(f"  {low:>8,} to {high - 1:>8,}  {value:.3f}")
    for kind, chance in found.get("chance", {}).items():
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

"""`fathom cache`: generate or score under a compressed cache, compare methods at equal bytes, show what was kept."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from fathom_cli.catalogue import entries
from fathom_cli.options import Device, Json


class DefaultRun(typer.core.TyperGroup):
    """`fathom cache MODEL …` is `fathom cache run MODEL …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=DefaultRun,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Keep fewer bytes of keys and values. `fathom cache MODEL …` is short for `fathom cache run MODEL …`.",
)

Model = Annotated[str, typer.Argument(help="Folder or hub name of a causal language model.")]


def complete_method(incomplete: str) -> list[str]:
    """Names of cache methods, for the shell."""
    return [entry.name for entry in entries() if entry.registry == "cache" and entry.name.startswith(incomplete)]


Method = Annotated[
    str,
    typer.Option(help="Name of a cache method; `fathom methods` lists them.", autocompletion=complete_method),
]
Budget = Annotated[int | None, typer.Option(help="Tokens stored per key/value head, for methods that have a budget.")]
Options = Annotated[list[str] | None, typer.Option("--option", help="Another option, as name=value; repeatable.")]
Text = Annotated[Path | None, typer.Option(help="A text file.")]
Chunk = Annotated[int, typer.Option(min=1, help="Tokens of TEXT read at a time; the cache is compressed in between.")]
DType = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]


def parse_method(name: str, budget: int | None, options: list[str] | None) -> Any:
    """The method from `--method`, `--budget` and `--option name=value` (values are JSON, or plain words)."""
    from fathom.caches import from_dict

    chosen: dict[str, Any] = {"name": name}
    if budget is not None:
        chosen["budget"] = budget
    for option in options or []:
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"--option {option!r}: write it as name=value, for example n_sink=4")
        if key in chosen:
            instead = "choose the method with --method" if key == "name" else f"give {key} once"
            raise ValueError(f"--option {option!r}: {key} is {chosen[key]!r} already; {instead}")
        try:
            chosen[key] = json.loads(value)
        except json.JSONDecodeError:
            chosen[key] = value
    return from_dict(chosen)


def load(model: str, device: str | None, dtype: str) -> tuple[Any, Any]:
    """The model and its tokenizer. Raises ValueError or OSError with a remedy."""
    import torch

    from fathom.evaluate import load_checkpoint

    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"--dtype {dtype!r}: use bfloat16, float16 or float32")
    loaded, tokenizer = load_checkpoint(model, device)
    return loaded.to(getattr(torch, dtype)), tokenizer


def read_text(path: Path) -> str:
    """The text of --text. Raises OSError or ValueError with what is wrong."""
    from fathom.evaluate import read_text

    if not path.is_file():
        raise FileNotFoundError(f"--text {path}: no such file")
    return read_text(path)


def tokens_of(path: Path, content: str, tokenizer: Any, most: int) -> Any:
    """The first `most` tokens of --text, [1,T]. Raises ValueError for a text too short to predict a token."""
    ids = tokenizer(content, return_tensors="pt").input_ids[:, :most]
    if ids.shape[1] < 2:
        raise ValueError(f"--text {path} has {ids.shape[1]} tokens: use a longer text")
    return ids


def check_folder(output: Path) -> None:
    """Raise FileNotFoundError, before anything is measured, if --output has no folder."""
    if not output.parent.is_dir():
        raise FileNotFoundError(f"--output {output}: no folder {output.parent}; make it first")


def digest(path: Path) -> str:
    """16 hex digits of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def write(path: Path, document: dict[str, Any]) -> None:
    """Write JSON so that the file is complete at every moment."""
    temporary = path.with_suffix(f".{os.getpid()}.part")
    temporary.write_text(json.dumps(document, indent=1))
    temporary.replace(path)


def measured(output: Path | None, about: dict[str, Any]) -> dict[tuple[str, float], dict[str, Any]]:
    """The rows of an earlier `bench` in this file, by method and fraction, if it measured the same thing."""
    if output is None or not output.exists():
        return {}
    try:
        document = json.loads(output.read_text())
        rows = {(row["method"], row["fraction"]): row for row in document["rows"]}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--output {output}: it holds something else than a bench; name another file") from None
    for name, value in about.items():
        if document.get(name) != value:
            typer.echo(
                f"--output {output}: measured with {name} {document.get(name)}, now {value}: all rows start again",
                err=True,
            )
            return {}
    return rows


class Remaining:
    """Progress over rows with the time left: a bar in a terminal, lines on standard error elsewhere."""

    def __init__(self, rows: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.rows, self.done, self.timed, self.start = rows, 0, 0, time.monotonic()
        console = Console(stderr=True)
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}")
        self.bar = Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty())
        self.task = self.bar.add_task("rows", total=rows, left="")

    def __enter__(self) -> Remaining:
        if self.bar.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.stop()

    def row_is_done(self, measured: bool) -> None:
        """measured: False for a row that took no time and says nothing about the others."""
        self.done, self.timed = self.done + 1, self.timed + measured
        if not self.timed:
            return
        seconds = (time.monotonic() - self.start) / self.timed * (self.rows - self.done)
        left = f"about {datetime.timedelta(seconds=round(seconds))} left"
        if self.bar.console.is_terminal:
            self.bar.update(self.task, completed=self.done, left=left)
        elif self.done < self.rows:
            typer.echo(f"{self.done} of {self.rows} rows, {left}", err=True)


@app.command("run")
def run(
    model: Model,
    method: Method = "treekv",
    budget: Budget = None,
    option: Options = None,
    text: Text = None,
    prompt: Annotated[str | None, typer.Option(help="Generate from this prompt; without it, TEXT is scored.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    max_tokens: Annotated[int, typer.Option(min=2, help="Score at most this many tokens of TEXT.")] = 8192,
    chunk: Chunk = 64,
    device: Device = None,
    dtype: DType = "bfloat16",
    json_output: Json = False,
) -> None:
    """Generate from a prompt, or score a text, under a compressed cache.

    \b
    Examples:
      fathom cache run MODEL --method treekv --budget 1024 --prompt "Once upon a time"
      fathom cache run MODEL --method weightedkv --budget 256 --text book.txt
    """
    from fathom.caches import compress, compression_report
    from fathom.caches.versions import CACHE_NAME
    from fathom.evaluate.cache_quality import perplexity

    if (text is None) == (prompt is None):
        raise ValueError("give --prompt TEXT to generate, or --text FILE to score it (one of the two)")
    chosen = parse_method(method, budget, option)
    content = read_text(text) if text is not None else None
    loaded, tokenizer = load(model, device, dtype)
    if text is not None and content is not None:
        ids = tokens_of(text, content, tokenizer, max_tokens).to(loaded.device)
        result = perplexity(loaded, ids, chosen, chunk)
        if json_output:
            typer.echo(json.dumps({"method": chosen.to_dict(), **result}, indent=1))
            return
        typer.echo(f"{chosen.name}: {result['tokens']:,} tokens, perplexity {result['perplexity']:.3f}")
        typer.echo("by position: " + " ".join(f"{nll:.3f}" for nll in result["nll_by_position"]) + " nats/token")
        typer.echo(f"cache: {result['bytes']:,} bytes, {result['real_ratio']:.4f} of the full cache")
        if result["note"]:
            typer.echo(f"note: {result['note']}")
        return
    inputs = tokenizer(prompt, return_tensors="pt").to(loaded.device)
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError(f"--prompt {prompt!r} has no tokens: write at least a word")
    with compress(loaded, chosen):
        out = loaded.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, return_dict_in_generate=True)
        written, report = (
            tokenizer.decode(out.sequences[0], skip_special_tokens=True),
            compression_report(out[CACHE_NAME]),
        )
        if json_output:
            typer.echo(json.dumps({"text": written, **report.to_dict()}, indent=1))
            return
        typer.echo(written)
        typer.echo(str(report), err=True)


@app.command("bench")
def bench(
    model: Model,
    text: Annotated[Path, typer.Option(help="Held-out text; it must be longer than --tokens.")],
    tokens: Annotated[int, typer.Option(min=64)] = 2048,
    methods: Annotated[str, typer.Option(help="Comma-separated; default: all that need no calibration file.")] = "",
    fractions: Annotated[
        str, typer.Option(help="Real bytes as fractions of the full cache.")
    ] = "0.5,0.25,0.125,0.0625",
    codebooks: Annotated[str, typer.Option(help="File of codebooks for vqkv.")] = "",
    channels: Annotated[str, typer.Option(help="File of channel sets for fourier_attention.")] = "",
    speed: Annotated[bool, typer.Option(help="Also time single-token steps at --tokens tokens (eager).")] = False,
    recall: Annotated[
        bool,
        typer.Option(help="Also passkey and needle: how many of five secrets hidden in --tokens tokens are found."),
    ] = False,
    chunk: Chunk = 64,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="JSON file of the results, written row by row; rows already in it are not measured again.",
        ),
    ] = None,
    device: Device = None,
    dtype: DType = "bfloat16",
    json_output: Json = False,
) -> None:
    """Perplexity, retrieval and speed of every method at equal real bytes. A method that cannot run says why.

    Each row is written to --output when it is done. Rerun the command to measure only missing rows.

    \b
    Example:
      fathom cache bench MODEL --text book.txt --tokens 4096 --recall --output bench.json
    """
    from fathom.caches import METHODS, cache_shape, method_class
    from fathom.caches.budgets import NotReachable
    from fathom.caches.record import fingerprint
    from fathom.caches.speed import decode_speed
    from fathom.caches.versions import causal_lm
    from fathom.evaluate.cache_quality import grid, perplexity
    from fathom.evaluate.long_context import DEPTHS, FILLER, TASKS

    wrong = ValueError(f"--fractions {fractions!r}: write numbers above 0 up to 1, separated by commas")
    try:
        levels = [float(part) for part in fractions.split(",")]
    except ValueError:
        raise wrong from None
    if not all(0 < level <= 1 for level in levels):
        raise wrong
    if output is not None:
        check_folder(output)
    files = {"codebooks": codebooks, "channels": channels}

    def lacks(name: str) -> str:
        """The name of a calibration file that the method needs and the caller did not give."""
        made = METHODS[name].calibration
        return made.option if made is not None and made.needed and not files.get(made.option) else ""

    every = [name for name, cls in METHODS.items() if cls.role != "adapter"]
    names = methods.split(",") if methods else [name for name in every if not lacks(name)]
    for name in names:
        method_class(name)
    content = read_text(text)
    loaded, tokenizer = load(model, device, dtype)
    ids = tokens_of(text, content, tokenizer, tokens).to(loaded.device)
    if ids.shape[1] < tokens:
        fewer = f" or --tokens {ids.shape[1]}" if ids.shape[1] >= 64 else ""
        raise ValueError(f"--text {text} has {ids.shape[1]} tokens: use a longer text{fewer}")
    shape = cache_shape(loaded)

    def sized(name: str, fraction: float) -> Any:
        """The method at this fraction, or why there is none."""
        made = METHODS[name].calibration
        file = {made.option: files[made.option]} if made is not None and files.get(made.option) else {}
        return METHODS[name].at_fraction(fraction, shape, tokens, chunk, **file)

    def measure(row: dict[str, Any], chosen: Any) -> str:
        """Measure what a row lacks. Returns the line that shows the row."""
        head = f"{row['method']:20} {row['fraction']:<8g}"
        try:
            row |= {} if "perplexity" in row else perplexity(loaded, ids, chosen, chunk)
        except ValueError as refusal:  # of this method on this model
            row["refused"] = str(refusal)
            return f"{head} refused: {refusal}"
        line = f"{head} perplexity {row['perplexity']:9.3f}  real ratio {row['real_ratio']:.4f}"
        for task in TASKS if recall else ():
            filler = content if task == "needle" else FILLER
            if task not in row:
                found = grid(loaded, tokenizer, filler, [tokens], DEPTHS, {tokens: chosen}.get, chunk, task)
                row[task] = found["recall"]
            line += f"  {task} {row[task]:.1f}"
        if speed:
            if "speed" not in row:
                row["speed"] = decode_speed(loaded, chosen, tokens, 1, graph=False, repeats=5)
            line += f"  {row['speed']['tokens_per_second']:8.1f} tokens/s"
        return line

    plan = [("full", 1.0)] + [(name, fraction) for name in names if name != "full" for fraction in levels]
    # all of them before the first is measured: a wrong name or file ends the run here
    chosen_ones = [sized(name, fraction) for name, fraction in plan]
    about = {"model": model, "weights": fingerprint(causal_lm(loaded)), "dtype": dtype, "device": loaded.device.type}
    about |= {"text": digest(text), "tokens": tokens, "chunk": chunk}
    about |= {name: digest(Path(path)) for name, path in files.items() if path}
    rows = measured(output, about)
    for name in filter(lacks, every if not methods else ()):
        made = METHODS[name].calibration.made_by  # type: ignore[union-attr]
        typer.echo(f"{name} is left out: give --{lacks(name)} FILE, which {made} makes", err=True)
    with Remaining(sum(not isinstance(chosen, NotReachable) for chosen in chosen_ones)) as remaining:
        for (name, fraction), chosen in zip(plan, chosen_ones):
            row: dict[str, Any] = {"method": name, "fraction": fraction}
            if isinstance(chosen, NotReachable):
                row["not_reachable"] = chosen.minimum
                line, known = f"{name:20} {fraction:<8g} {chosen}", None
            else:
                row["options"] = chosen.to_dict()
                held = rows.get((name, fraction), {})
                row |= held if held.get("options") == row["options"] else {}
                known = row.keys() >= {"perplexity", *(TASKS if recall else ()), *(["speed"] if speed else [])}
                line = measure(row, chosen) + ("  (measured before)" if known else "")
            rows[name, fraction] = row
            document = {**about, "rows": [rows[key] for key in plan if key in rows]}
            if output is not None:
                write(output, document)
            typer.echo(line, err=json_output)
            if known is not None:
                remaining.row_is_done(measured=not known)
    if json_output:
        typer.echo(json.dumps(document, indent=1))


@app.command("show")
def show(
    model: Model,
    text: Annotated[Path, typer.Option(help="The text to read.")],
    method: Method = "treekv",
    budget: Budget = None,
    option: Options = None,
    max_tokens: Annotated[int, typer.Option(min=2)] = 512,
    chunk: Chunk = 64,
    output: Annotated[Path, typer.Option("--output", "-o", help="Picture: .png, .svg or .pdf.")] = Path("cache.png"),
    device: Device = None,
    dtype: DType = "bfloat16",
    json_output: Json = False,
) -> None:
    """Draw which tokens of a text each layer and head kept. The default budget is 64 tokens.

    \b
    Example:
      fathom cache show MODEL --text page.txt --method treekv --budget 64 --output kept.png
    """
    from fathom.caches import METHODS
    from fathom.caches.show import as_text, draw, kept_tokens
    from fathom.caches.token_budget import TokenBudget
    from fathom.inspect.base import token_texts

    if output.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--output {output}: use a name that ends in .png, .svg or .pdf")
    check_folder(output)
    if budget is None and issubclass(METHODS.get(method, object), TokenBudget):
        budget = 64
    chosen = parse_method(method, budget, option)
    content = read_text(text)
    loaded, tokenizer = load(model, device, dtype)
    ids = tokens_of(text, content, tokenizer, max_tokens).to(loaded.device)
    kept = kept_tokens(loaded, ids, chosen, chunk)
    words = token_texts(tokenizer, ids[0])
    draw(kept, words, chosen.name, output)
    if json_output:
        positions = [[head.nonzero().flatten().tolist() for head in layer] for layer in kept]
        record = {"method": chosen.to_dict(), "words": words, "kept": positions, "picture": str(output)}
        typer.echo(json.dumps(record))
        return
    if sys.stdout.isatty() and len(words) <= 400:
        typer.echo(as_text(kept, words))
    typer.echo(
        f"{chosen.name}: {kept.float().sum(-1).mean():.0f} of {ids.shape[1]} tokens kept per head; picture: {output}"
    )

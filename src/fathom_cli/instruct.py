"""`fathom instruct`."""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from fathom_cli.options import Json


def command(
    corpus: Annotated[str, typer.Argument(help="JSONL or Parquet of documents or records, or a folder of such files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for train.jsonl and held-out.jsonl.")],
    types: Annotated[str | None, typer.Option(help="Types of rows, separated by commas; default: all.")] = None,
    held_out: Annotated[
        float, typer.Option(help="Share of the documents whose rows are held out.", min=0.0, max=0.9)
    ] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of the choice of templates and of held-out documents.")] = 0,
    json_output: Json = False,
) -> None:
    """Make instruction rows from a corpus: titles, abstracts, definitions, captions, entities, relations and more.

    A row keeps its type and its source. All rows of a document are either trained on or held out.

    \b
    Example:
      fathom instruct corpus/corpus -o rows --types title,definition
    """
    from fathom.data.instructions import make_rows
    from fathom.data.sources import Source
    from fathom.writing import write_text

    names = None if types is None else [name.strip() for name in types.split(",") if name.strip()]
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    split: dict[str, list[dict[str, str]]] = {"train": [], "held-out": []}
    if (output / "train.jsonl").exists():
        raise ValueError(f"{output}: holds rows already; name another folder, or remove them")
    part = "train"  # of the record that rows are being made of

    def dealt() -> Iterator[dict[str, Any]]:
        nonlocal part
        for number, (record, _) in enumerate(Source(corpus, argument="CORPUS").rows()):
            part = "held-out" if random.Random(f"{seed} {number}").random() < held_out else "train"
            yield record

    for row in make_rows(dealt(), names, seed, counts=counts):
        split[part].append(row)
    if not split["train"]:
        raise ValueError(f"{corpus}: no row could be made of it; docs/tools.md says what they must hold")
    output.mkdir(parents=True, exist_ok=True)
    for name, rows in sorted(split.items()):  # train.jsonl last: where it is, all is
        write_text(output / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    by_type: dict[str, dict[str, int]] = {name: {} for name in sorted(names or ())}  # one that found nothing says 0
    for (name, what), number in sorted(counts.items()):
        by_type.setdefault(name, {})[what] = number
    found = {"train": len(split["train"]), "held_out": len(split["held-out"]), "types": by_type}
    if json_output:
        typer.echo(json.dumps(found, indent=2))
        return
    for name, numbers in by_type.items():
        dropped = ", ".join(f"{n} {what}" for what, n in numbers.items() if what not in ("found", "made"))
        typer.echo(f"{name:12} {numbers.get('made', 0):,} rows" + (f"; dropped: {dropped}" if dropped else ""))
    typer.echo(f"{output}: {found['train']:,} rows to train on, {found['held_out']:,} held out")

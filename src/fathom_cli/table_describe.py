"""`fathom table describe`: a trained model's description of a table, and the cells that it mentions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fathom_cli.options import Device, Json


def describe(
    checkpoint: Annotated[str, typer.Argument(help="Folder of a model of the task table_to_text.")],
    file: Annotated[Path, typer.Argument(help="CSV file of the table; its first row is the header.")],
    highlight: Annotated[list[str] | None, typer.Option(help="Text of a cell to write about; repeatable.")] = None,
    caption: Annotated[str, typer.Option(help="The table's caption.")] = "",
    background: Annotated[Path | None, typer.Option(help="Text file that the description may draw on.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="Text file of sentences, in which prototypes are found.")] = None,
    plan: Annotated[
        str | None, typer.Option(help='Keys to tell, in order: "name, food". Instead of a planner.')
    ] = None,
    retriever: Annotated[
        str | None,
        typer.Option(help="How background is chosen: tfidf or random; default: the retriever kept with the model."),
    ] = None,
    beams: Annotated[int, typer.Option(min=1, help="Beams of the search.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of the description.")] = 90,
    device: Device = None,
    json_output: Json = False,
) -> None:
    """Describe a table by a trained model.

    Most models read a table as slots: one row as `column: value`, several rows as `first cell column: value`. With
    ctrlscitab the description is about the highlighted cells.

    \b
    Example:
      fathom table describe MODEL scores.csv --highlight 27.5 --caption "Scores of models"
    """
    from fathom.tables.text import metrics
    from fathom.tables.text.generator import TableGenerator
    from fathom.tables.text.linearize import read_csv, sentences
    from fathom.tables.text.retrieval import Random, TfIdf

    if retriever not in (None, "tfidf", "random"):
        raise ValueError(f"--retriever {retriever}: use tfidf or random, without, the one kept with the model chooses")
    facts = sentences(_text(background, "--background")) if background is not None else []
    table = read_csv(file, highlight or (), facts, caption)
    texts = None if corpus is None else _text(corpus, "--corpus").splitlines()
    generator = TableGenerator.from_pretrained(checkpoint, corpus=texts)
    method: Any = generator.method
    if retriever is not None:
        generator.retriever = TfIdf() if retriever == "tfidf" else Random()
    elif generator.retriever is None:
        generator.retriever = TfIdf()
        if facts and getattr(method, "background", False):
            typer.echo("No retriever lies beside the model: TF-IDF chooses the background.", err=True)
    if method.slots and highlight:
        raise ValueError(f"--highlight {highlight[0]}: method {method.name!r} reads tables of slots; use --plan")
    if not method.slots and plan is not None:
        raise ValueError(f"--plan {plan}: method {method.name!r} reads no plan; use --highlight")
    if device is not None:
        generator.model.to(device)
    plans = None if plan is None else [[item.strip() for item in plan.split(",") if item.strip()]]
    (text,) = generator.describe(table, plans, beams=beams, max_new_tokens=new_tokens)
    wanted = table.highlights or tuple(value for value in table.slots().values if value)
    said = {
        "text": text,
        "method": method.name,
        "mentioned": [cell for cell in dict.fromkeys(table.cells) if metrics.mentioned(cell, text)],
        "missed": [cell for cell in dict.fromkeys(wanted) if not metrics.mentioned(cell, text)],
        "coverage": metrics.coverage(text, wanted),
        "off_target": metrics.off_target(text, table) if table.highlights else None,
        "number_precision": metrics.number_precision(text, (*table.header, *table.cells)),
    }
    typer.echo(json.dumps(said, indent=2, ensure_ascii=False) if json_output else text)


def _text(path: Path, option: str) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"{option} {path}: no such file")
    return path.read_text(encoding="utf-8")

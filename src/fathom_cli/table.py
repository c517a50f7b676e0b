"""`fathom table`: ask a database, score predicted queries, show a question's relations, describe a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fathom_cli.options import Device, Json
from fathom_cli.table_describe import describe

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Questions over SQLite files to SQL; tables to text.",
)
app.command()(describe)

Checkpoint = Annotated[str, typer.Argument(help="Folder of a model that task text_to_sql has trained.")]
File = Annotated[Path, typer.Option(help="An SQLite file, opened read-only.")]
Question = Annotated[str, typer.Argument(help="What to ask.")]
Before = Annotated[
    list[str] | None, typer.Option(help="An earlier question of the dialogue, oldest first; repeatable.")
]


def load(checkpoint: str, device: str | None) -> tuple[Any, Any]:
    """The model and its tokenizer. Raises OSError or ValueError with a remedy."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    import fathom  # noqa: F401  its models are known to the Auto classes then
    from fathom.evaluate.load_model import refuse_other_families
    from fathom.models.device import device_of

    refuse_other_families(checkpoint, ("fathom_t5", "t5"), "a model that task text_to_sql has trained")
    place = device_of(device)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    return model.to(place).eval(), AutoTokenizer.from_pretrained(checkpoint)


@app.command()
def ask(
    checkpoint: Checkpoint,
    question: Question,
    db: File,
    before: Before = None,
    picard: Annotated[bool, typer.Option(help="Only queries that the database's schema allows.")] = True,
    beams: Annotated[int, typer.Option(min=1, help="Beams of the search.")] = 4,
    rows: Annotated[int, typer.Option(min=1, help="The most rows to print.")] = 20,
    parses: Annotated[Path | None, typer.Option(help="CoNLL-U of the turns, for models that read parses.")] = None,
    device: Device = None,
    json_output: Json = False,
) -> None:
    """Answer a question about a database: the query and its rows.

    \b
    Example:
      fathom table ask MODEL "How many singers are there?" --db concert_singer.sqlite
    """
    from fathom.tables.ask import ask as answer
    from fathom.tables.database import Database
    from fathom.tables.picard import Picard
    from fathom.tables.spoken import read_conllu, spoken_turns

    turns = [*(before or ()), question]
    spoken = None if parses is None else spoken_turns(turns, 0, None, read_conllu(parses))
    with Database(db) as database:
        model, tokenizer = load(checkpoint, device)
        reply = answer(model, tokenizer, database, turns, spoken, Picard() if picard else None, beams)
    found = reply.answer
    if json_output:
        said = {"query": reply.query, "columns": found and found.columns, "rows": found and found.rows[:rows]}
        more = {"fault": reply.fault, "cut": reply.cut, "unwritable": reply.unwritable}
        typer.echo(json.dumps({**said, **more}, indent=2, default=str))
        return
    if reply.cut:
        typer.echo(f"Left out: {reply.cut}.", err=True)
    if reply.unwritable:
        names = ", ".join(reply.unwritable[:5]) + (", …" if len(reply.unwritable) > 5 else "")
        typer.echo(f"No query could name {names}: PICARD's grammar has no quoted names; use --no-picard.", err=True)
    typer.echo(reply.query)
    if found is None:
        raise ValueError(f"the query does not run: {reply.fault}")
    for row in [found.columns, *found.rows[:rows]]:
        typer.echo("\t".join("" if value is None else str(value) for value in row))
    if len(found.rows) > rows:
        typer.echo(f"… and {len(found.rows) - rows:,} rows more")


@app.command()
def score(
    gold: Annotated[Path, typer.Argument(help="Right queries: lines `query<TAB>database`, JSONL or a JSON list.")],
    predicted: Annotated[Path, typer.Argument(help="Predicted queries: a line each, or JSON rows with `query`.")],
    db: Annotated[Path | None, typer.Option(help="Folder of SQLite files.")] = None,
    schemas: Annotated[list[Path] | None, typer.Option(help="A file like Spider's tables.json; repeatable.")] = None,
    suites: Annotated[int, typer.Option(min=0, help="Filled databases of a test suite for each database.")] = 0,
    without: Annotated[list[str] | None, typer.Option(help="A database to leave out; repeatable.")] = None,
    json_output: Json = False,
) -> None:
    """Score predicted queries of any system by exact set match and execution, by hardness and by dialogue.

    In text files an empty line ends a dialogue, as in the official scripts of SParC and CoSQL. Execution on a
    database's own rows is told apart from that on made-up ones, of --suites, where it has no file.

    \b
    Example:
      fathom table score dev_gold.sql predictions.txt --db database --schemas tables.json
    """
    from fathom.models.registry import nearest
    from fathom.tables.questions import Databases, read_gold, read_predicted, summary, verdict
    from fathom.tables.suites import suites_of

    questions = read_gold(gold)
    said = read_predicted(predicted, len(questions))
    if len(said) != len(questions):
        raise ValueError(
            f"{predicted}: has {len(said)} queries, and {gold} has {len(questions)}; give one for each, in files with "
            "dialogues a word such as `none` where there is no prediction"
        )
    for name in without or ():
        known = {question.database for question in questions}
        if name not in known:
            raise ValueError(f"--without {name}: {gold} has no such database{nearest(name, list(known))}")
    pairs = [pair for pair in zip(said, questions, strict=True) if pair[1].database not in (without or ())]
    if not pairs:
        raise ValueError(f"--without leaves no question of {gold}")
    questions = [question for _, question in pairs]
    if db is None and not schemas:
        raise ValueError("--db or --schemas is needed: a folder of SQLite files, or a file like Spider's tables.json")
    if db is not None and not db.is_dir():
        raise FileNotFoundError(f"--db {db}: no such folder of SQLite files")
    with Databases(db, schemas) as databases:
        more = suites_of(questions, databases, suites) if suites else None
        found = summary([verdict(*pair, databases, more) for pair in pairs], questions)
    if len({question.interaction for question in questions}) == len(questions):  # no question follows another
        del found["interaction_exact"], found["interaction_execution"]
    if json_output:
        typer.echo(json.dumps(found, indent=2))
        return
    for name in ("exact", "execution", "runs", "interaction_exact", "interaction_execution"):
        if name not in found:
            continue
        value = found[name]
        of = f" of {found[f'{name}_of']:,}" if f"{name}_of" in found else ""
        typer.echo(f"{name:24}{'not known' if value is None else f'{value:.3f}'}{of}")
    own = "rows of file and suite" if suites else "the file's rows"
    labels = {"the file's": own, "made up": "made up rows"}
    parts = {labels[rows]: part for rows, part in found["by_rows"].items() if rows != "none"}
    for level, part in {**found["by_hardness"], **parts}.items():
        shown = [f"{key} {value:.3f}" for key in ("exact", "execution") if (value := part[key]) is not None]
        typer.echo(f"  {level:22}{part['questions']:6,} questions  {'  '.join(shown)}")


@app.command()
def show(
    checkpoint: Checkpoint,
    question: Question,
    db: File,
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture to write.")] = Path("table.png"),
    before: Before = None,
    device: Device = None,
    json_output: Json = False,
) -> None:
    """Draw the relation of each word of a question to the schema, and the attention that follows it.

    \b
    Example:
      fathom table show MODEL "How many singers are there?" --db concert_singer.sqlite -o relations.png
    """
    from fathom.tables.ask import attention_of
    from fathom.tables.database import Database
    from fathom.tables.picture import KINDS, draw, matches

    if not output.parent.is_dir():
        raise FileNotFoundError(f"--output {output}: no folder {output.parent}; make it first")
    with Database(db) as database:
        model, tokenizer = load(checkpoint, device)
        made, attention = attention_of(model, tokenizer, database, [*(before or ()), question])
    draw(made, attention).savefig(output, dpi=120)
    words, parts, kind, _ = matches(made)
    counts = {name: int((kind == index).sum()) for index, name in enumerate(KINDS)}
    if json_output:
        typer.echo(json.dumps({"picture": str(output), "words": words, "schema": parts, "matches": counts}, indent=2))
    else:
        said = ", ".join(f"{count} {name}" for name, count in counts.items())
        typer.echo(f"{output}: {len(words)} words × {len(parts)} parts of the schema: {said}")

"""Three tools as examples: a calculator, a table that is looked up, and passages of a corpus that are retrieved.

A file for `fathom generate --tools` may be as short as

    from fathom.tools.examples import calculator, passages, table

    TOOLS = [calculator, table("minerals.csv"), passages("curated/")]
"""

from __future__ import annotations

import ast
import csv
import math
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fathom.data.bm25 import load_bm25s
from fathom.models.registry import nearest
from fathom.tools.tool import Tool

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_FUNCTIONS = {name: getattr(math, name) for name in ("sqrt", "exp", "log", "log10", "sin", "cos", "tan")}
_LARGEST = 1e300  # of every number on the way
PASSAGE = 400  # characters that passages have at least, but for a document's last


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: such as 2 * (3 + sqrt(4))
    """
    if len(expression) > 500:
        raise ValueError("the expression is longer than 500 characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError):
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> int | float:
    """Every part of an expression but numbers, operators and functions of the tables above is refused."""
    value: Any
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.Name) and node.id in ("pi", "e"):
        value = getattr(math, node.id)
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and left and abs(right) * math.log10(max(abs(left), 1e-300)) > 300:
            raise ValueError("a number is too large")
        value = _OPERATORS[type(node.op)](left, right)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        if len(node.args) != 1 or node.keywords:
            raise ValueError(f"{node.func.id} takes one number")
        value = _FUNCTIONS[node.func.id](_value(node.args[0]))
    else:
        raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")
    if isinstance(value, complex) or not abs(value) <= _LARGEST:
        raise ValueError("a number is too large, or not real")
    return value  # type: ignore[no-any-return]


def table(path: str | Path, name: str = "look_up") -> Tool:
    """A tool that looks up the cell of a CSV file, whose first column names the rows and whose first line the columns.

    Raises OSError, or ValueError that names the file, for one that has no rows or rows of unequal lengths.
    """
    with Path(path).open(encoding="utf-8-sig", newline="") as stream:
        lines = [line for line in csv.reader(stream) if line]
    if len(lines) < 2 or len(lines[0]) < 2:
        raise ValueError(f"{path}: a table needs a line of names, a row and two columns")
    for number, line in enumerate(lines, start=1):
        if len(line) != len(lines[0]):
            raise ValueError(f"{path}, row {number}: {len(line)} cells, and the first has {len(lines[0])}")
    columns = lines[0][1:]
    cells = {line[0].strip().lower(): dict(zip(columns, line[1:])) for line in lines[1:]}
    if len(set(columns)) < len(columns) or len(cells) < len(lines) - 1:
        raise ValueError(f"{path}: two rows or two columns have one name, so that a look-up could mean either")

    def look_up(row: str, column: str) -> str:
        found = cells.get(row.strip().lower())
        if found is None:
            raise ValueError(f"there is no {lines[0][0]} {row!r}{nearest(row.lower(), list(cells))}")
        return found[column]

    parameters = {
        "type": "object",
        "properties": {
            "row": {"type": "string", "description": f"the {lines[0][0]}"},
            "column": {"type": "string", "enum": columns},
        },
        "required": ["row", "column"],
    }
    described = {"name": name, "description": f"Look up a value of a {lines[0][0]}.", "parameters": parameters}
    return Tool(look_up, {"type": "function", "function": described})


def passages(path: str | Path, name: str = "search", k: int = 3) -> Tool:
    """A tool that finds the `k` passages of a corpus that fit a query best, by BM25. The corpus is read as
    `fathom.evaluate.read_documents` reads it: a folder or a file of documents, such as `fathom curate` writes.

    Raises ImportError with the pip command where bm25s is not installed, and what reading raises.
    """
    try:
        bm25s = load_bm25s()
    except ModuleNotFoundError as error:
        raise ImportError(f"passages need bm25s ({error}): pip install 'fathom-lm[curate]'") from error
    from fathom.evaluate import read_documents

    texts = [passage for document in read_documents(path) for passage in _passages(document)]
    words = {"stopwords": "en", "show_progress": False}
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, **words), show_progress=False)

    def search(query: str) -> str:
        asked = bm25s.tokenize([query], **words, return_ids=False)
        if not asked[0]:
            return "nothing found"
        places, scores = index.retrieve(asked, k=min(k, len(texts)), show_progress=False)
        found = [texts[place] for place, score in zip(places[0].tolist(), scores[0].tolist()) if score > 0]
        return "\n".join(found) or "nothing found"

    query = {"type": "string", "description": "words to look for"}
    parameters = {"type": "object", "properties": {"query": query}, "required": ["query"]}
    described = {"name": name, "description": "Find passages of the corpus.", "parameters": parameters}
    return Tool(search, {"type": "function", "function": described})


def _passages(document: str) -> Iterator[str]:
    """Paragraphs of a document in a line each, short ones together."""
    held = ""
    for paragraph in re.split(r"\n\s*\n", document):
        held = f"{held} {' '.join(paragraph.split())}".strip()
        if len(held) >= PASSAGE:
            yield held
            held = ""
    if held:
        yield held

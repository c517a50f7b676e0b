"""Every page of the documentation, cards and results included: its commands and its Python name what exists.

tests/test_guides.py runs what README and the guides say; here commands are only parsed, also those within a sentence.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

from test_guides import commands, fences, parse

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "api"),
]
PLACES = {"N": "4", "P": "64"}  # numbers that a sentence leaves open


def within_sentences(page: str) -> list[str]:
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [part for code in re.findall(r"`(fathom [a-z][^`]*)`", text) for part in code.replace("\n", " ").split("; ")]


def arguments(command: str) -> list[str]:
    words = [PLACES.get(word, word) for word in shlex.split(command)]
    return words[words.index("fathom") + 1 :] if "fathom" in words else []


def test_the_pages_are_found():
    assert len(PAGES) > 100 and {"docs/diffusion.md", "docs/methods/akg.md", "docs/results/caches.md"} <= set(PAGES)


def test_commands_of_all_pages_parse():
    found = [(page, command) for page in PAGES for command in commands(page) if arguments(command)]
    assert len(found) > 80
    for page, command in found:
        if "--install-completion" not in command:  # that one would change the shell's files
            assert parse(arguments(command)).command.callback, (page, command)


def test_commands_within_sentences_name_verbs_and_options_that_exist():
    found = [(page, command) for page in PAGES for command in within_sentences(page)]
    assert len(found) > 80
    for page, command in found:
        try:
            parse(arguments(command))
        except Exception as error:  # typer's copy of click has no public name; a sentence may leave arguments out
            left_out = type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError")
            assert left_out or "requires an argument" in str(error), (page, command, str(error))


def test_python_of_the_pages_imports_names_that_exist():
    blocks = [(page, block) for page in PAGES for block in fences(page, "python")]
    assert len(blocks) > 20
    for page, block in blocks:
        for node in ast.walk(ast.parse(block, page)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fathom":
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    if not hasattr(module, name.name):
                        importlib.import_module(f"{node.module}.{name.name}")

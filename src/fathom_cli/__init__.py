"""The command `fathom`: one file a verb.

A verb's module is imported only when the verb is used or listed. `fathom_cli.<verb>` has either a function `command`
with typer annotations, whose docstring is the help, or a `typer.Typer` called `app` with commands of its own.

The package stands beside `fathom` because importing `fathom` imports torch: help, the list of methods and completion
answer without it. So a verb imports `fathom` in its body, never at the top of its file.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from typing import Any

import typer
import typer.core

VERBS = {  # name -> the object that holds it, in the order of `fathom --help`
    "curate": "fathom_cli.curate:command",
    "train": "fathom_cli.train:command",
    "compare": "fathom_cli.compare:command",
    "grow": "fathom_cli.grow:command",
    "instruct": "fathom_cli.instruct:command",
    "generate": "fathom_cli.generate:command",
    "export": "fathom_cli.export:command",
    "serve": "fathom_cli.serve:command",
    "evaluate": "fathom_cli.evaluate:command",
    "judge": "fathom_cli.judge:command",
    "inspect": "fathom_cli.inspect:command",
    "cost": "fathom_cli.cost:command",
    "methods": "fathom_cli.methods:command",
    "cache": "fathom_cli.cache:app",
    "lineage": "fathom_cli.lineage:app",
    "vision": "fathom_cli.vision:app",
    "video": "fathom_cli.video:app",
    "latents": "fathom_cli.latents:app",
    "table": "fathom_cli.table:app",
}
PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}


def nearest(word: str, known: list[str]) -> str:
    """' (did you mean …?)' for the known name closest to `word`, or an empty string."""
    match = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


class Verbs(typer.core.TyperGroup):
    """The table above as a group of commands, each loaded on demand."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, place in VERBS.items() if importlib.util.find_spec(place.split(":")[0])]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            ctx.fail(f"No such command {cmd_name!r}{nearest(cmd_name, list(VERBS))}.")  # typer knows no lazy names
        module, attribute = VERBS[cmd_name].split(":")
        verb = getattr(importlib.import_module(module), attribute)
        if not isinstance(verb, typer.Typer):
            single = typer.Typer(add_completion=False, **PLAIN)
            single.command(cmd_name)(verb)
            verb = single
        command = typer.main.get_command(verb)
        command.name = cmd_name
        return command


app = typer.Typer(cls=Verbs, no_args_is_help=True, **PLAIN)


@app.callback()
def fathom(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error. May stand anywhere."),
) -> None:
    """Published language-model methods on today's PyTorch and Hugging Face stack, measured beside their baselines."""


def main() -> None:
    """Console script. A failure is one line on stderr and exit code 2; `--debug` shows the traceback as well."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    if arguments[:1] == ["--version"]:
        print(f"fathom {importlib.metadata.version('fathom-lm')}")
        return
    if not sys.stderr.isatty():
        _hide_progress_bars()
    try:
        app(arguments, prog_name="fathom")
    except KeyboardInterrupt:  # while a verb is still being imported; the verbs and typer see to the rest
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        print(f"fathom: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)


def _hide_progress_bars() -> None:
    """Those of the libraries that the verbs use, here and in the processes that they start: a pipe or a log cannot
    redraw a line."""
    for library in ("HF_HUB", "HF_DATASETS"):
        os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    if "transformers" in sys.modules:  # under `python -m fathom`; it looked at the environment when it was imported
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    expected = isinstance(error, ValueError | OSError | ImportError) and text
    return text if expected else f"{type(error).__name__}: {text} (--debug shows where)"

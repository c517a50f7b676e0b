"""The command `fathom`: one file a verb.

A verb's module is imported only when the verb is used or listed. `fathom.cli.<verb>` has either a function `command`
with typer annotations, whose docstring is the help, or a `typer.Typer` called `app` with commands of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from typing import Any

import typer
import typer.core

from fathom.models.registry import nearest

VERBS = {  # name -> the object that holds it, in the order of `fathom --help`
    "train": "fathom.cli.train:command",
    "compare": "fathom.cli.compare:command",
    "generate": "fathom.cli.generate:command",
    "evaluate": "fathom.cli.evaluate:command",
    "inspect": "fathom.cli.inspect:command",
    "cost": "fathom.cli.cost:command",
    "methods": "fathom.cli.methods:command",
    "cache": "fathom.cli.cache:app",
    "lineage": "fathom.cli.lineage:app",
}
PLAIN: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}


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
            single = typer.Typer(**PLAIN)
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
        from fathom import __version__

        print(f"fathom {__version__}")
        return
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


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    expected = isinstance(error, ValueError | OSError | ImportError) and text
    return text if expected else f"{type(error).__name__}: {text} (--debug shows where)"

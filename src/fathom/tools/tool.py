"""A tool: a Python function that a model may call, its schema, and a call that always ends in one text.

A tool is nothing but a function that the caller of this library passes, or that stands in a Python file which the
caller names. **That file is code, and it is run**: name only files that you trust. Nothing else is ever called.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import inspect
import json
import re
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import get_json_schema

from fathom.models.registry import nearest
from fathom.tools.schema import check, check_schema

LONGEST = 2000  # characters of a result that a model reads
SECONDS = 10.0  # that a call may take
_NAME = re.compile(r"[A-Za-z_][\w.-]*")


class ToolError(Exception):
    """The error of a failed call, in one line that the model reads as its result."""


@dataclass(frozen=True)
class Tool:
    """A function and its schema, `{"type": "function", "function": {"name", "description", "parameters"}}`."""

    function: Callable[..., Any]
    schema: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """The tool of a function whose signature has types and whose docstring (Google style) describes its arguments:
        transformers makes the schema of both. Raises ValueError where it cannot, or would restrict what is not checked.
        """
        name = getattr(function, "__name__", type(function).__name__)
        if not callable(function):
            raise ValueError(f"tool {function!r}: is no function")
        if any(
            kind(function)
            for kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        ):
            raise ValueError(f"tool {name!r}: is async or yields, and a call needs a function that returns its result")
        try:
            schema = get_json_schema(function)
        except Exception as error:  # of transformers' own kinds, and of what type hints may raise
            line = " ".join(str(error).split())
            raise ValueError(
                f"tool {name!r}: no schema can be made of it ({line}); give its arguments types, and a docstring with "
                "`Args:` that describes each"
            ) from None
        called = schema["function"]["name"]
        if not _NAME.fullmatch(called):
            raise ValueError(f"tool {called!r}: a name of letters, digits, '_', '.' and '-' is needed")
        check_schema(schema["function"]["parameters"], f"tool {name!r}")
        return cls(function, schema)

    def call(self, arguments: Any, seconds: float = SECONDS) -> str:
        """The function's result for checked arguments, as text of at most `LONGEST` characters.

        Raises ToolError, in one line, for arguments that do not fit the schema, for a function that raises, and for one
        that takes longer than `seconds`. It runs in a thread: at the limit a loop in Python is ended, and a call that
        waits elsewhere is left behind; C code that keeps Python's lock, as regular expressions do, is waited for.
        What it prints goes to stderr.
        """
        if not isinstance(arguments, dict):
            raise ToolError(f"{self.name}: the arguments must be a JSON object, got {type(arguments).__name__}")
        try:
            check(arguments, self.schema["function"]["parameters"], self.name)
        except ValueError as error:
            raise ToolError(_line(error)) from None
        found: dict[str, Any] = {}

        def run() -> None:
            try:
                found["text"] = _text(self.function(**arguments))
            except BaseException as error:  # what it may raise is the tool's affair
                found["error"] = error

        thread = threading.Thread(target=run, daemon=True, name=f"tool-{self.name}")
        with contextlib.redirect_stdout(sys.stderr):  # what a tool prints is no part of an answer
            thread.start()
            thread.join(seconds)
        if thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
            raise ToolError(f"{self.name}: took longer than {seconds:g} s")
        if "error" in found:
            raise ToolError(f"{self.name}: {type(found['error']).__name__}: {_line(found['error'])}")
        return str(found["text"])


def load_tools(path: str | Path) -> dict[str, Tool]:
    """The tools of a Python file, by name: those that its list `TOOLS` names, or else every public function defined in
    it. **The file is run.**

    Raises FileNotFoundError, or ValueError that names the file and what is wrong with it.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; --tools takes a Python file with functions")
    name = f"fathom_tools_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: is no Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and type hints of the file look themselves up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path}: cannot be run ({type(error).__name__}: {_line(error)})") from error
    functions = getattr(module, "TOOLS", None)
    if functions is None:
        functions = [
            value
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == name and not key.startswith("_")
        ]
    if not isinstance(functions, list | tuple) or not functions:
        raise ValueError(f"{path}: defines no function, and no list TOOLS of some")
    try:
        return as_tools(functions)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def as_tools(functions: Iterable[Callable[..., Any] | Tool]) -> dict[str, Tool]:
    """Tools by name. Raises ValueError for two of one name."""
    found: dict[str, Tool] = {}
    for function in functions:
        tool = function if isinstance(function, Tool) else Tool.of(function)
        if tool.name in found:
            raise ValueError(f"tool {tool.name!r}: there are two of this name")
        found[tool.name] = tool
    return found


def call(tools: dict[str, Tool], name: str, arguments: Any, seconds: float = SECONDS) -> str:
    """The result of a tool. Raises ToolError, in one line, where none has that name, and as `Tool.call` does."""
    if name not in tools:
        raise ToolError(f"tool {name[:60]!r} does not exist{nearest(name, list(tools))}; there are {', '.join(tools)}")
    return tools[name].call(arguments, seconds)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text.strip().encode("utf-8", "replace").decode()  # names of files may be no text
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text) - LONGEST:,} characters are left out)"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].encode("utf-8", "replace").decode()

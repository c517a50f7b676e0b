"""Every global name that a function reads exists.

ruff cannot say so here: shapes in annotations ("B T d") look like undefined names to it. The byte code has
none of them.
"""

from __future__ import annotations
import __future__

import builtins
import dis
import types
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
OF_EVERY_MODULE = {"__file__", "__name__", "__path__", "__spec__", "__doc__", "__annotations__", *dir(builtins)}


def undefined(source: str, name: str = "module") -> set[str]:
    top = compile(source, name, "exec", __future__.annotations.compiler_flag)
    codes, read, known = [top], set(), set(OF_EVERY_MODULE)
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for step in dis.get_instructions(code):
            if step.opname == "STORE_GLOBAL" or (step.opname == "STORE_NAME" and code is top):
                known.add(step.argval)
            if step.opname == "LOAD_GLOBAL" or (step.opname == "LOAD_NAME" and code is top):
                read.add(step.argval)
    return read - known


def test_a_lost_name_is_found():
    assert undefined("import os\ndef f(x: Float['B T']) -> y:\n    return [os, *(x for x in z)]") == {"z"}
    assert undefined("def f():\n    def g():\n        return lost\n    return g") == {"lost"}


def test_names_exist():
    files = sorted(SOURCES.rglob("*.py"))
    assert len(files) > 200
    missing = {str(file.relative_to(SOURCES)): undefined(file.read_text(), str(file)) for file in files}
    assert {file: names for file, names in missing.items() if names} == {}

"""Every method of every wing, read from the sources of `fathom` without importing them (that would import torch).

A method is found wherever it stands in the package, in one of three forms:

    @register("depth", "name")                a class that plugs into a section of the config
    class …: name = "…"; summary = "…"        a class that is used by itself, such as a cache
    METHODS = {"name": Fingerprint(…), …}     functions: one entry each, in a wing's __init__.py

`summary`, `paper` and `equation` are literals of the class or of a base. Options are the fields of its dataclass (the
class `Options` in it, or itself), with what the dataclass's docstring says of each: `name: meaning`. Cost and verdict
are kept where they are measured, on the method's card.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "fathom"
NAMES = re.compile(r"([a-z]\w*(?:, [a-z]\w*)*):\s+(.*)")  # of options, before their meaning


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a method. `default` is its value, or its source text where that is no literal."""

    name: str
    type: str
    default: Any
    meaning: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """One method.

    registry: the config section that takes it (then `section` is true), or the wing's API.
    source: the file that defines it, relative to the package's parent folder.
    call: its name in Python.   verb: a command of its own.
    """

    name: str
    wing: str
    registry: str
    section: bool
    paper: str
    summary: str
    equation: str
    options: tuple[Option, ...]
    source: str
    call: str
    verb: str = ""

    @property
    def card(self) -> Path | None:
        """The path of its card: installed with the package, or in the repository."""
        for folder in (Path(__file__).parent / "cards", Path(__file__).parents[2] / "docs" / "methods"):
            if (folder / f"{self.name}.md").is_file():
                return folder / f"{self.name}.md"
        return None

    @property
    def cost(self) -> str:
        return self._on_card("Cost")

    @property
    def verdict(self) -> str:
        return self._on_card("Verdict")

    def _on_card(self, title: str) -> str:
        """The text of the card's bullet with this title, on one line; "" if there is none."""
        card = self.card
        found = card and re.search(rf"^- \*\*{title}\*\*: (.*(?:\n  .*)*)", card.read_text(encoding="utf-8"), re.M)
        return " ".join(found.group(1).split()) if found else ""


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All methods: those of the config's sections first, then wing by wing, each in the order of their names."""
    spec = importlib.util.find_spec(PACKAGE)  # finds, does not import
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    found: list[Entry] = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "@register(" in text or re.search(r"^(    summary = |METHODS = \{)", text, re.M):
            found += list(Module(root, path).methods())
    return tuple(sorted(found, key=lambda entry: (not entry.section, entry.wing, entry.registry, entry.name)))


class Module:
    """The top-level statements of one file, and the classes and functions that its names mean."""

    def __init__(self, root: Path, path: Path):
        self.root, self.path = root, path
        self.statements = _statements(path)

    def methods(self) -> Iterator[Entry]:
        for (kind, name), source in self.statements.items():
            if kind == "class" and re.search(r"^@register\(|^    name = ", source, re.M):
                view = Class(self, self._parsed(kind, name))
                name, registry = _registered(view.node)
                name = name or (view.own("name") if isinstance(view.own("name"), str) else "")
                if name and view.get("summary"):
                    yield self._of_class(view, name, registry)
            elif name == "METHODS":
                yield from self._of_table(self._parsed(kind, name).value)

    def _parsed(self, kind: str, name: str) -> Any:
        return _parse(self.statements[kind, name])

    def _of_class(self, view: Class, name: str, registry: str) -> Entry:
        wing = view.get("wing") or self._wing()
        return Entry(
            name=name,
            wing=wing,
            registry=registry or view.get("registry") or wing,
            section=bool(registry),
            paper=view.get("paper") or "",
            summary=_line(view.get("summary")),
            equation=_line(view.get("equation") or ""),
            options=(view.find("Options") or view).options(),
            source=self._place(),
            call=view.node.name,
        )

    def _of_table(self, table: ast.expr) -> Iterator[Entry]:
        if not isinstance(table, ast.Dict):
            return
        for key, value in zip(table.keys, table.values):
            if not (isinstance(key, ast.Constant) and isinstance(value, ast.Call)):
                return
            said = {word.arg: ast.literal_eval(word.value) for word in value.keywords if word.arg}
            call = said["call"]
            takes = self.load(said.get("options", call))
            yield Entry(
                name=ast.literal_eval(key),
                wing=self._wing(),
                registry=self._wing(),
                section=False,
                paper=said["paper"],
                summary=_line(said["summary"]),
                equation=_line(said["equation"]),
                options=takes.options() if takes else (),
                source="/".join(call.split(".")[:-1]) + ".py",
                call=call,
                verb=said.get("verb", ""),
            )

    def _wing(self) -> str:
        return self.path.relative_to(self.root).parts[0]

    def _place(self) -> str:
        return str(self.path.relative_to(self.root.parent))

    def load(self, dotted: str) -> Class | Function | None:
        """`fathom.module.name`."""
        module, _, name = dotted.rpartition(".")
        path = self.root.joinpath(*module.split(".")[1:])
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        return Module(self.root, file).resolve(name) if file.is_file() else None

    def resolve(self, name: str) -> Class | Function | None:
        """The class or function that a name of this file means, wherever in the package it is defined."""
        outer, _, inner = name.rpartition(".")
        if outer:
            found = self.resolve(outer)
            return found.find(inner) if isinstance(found, Class) else None
        if ("class", name) in self.statements:
            return Class(self, self._parsed("class", name))
        if ("def", name) in self.statements:
            return Function(self._parsed("def", name))
        for (kind, _), text in self.statements.items():
            if kind == "from" and re.search(rf"\b{name}\b", text):
                node = _parse(text)
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.load(f"{node.module}.{alias.name}")
        return None


class Class:
    """A class's literals and fields, its bases' included."""

    def __init__(self, module: Module, node: ast.ClassDef):
        self.module, self.node = module, node

    def bases(self) -> Iterator[Class]:
        for base in self.node.bases:
            found = self.module.resolve(ast.unparse(base))
            if isinstance(found, Class):
                yield found

    def own(self, name: str) -> Any:
        """The literal that the class body gives to a name, or None."""
        for node in self.node.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and target.id == name and getattr(node, "value", None) is not None:
                return _literal(node.value)  # type: ignore[attr-defined]
        return None

    def get(self, name: str) -> Any:
        own = self.own(name)
        return own if own is not None else next((v for base in self.bases() if (v := base.get(name)) is not None), None)

    def find(self, name: str) -> Class | None:
        """The class of that name inside this one."""
        for node in self.node.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return Class(self.module, node)
        return next((found for base in self.bases() if (found := base.find(name))), None)

    def meanings(self) -> dict[str, str]:
        said: dict[str, str] = {}
        for base in reversed(list(self.bases())):
            said |= base.meanings()
        return said | _meanings(self.node)

    def fields(self) -> dict[str, tuple[str, Any]]:
        """Name → (type, default) of the dataclass fields, in the order of `__init__`."""
        fields: dict[str, tuple[str, Any]] = {}
        for base in reversed(list(self.bases())):
            fields |= base.fields()
        if any("dataclass" in ast.unparse(decorator) for decorator in self.node.decorator_list):
            for node in self.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    annotation = ast.unparse(node.annotation)
                    if annotation.startswith("ClassVar"):
                        fields.pop(node.target.id, None)  # a base's field, of one value here
                    elif node.value is not None:
                        fields[node.target.id] = (annotation, _literal(node.value))
        return fields

    def options(self) -> tuple[Option, ...]:
        meanings = self.meanings()
        return tuple(
            Option(name, kind, default, meanings.get(name, "")) for name, (kind, default) in self.fields().items()
        )


class Function:
    """A function whose keywords are a method's options."""

    def __init__(self, node: ast.FunctionDef):
        self.node = node

    def options(self) -> tuple[Option, ...]:
        meanings, arguments = _meanings(self.node), self.node.args
        return tuple(
            Option(word.arg, ast.unparse(word.annotation), _literal(default), meanings[word.arg])
            for word, default in zip(arguments.kwonlyargs, arguments.kw_defaults)
            if word.annotation and default and word.arg in meanings  # what has no meaning here is for the caller's sake
        )


@functools.cache
def _statements(path: Path) -> dict[tuple[str, str], str]:
    """(kind, name) → source of a file's classes, functions, tables of methods and imports of this package.

    Cut out as text, because parsing whole files would take most of the time of `fathom methods`. Of a class only what
    stands before its methods is kept: its literals, its fields and its options belong there.
    """
    text = path.read_text(encoding="utf-8")
    start = re.search(r"^(from|import) ", text, re.M)  # after the docstring, whose lines look like statements
    found: dict[tuple[str, str], str] = {}
    held = ""
    for part in re.split(r"^(?=[^\s)\]}#])", text[start.start() :] if start else "", flags=re.M):
        held += part
        if part.startswith("@"):  # a decorator goes with what it decorates
            continue
        named = re.match(rf"(class|def|from) ({PACKAGE}\b[\w.]*|\w+)|(METHODS)\b.* = \{{", part)
        if named and (named.group(1) != "from" or named.group(2).split(".")[0] == PACKAGE):
            kind, name = named.group(1) or "table", named.group(2) or named.group(3)
            found[kind, name] = _without_methods(held) if kind == "class" else held
        held = ""
    return found


def _without_methods(source: str) -> str:
    """A class up to its first method, and the classes in it without theirs."""
    method = re.search(r"^    (def |@(?!dataclass))", source, re.M)
    source = source[: method.start()] + "    pass\n" if method else source
    return re.sub(r"^        (def |@).*?(?=^ {0,7}\S|\Z)", "", source, flags=re.M | re.S)


def _parse(source: str) -> Any:
    return ast.parse(source).body[0]


def _registered(node: ast.ClassDef) -> tuple[str, str]:
    """(name, registry) of `@register(registry, name)`, or two empty strings."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "register":
            registry, name = (ast.literal_eval(argument) for argument in decorator.args)
            return name, registry
    return "", ""


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _line(text: str) -> str:
    return " ".join(text.split())


def _meanings(node: ast.ClassDef | ast.FunctionDef) -> dict[str, str]:
    """Lines `name: meaning`, or `name, name: meaning`, of a docstring, with the indented lines that follow."""
    said: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(ast.get_docstring(node, clean=False) or "").splitlines():
        found = NAMES.fullmatch(line)
        if found:
            names = found.group(1).split(", ")
            said |= dict.fromkeys(names, found.group(2).strip())
        elif names and line.startswith(" "):
            said |= {name: f"{said[name]} {line.strip()}" for name in names}
        else:
            names = []
    return said

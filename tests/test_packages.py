"""Imports between the packages of fathom go one way, as docs/architecture.md draws them."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"


def package(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "fathom"


def imported(path: Path) -> set[str]:
    """Modules of fathom that are imported when the file's own module is; not what its functions import when called."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "fathom":
                found |= {f"fathom.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("fathom.")}


def test_no_two_packages_need_each_other_to_be_imported():
    graph: dict[str, set[str]] = {}
    for path in SOURCES.glob("fathom/**/*.py"):
        own = package(".".join(path.relative_to(SOURCES).with_suffix("").parts))
        graph.setdefault(own, set()).update(package(name) for name in imported(path))
    assert len(graph) > 20
    for own, needed in graph.items():
        needed.discard(own)
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError with the circle
    assert order.index("ops") < order.index("models") < order.index("train")

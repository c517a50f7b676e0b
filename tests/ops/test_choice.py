"""An op picks its kernel behind its own name: who asks, what importing needs, and the plain forms that have no test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import fathom
from fathom.ops.range_attention import range_attention
from fathom.ops.token_blocks import sees, token_ranges

ROOT = Path(fathom.__file__).parent
OPS = sorted(path.parent for path in ROOT.glob("ops/*/kernel.py"))


def imports(path: Path, lazy: bool) -> set[str]:
    """Names of modules that a file imports, at its top or, with `lazy`, anywhere."""
    nodes = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(nodes) if lazy else nodes.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def module(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_importing_never_needs_triton():
    for path in ROOT.rglob("*.py"):
        if path.name != "kernel.py":
            names = imports(path, lazy=False)
            assert not {name for name in names if name.split(".")[0] == "triton" or name.endswith(".kernel")}, path


def test_nobody_but_an_op_asks_for_kernels():
    assert len(OPS) > 10
    for path in ROOT.rglob("*.py"):
        if path.parent not in OPS and path.name != "kernels.py":
            assert "has_kernel" not in path.read_text(encoding="utf-8"), path
            assert not {name for name in imports(path, lazy=True) if name.endswith(".kernel")}, path


def test_ops_import_in_no_circle():
    """Imports within functions count, but for those of an op's own kernel."""
    graph = {}
    for path in ROOT.glob("ops/**/*.py"):
        own = f"{module(path)}.kernel"
        graph[module(path)] = {
            name for name in imports(path, lazy=True) if name.startswith("fathom.ops") and name != own
        }
    for name, names in graph.items():
        graph[name] = names & set(graph)
    done: set[str] = set()
    while len(done) < len(graph):
        free = {name for name, names in graph.items() if names - {name} <= done} - done
        assert free, {name: names - done for name, names in graph.items() if name not in done}
        done |= free


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_plain_range_attention_equals_a_loop(dtype):
    """Two segments, a query that sees nothing, grouped heads, a bias; with its gradient."""
    generator = torch.Generator().manual_seed(0)
    keys = [torch.arange(9), torch.tensor([2, 3, 7, 8])]
    query, first = torch.tensor([0, 1, 3, 5, 8]), torch.tensor([0, 0, 2, 2, 8])
    ranges, seen = token_ranges(query, keys, first, 3), sees(query[None], torch.cat(keys)[None], first[None])[0]
    ranges.stop[:, 0] = ranges.start[:, 0]
    seen[0] = False
    q = torch.randn(1, 4, 5, 8, generator=generator).to(dtype).requires_grad_()
    k, v = (torch.randn(1, 2, 13, 8, generator=generator).to(dtype) for _ in range(2))
    bias = torch.randn(13, generator=generator)
    found = range_attention(q, k, v, ranges, 0.4, bias)
    expected = torch.zeros(1, 4, 5, 8, dtype=torch.float64)
    for head in range(4):
        for i in range(1, 5):
            places = seen[i].nonzero()[:, 0]
            scores = 0.4 * k[0, head // 2, places].double() @ q[0, head, i].double() + bias[places].double()
            expected[0, head, i] = scores.softmax(0) @ v[0, head // 2, places].double()
    limit = 1e-6 if dtype == torch.float64 else 2e-2
    assert found.dtype == dtype and (found - expected).abs().max() < limit
    (gradient,) = torch.autograd.grad(found.double().square().sum(), q)
    (wanted,) = torch.autograd.grad(expected.square().sum(), q)
    assert (gradient - wanted).abs().max() < 4 * limit

"""docs/caches.md: its Python runs as written, its command lines parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from cache_cases import codebooks
from typer.testing import CliRunner

from fathom_cli.cache import app

GUIDE = Path(__file__).parents[2] / "docs" / "caches.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def test_python(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-llama").symlink_to(folder)
    (tmp_path / "calibration.txt").write_text((folder / "text.txt").read_text())
    source = "\n".join(blocks("python"))
    names = {}
    exec(compile(source, str(GUIDE), "exec"), names)
    assert names["second"].shape[1] > names["turn"].input_ids.shape[1] > names["first"].shape[1]
    assert {"codebooks.safetensors", "channels.json"} <= {path.name for path in tmp_path.iterdir()}


def test_command_lines(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("book.txt", "page.txt"):
        (tmp_path / name).symlink_to(folder / "text.txt")
    (tmp_path / "codebooks.safetensors").symlink_to(codebooks("llama"))
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(lines) == 4
    for line in lines:
        args = shlex.split(line, comments=True)
        assert args[:2] == ["fathom", "cache"]
        small = [{"MODEL": str(folder), "4096": "64"}.get(arg, arg) for arg in args[2:]]
        done = CliRunner().invoke(app, small)
        assert done.exit_code == 0, (line, done.exception)

"""docs/diffusion.md: its Python runs as written, and its commands do what they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tiny_checkpoint import TEXT, run_cli, save_masked

PAGE = (Path(__file__).parents[2] / "docs" / "diffusion.md").read_text(encoding="utf-8")


def test_the_python_of_the_guide_runs(tmp_path, capsys):
    save_masked(tmp_path / "model", TEXT, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(code.replace('"MODEL"', repr(str(tmp_path / "model"))), names)
    assert names["filled"].shape == names["text"].shape and names["factor"] >= 1
    assert "full" in capsys.readouterr().out


def test_the_commands_of_the_guide(tmp_path, monkeypatch, capsys):
    save_masked(tmp_path / "model", TEXT, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    lines = re.findall(r"^fathom generate .*$|`(fathom cost [^`]*)`", PAGE, flags=re.M)
    generate = next(line for line in PAGE.splitlines() if line.startswith("fathom generate"))
    for line in (generate, *filter(None, lines)):
        words = [str(tmp_path / "model") if word == "MODEL" else word for word in shlex.split(line)[1:]]
        code, out, err = run_cli(monkeypatch, capsys, *words)
        assert code == 0 and out, err

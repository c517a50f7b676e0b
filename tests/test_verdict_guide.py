"""docs/claim_to_verdict.md is a notebook: its cells run in order, on less text and smaller models."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from fathom.report.results import Results
from tiny_checkpoint import run_cli

PAGE = (Path(__file__).parents[1] / "docs/claim_to_verdict.md").read_text()
TOKENS = 512  # of the page's 700,000


def shrunken(text: str) -> str:
    recipe = yaml.safe_load(text)
    recipe["model"] |= {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    recipe["methods"][2]["num_hidden_layers"] = 2
    recipe["data"] |= {"tokenizer": {"bpe": 300}, "block_size": 32, "max_tokens": 2048, "max_validation_tokens": 2048}
    recipe["training"] |= {"tokens": TOKENS, "sequences": 4}
    recipe["seeds"], recipe["retrain"] = [0, 1], 1
    return yaml.safe_dump(recipe)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for language, cell in re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        if language == "yaml":
            Path("claim.yaml").write_text(shrunken(cell))
        elif language == "python":
            capsys.readouterr()
            exec(compile(cell, "claim_to_verdict.md", "exec"), names)
            assert capsys.readouterr().out
        else:
            for line in cell.splitlines():
                words = shlex.split(line.replace("700000", str(TOKENS)))
                code, out, err = run_cli(monkeypatch, capsys, *words[1:])
                assert code == 0 and out, (line, err)
    assert names["verdict"] in ("holds", "holds partly", "not told apart", "does not hold at this size")
    results = Results.load(Path("runs/claim/results.json"))
    again = [run for run in results.runs if run.again]
    assert len(results.runs) == 7 and all(run.held_out for run in results.runs)
    assert [run.folder for run in again] == [f"vanilla/tokens-{TOKENS}-seed-0-again-1"]
    assert results.runs[0].scores == again[0].scores  # on a CPU a run is itself
    card = Path(f"runs/claim/resformer/tokens-{TOKENS}-seed-0/model/README.md").read_text()
    assert "license: apache-2.0" in card and "| bits_per_byte |" in card

"""`fathom vision` on a tiny random LLaVA: what a user reads, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig
from vision_cases import pair, picture

import fathom
from fathom.vision import METHODS
from tiny_checkpoint import run_cli


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    for part in pair("llava"):
        part.save_pretrained(folder / "model")
    picture(60, 90).save(folder / "image.png")
    return folder


@pytest.fixture
def run(monkeypatch, capsys, place):
    def run(verb, *arguments):
        arguments = [str(argument) for argument in arguments]
        return run_cli(monkeypatch, capsys, "vision", verb, str(place / "model"), *arguments)

    return run


def test_see_answers_with_the_tokens_asked_for(run, place):
    what = ("--image", place / "image.png", "--prompt", "what")
    _, out, _ = run("see", *what, "--tokens", 9, "--new-tokens", 3, "--json")
    assert json.loads(out)["vision_tokens"] == 9


@pytest.mark.parametrize(
    ("method", "share"), [("fourier_vlm", ", or the kept share of each side by --ratio"), ("divprune", "")]
)
def test_without_a_count_the_option_to_give_is_named(run, place, method, share):
    code, _, err = run("see", "--image", place / "image.png", "--prompt", "what", "--method", method)
    assert code != 0 and err.strip().endswith(f"of every image --method {method} keeps{share}") and "--tokens" in err


def test_bench_has_a_row_for_every_method_at_equal_tokens(run, place):
    _, out, _ = run("bench", "--image", place / "image.png", "--tokens", 9, "--new-tokens", 2, "--json")
    rows = {row["method"]: row for row in json.loads(out)}
    assert set(rows) == set(METHODS)
    full, layers, heads, width = rows.pop("all_tokens"), 2, 1, 8
    for row in [full, *rows.values()]:
        if "refused" not in row:
            own = row["method"] == "sparsevlm"  # it rates and merges between layers, by products of its own
            assert (row["language_flops"] > row["language_flops_closed"]) == own
            assert own or row["language_flops"] == row["language_flops_closed"] < row["prefill_flops"]
            watched = row["method"] in ("prumerge", "visionzip")  # the tower's attention is computed a second time
            assert (row["tower_flops"] > row["tower_flops_closed"]) == watched
            assert watched or row["tower_flops"] == row["tower_flops_closed"] < row["prefill_flops"]
            assert row["step_flops"] == row["step_flops_closed"]
            assert row["kv_bytes"] == row["kv_bytes_closed"] and 0 < row["step_flops"] < row["prefill_flops"]
    assert "the language model has 2 layers; use less" in rows.pop("fastv")["refused"]
    assert "weights of its own" in rows.pop("mqt")["refused"]
    late = rows.pop("sparsevlm")  # its first layer reads all
    assert late["vision_tokens"] == 36 and full["kv_bytes"] - late["kv_bytes"] == 2 * heads * width * (36 - 9) * 4
    assert full["vision_tokens"] == 36 and {row["vision_tokens"] for row in rows.values()} == {9}
    for row in rows.values():
        assert full["kv_bytes"] - row["kv_bytes"] == 2 * layers * heads * width * (36 - 9) * 4
        assert row["prefill_flops"] < full["prefill_flops"]


def test_show_writes_a_picture_and_convert_a_checkpoint(run, place, tmp_path):
    picture = tmp_path / "kept.png"
    _, out, _ = run("show", "--image", place / "image.png", "--tokens", 9, "--output", picture, "--json")
    said = json.loads(out)
    assert picture.read_bytes().startswith(b"\x89PNG") and 0 < said["energy"] < 1
    assert set(said["methods"]) | set(said["refused"]) == set(METHODS) - {"all_tokens", "dct_coefficients"}
    assert set(said["refused"]) == {"fastv", "mqt"}  # of two layers, and without the weights
    assert run("convert", "--output", tmp_path / "ours", "--tokens", 9)[0] == 0
    path = tmp_path / "ours" / "config.json"
    config = json.loads(path.read_text())
    assert config["model_type"] == "fathom_llava" and config["vision_compress"]["tokens"] == 9
    assert config["fathom_version"] == fathom.__version__
    path.write_text(json.dumps({**config, "vision_compress": {"name": "later"}, "fathom_version": "99.1"}))
    with pytest.raises(ValueError, match=r"method 'later' does not exist.* by fathom 99\.1, .*pip install --upgrade"):
        AutoConfig.from_pretrained(tmp_path / "ours")


@pytest.mark.parametrize("page", ["README.md", "docs/vision.md"])
def test_python_of_the_guides(page):
    text = Path(__file__).parents[2].joinpath(page).read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "compress_vision" in block]
    assert blocks
    model, processor = pair("llava")
    names = {"model": model, "processor": processor, "image": picture(60, 90)}
    for code in blocks:
        exec(code.replace("144", "9"), names)
        length = names["inputs"].input_ids.shape[1]
        assert (names["inputs"].input_ids == 2).sum() == 9 and names["output"].shape[1] > length


def test_a_picture_without_pillow_names_what_to_install(run, place, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    code, _, err = run("see", "--image", place / "image.png", "--prompt", "what", "--tokens", 9)
    assert code != 0 and "needs Pillow: pip install 'fathom-lm[media]'" in err and err.count("\n") == 1


def test_what_cannot_be_read_is_refused_in_a_line(run, place, tmp_path):
    (tmp_path / "cut.png").write_bytes((place / "image.png").read_bytes()[:200])
    (tmp_path / "text.png").write_text("no image")
    for file in ("cut.png", "text.png"):
        code, _, err = run("see", "--image", tmp_path / file, "--prompt", "what", "--tokens", 9)
        assert code != 0 and f"{file}: not a readable image" in err and err.count("\n") == 1
    code, _, err = run("see", "--image", tmp_path / "no.png", "--prompt", "what", "--tokens", 9)
    assert code != 0 and "no.png: no such file" in err

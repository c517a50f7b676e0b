"""The verb `fathom cache` on a saved tiny model with a real tokenizer file."""

from __future__ import annotations

import json
import re

import pytest
import torch
from cache_cases import get_model
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from fathom.caches import FreqKV, Full, TreeKV, compress, compression_report, from_dict
from fathom.caches.report import CompressionReport
from fathom.caches.show import as_text, kept_tokens
from fathom.caches.versions import CACHE_NAME
from fathom.evaluate import cache_quality
from fathom.evaluate.cache_quality import grid
from fathom.evaluate.long_context import DEPTHS, FILLER
from fathom_cli.cache import app


def invoke(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_generate_and_score(folder):
    done = invoke(folder, "--method", "treekv", "--budget", 32, "--prompt", "one two", "--max-new-tokens", 5)
    assert done.exit_code == 0, done.exception
    assert "one two" in done.output and "slots per head    6" in done.output
    done = invoke(
        folder, "--method", "h2o", "--budget", 16, "--text", folder / "text.txt", "--option", "n_sink=2", "--chunk", 8
    )
    assert done.exit_code == 0, done.exception
    assert "h2o: 99 tokens, perplexity" in done.output and "of the full cache" in done.output


def test_a_cache_larger_than_a_full_one_says_why(folder):
    text = folder / "text.txt"
    done = invoke(folder, "--method", "h2o", "--budget", 256, "--text", text, "--option", "n_sink=2")
    assert "note: larger than a full cache: nothing was evicted, all 100 tokens fit" in done.output
    done = invoke(folder, "--method", "treekv", "--budget", 64, "--prompt", "one two", "--max-new-tokens", 5)
    assert "larger than a full cache: nothing was evicted, all 6 tokens fit" in done.output
    done = invoke(folder, "--method", "tova", "--budget", 16, "--text", text)
    assert "perplexity" in done.output and "larger than" not in done.output


def test_the_note_does_not_say_that_nothing_was_evicted_when_something_was():
    parts = {"method": {"name": "h2o"}, "rows": 1, "untouched_layers": 0, "untouched_bytes": 0}
    report = CompressionReport(**parts, tokens_seen=100, slots=(99,), compressed_bytes=120, full_bytes=100)
    assert "outweigh what was evicted" in report.note and report.note in str(report)
    assert report.to_dict()["note"] == report.note


@pytest.mark.parametrize(("method", "note"), [(Full(), False), (FreqKV(budget=64), True), (FreqKV(budget=16), False)])
def test_the_note_says_where_nothing_was_compressed(method, note):
    model, ids = get_model("llama"), torch.arange(1, 41)[None]
    with compress(model, method):
        report = compression_report(model(ids)[CACHE_NAME])
    assert report.note == ("as large as a full cache: nothing was compressed, all 40 tokens fit" if note else "")


def test_bench_and_show(folder, tmp_path):
    out = tmp_path / "bench.json"
    done = invoke("bench", folder, "--text", folder / "text.txt", "--tokens", 96, "--fractions", "0.5,0.01",
                  "--methods", "treekv,tova,kivi", "--output", out, "--chunk", 16)  # fmt: skip
    assert done.exit_code == 0, done.exception
    assert "kivi                 0.5      refused: KIVI(group=32): must divide the head dim 8" in done.output
    rows = json.loads(out.read_text())["rows"]  # and the others are measured all the same
    assert [("perplexity" in row, "refused" in row) for row in rows if row["fraction"] == 0.5] == [
        (True, False), (True, False), (False, True),
    ]  # fmt: skip
    done = invoke("bench", folder, "--text", folder / "text.txt", "--tokens", 96, "--fractions", "0.5,0.01",
                  "--methods", "treekv,tova", "--output", out, "--chunk", 16, "--speed")  # fmt: skip
    assert done.exit_code == 0, done.exception
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows] == ["full", "treekv", "treekv", "tova", "tova"]
    assert all(row["real_ratio"] <= 0.5 for row in rows if row["fraction"] == 0.5)
    assert all(0.01 < row["not_reachable"] < 0.5 for row in rows if row["fraction"] == 0.01)
    assert "vqkv is left out" not in done.output  # methods were named
    done = invoke("show", folder, "--text", folder / "text.txt", "--budget", 16, "--output", tmp_path / "kept.png")
    assert done.exit_code == 0, done.exception
    assert (tmp_path / "kept.png").read_bytes()[:4] == b"\x89PNG" and "16 of 100 tokens" in done.output


def test_bench_holds_its_bytes_where_a_call_may_be_too_short_to_be_compressed(folder, tmp_path):
    """The tail of 96 tokens in calls of 35 is 26, shorter than the window of SnapKV: it counts. 31: refused."""
    out = tmp_path / "bench.json"
    for chunk in (35, 31):
        done = invoke("bench", folder, "--text", folder / "text.txt", "--tokens", 96, "--fractions", "0.7",
                      "--methods", "snapkv,pyramidkv,tova", "--output", out, "--chunk", chunk)  # fmt: skip
        assert done.exit_code == 0, done.exception
        rows = json.loads(out.read_text())["rows"][1:]
        assert all(row["real_ratio"] <= 0.7 for row in rows if "real_ratio" in row)
        assert ["refused" in row for row in rows] == ([True, True, False] if chunk == 31 else [False] * 3)
    assert "chunk=31: SnapKV compresses only after calls of at least 32 tokens" in rows[0]["refused"]


def test_bench_counts_the_secrets_found(folder, tmp_path):
    """At --tokens tokens and with every depth its own secret: the grid of `fathom.evaluate.cache_quality`, by hand."""
    out, text, tokens = tmp_path / "bench.json", folder / "text.txt", 90
    done = invoke("bench", folder, "--text", text, "--tokens", tokens, "--fractions", "0.5", "--methods", "tova",
                  "--output", out, "--chunk", 16, "--recall", "--dtype", "float32")  # fmt: skip
    assert done.exit_code == 0, done.exception
    rows = json.loads(out.read_text())["rows"]
    tokenizer, model = PreTrainedTokenizerFast.from_pretrained(folder), get_model("llama")
    for row in rows:
        for task, filler in (("passkey", FILLER), ("needle", text.read_text())):
            expected = grid(
                model, tokenizer, filler, [tokens], DEPTHS, lambda _, row=row: from_dict(row["options"]), 16, task
            )
            assert row[task] == expected["recall"]
        assert f"passkey {row['passkey']:.1f}  needle {row['needle']:.1f}" in done.output


def test_what_is_shown_is_what_is_kept():
    """Sinks and recents of every head, and exactly budget tokens."""
    ids = torch.randint(1, 97, (1, 60), generator=torch.Generator().manual_seed(0))
    kept = kept_tokens(get_model("llama"), ids, TreeKV(budget=20, n_sink=3, n_recent=8, block=2), chunk=10)
    assert kept.shape == (3, 2, 60) and (kept.sum(-1) == 20).all()
    assert kept[..., :3].all() and kept[..., -8:].all()
    assert "w0·9" in as_text(kept, [f"w{i}" for i in range(60)])


def test_json_is_all_that_stdout_holds(folder, tmp_path):
    text = folder / "text.txt"
    small = ("--method", "tova", "--budget", 16, "--json")
    scored = json.loads(invoke(folder, "--text", text, *small).stdout)
    assert scored["method"]["budget"] == 16 and scored["tokens"] == 99
    written = json.loads(invoke(folder, "--prompt", "one two", "--max-new-tokens", 3, *small).stdout)
    assert written["text"].startswith("one two") and written["tokens_seen"] == 4
    bench = invoke("bench", folder, "--text", text, "--tokens", 64, "--methods", "tova", "--fractions", "0.5", "--json")
    assert [row["method"] for row in json.loads(bench.stdout)["rows"]] == ["full", "tova"]
    shown = json.loads(invoke("show", folder, "--text", text, *small, "--output", tmp_path / "kept.png").stdout)
    assert [len(head) for layer in shown["kept"] for head in layer] == [16] * 6


def test_errors_name_the_remedy(folder, tmp_path):
    (tmp_path / "short.txt").write_text("one")
    for args, words in (
        ((folder,), "--prompt"),
        ((folder, "--text", tmp_path / "none"), "no such file"),
        ((folder, "--prompt", "x", "--method", "treekvv"), "treekv"),
        ((folder, "--prompt", "x", "--option", "n_sink"), "name=value"),
        ((folder, "--prompt", "x", "--option", "n_sinks=3"), "n_sink"),
        (
            (folder, "--prompt", "x", "--option", "name=h2o"),
            "name is 'treekv' already; choose the method",
        ),
        ((folder, "--prompt", "x", "--budget", 8, "--option", "budget=9"), "budget is 8 already; give budget once"),
        ((folder, "--prompt", "x", "--method", "kivi", "--option", "bits=4.0"), "bits=4.0): use an integer"),
        ((folder, "--text", folder / "text.txt", "--method", "snapkv", "--chunk", 16), "use chunk ≥ 32"),
        ((folder, "--prompt", "x", "--dtype", "fp8"), "bfloat16"),
        (("show", folder, "--text", folder / "text.txt", "--output", "x.txt"), ".png"),
        (("show", folder, "--text", folder / "text.txt", "--method", "freqkv"), "no kept tokens"),
        (("bench", folder, "--text", folder / "text.txt", "--tokens", 5000), "longer text or --tokens 100"),
        (("bench", folder, "--text", folder / "text.txt", "--tokens", 64, "--methods", "full,tovaa"), "mean 'tova'?"),
        (("bench", tmp_path, "--text", folder / "text.txt", "--methods", "tovaa"), "mean 'tova'?"),  # before the model
        (("bench", folder, "--text", folder / "text.txt", "--tokens", 64, "--methods", "tova,vqkv"), "codebooks"),
        (("bench", folder, "--text", folder / "text.txt", "--fractions", "0,0.5"), "above 0 up to 1"),
        (("bench", folder, "--text", folder / "text.txt", "--output", tmp_path / "no" / "x.json"), "make it first"),
        (("show", folder, "--text", folder / "text.txt", "--method", "kivi", "--option", "group=8"), "no kept"),
        (("show", folder, "--text", folder / "text.txt", "--output", tmp_path / "no" / "x.png"), "make it first"),
        ((folder, "--prompt", ""), "--prompt '' has no tokens"),
        ((folder, "--prompt", "x", "--method", "full", "--budget", 5), "it has none"),
        ((folder, "--text", tmp_path / "short.txt"), "short.txt has 1 tokens: use a longer text"),
    ):
        done = invoke(*args)
        assert isinstance(done.exception, (ValueError, OSError)) and words in str(done.exception), (
            args,
            done.exception,
        )


def test_bench_writes_each_row_and_goes_on_where_it_was_stopped(folder, tmp_path, monkeypatch):
    """Stopped in the third row: two are in the file, and the same call measures the others only."""
    out, calls, real = tmp_path / "bench.json", [], cache_quality.perplexity
    args = ("bench", folder, "--text", folder / "text.txt", "--tokens", 96, "--fractions", "0.5,0.25,0.01",
            "--methods", "tova,kivi", "--output", out, "--chunk", 16)  # fmt: skip

    def stop_at(number):
        def perplexity(model, ids, method, chunk):
            if len(calls) == number:
                raise KeyboardInterrupt
            calls.append(method.name)
            return real(model, ids, method, chunk)

        monkeypatch.setattr(cache_quality, "perplexity", perplexity)

    stop_at(2)
    assert invoke(*args).exit_code != 0
    first = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in first] == ["full", "tova"] and not list(tmp_path.glob("*.part"))
    stop_at(None)
    done = invoke(*args)
    assert done.exit_code == 0, done.exception
    assert "tova                 0.5      perplexity" in done.output and "(measured before)" in done.output
    assert re.search(r"3 of 4 rows, about \d+:\d\d:\d\d left", done.stderr)
    rows = json.loads(out.read_text())["rows"]
    assert rows[:2] == first and len(rows) == 7
    assert calls == ["full", "tova", "tova", "kivi"]  # of kivi, refused, nothing can be taken over
    calls.clear()
    invoke(*args, "--recall")  # what a row lacks is added to it
    again = json.loads(out.read_text())["rows"]
    assert calls == ["kivi"] and "passkey" in again[1]
    assert {key: value for key, value in again[1].items() if key not in ("passkey", "needle")} == rows[1]


def test_bench_does_not_mix_measurements(folder, tmp_path):
    """Another text, chunk or model starts again and says so; a file of something else is left alone."""
    out, other = tmp_path / "bench.json", tmp_path / "other.txt"
    other.write_text((folder / "text.txt").read_text() + " one")
    args = ("--tokens", 96, "--fractions", "0.5", "--methods", "tova", "--output", out)
    invoke("bench", folder, "--text", folder / "text.txt", *args)
    for given, words in (
        ((folder, "--text", other), "measured with text"),
        ((folder, "--text", other, "--chunk", 32), "measured with chunk 64, now 32: all rows start again"),
        ((folder, "--text", other, "--chunk", 32, "--dtype", "float32"), "measured with dtype bfloat16, now float32"),
    ):
        done = invoke("bench", *given, *args)
        assert done.exit_code == 0 and words in done.stderr and "measured before" not in done.output
        assert "measured before" in invoke("bench", *given, *args).output
    out.write_text('{"rows": 3}')
    assert "something else than a bench" in str(invoke("bench", folder, "--text", other, *args).exception)
    assert out.read_text() == '{"rows": 3}'

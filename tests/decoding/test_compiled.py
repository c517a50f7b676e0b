"""`generate(compile_config=…)`: recorded steps whose layers run one compiled function, tokens as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

import fathom.decoding.loop as loop
from fathom.caches import Full, compress
from fathom.decoding import growing
from fathom.models.hf_versions import CACHE_NAME
from tiny import assert_close, tiny_model, tokens


class Repeats:
    """A recorder whose replays run the function again: compiled functions run, which pretended graphs keep from it."""

    def __init__(self) -> None:
        self.recordings = 0

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        self.recordings += 1
        return function


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Repeats:
    recorder = Repeats()
    monkeypatch.setattr(loop, "recorder_for", lambda device: recorder)
    monkeypatch.setattr(growing, "LEAST", 16)
    torch._dynamo.reset()
    counters.clear()
    return recorder


def generated(model: Any, how: CompileConfig | None, rows: int = 2, new: int = 8, **options: Any) -> Any:
    ids, mask = tokens(rows, 9), torch.ones(rows, 9, dtype=torch.long)
    ids[0, :3], mask[0, :3] = 0, 0
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, compile_config=how, **options,
    )  # fmt: skip


def same(one: Any, other: Any) -> None:
    assert torch.equal(one.sequences, other.sequences)
    assert_close(torch.stack(one.logits), torch.stack(other.logits), 2e-5)
    for mine, theirs in zip(one[CACHE_NAME].layers, other[CACHE_NAME].layers, strict=True):
        assert_close(mine.keys, theirs.keys)


@pytest.mark.parametrize("fields", [{}, {"family": "gpt2"}, {"depth": {"name": "loop", "passes": 2}}], ids=str)
def test_all_layers_and_later_calls_share_one_graph(fields: dict[str, Any], recorder: Repeats) -> None:
    model, how = tiny_model(num_hidden_layers=3, **fields), CompileConfig(backend="aot_eager", fullgraph=True)
    plain = generated(model, None)
    assert not counters["stats"]
    for _ in range(2):
        same(generated(model, how), plain)
        assert counters["stats"]["unique_graphs"] == 1
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)


def test_a_cache_that_grows_is_compiled_once_more_and_then_for_any_room(recorder: Repeats) -> None:
    model = tiny_model(num_hidden_layers=2)
    same(*(generated(model, how, new=70) for how in (CompileConfig(backend="aot_eager"), None)))
    assert recorder.recordings > 4 and counters["stats"]["unique_graphs"] == 2


@torch._dynamo.config.patch(recompile_limit=1)
def test_any_number_of_models_is_compiled(recorder: Repeats) -> None:
    """They share one function, of which torch compiles a few forms and runs further ones as they are, or fails."""
    how = CompileConfig(backend="eager", fullgraph=True)
    for number, dtype in enumerate((torch.float32, torch.float64), 1):
        model = tiny_model(num_hidden_layers=1).to(dtype)
        same(generated(model, how, new=3), generated(model, None, new=3))
        assert counters["stats"]["unique_graphs"] == number
    assert torch._dynamo.config.recompile_limit == 1


@pytest.mark.slow
def test_inductor_gives_the_same_tokens(recorder: Repeats) -> None:
    model = tiny_model(num_hidden_layers=2)
    same(*(generated(model, how) for how in (CompileConfig(), None)))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("section", ["mixer", "residual", "feed_forward", "depth", "compress"])
def test_layers_that_are_not_alike_run_as_they_are_and_it_is_said(
    section: str, recorder: Repeats, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"mixer": "depth_attention", "residual": "mhc", "feed_forward": "moe", "depth": "pause"}
    fields = {section: {"name": names[section]}} if section in names else {}
    model, how = tiny_model(**fields), CompileConfig(backend="aot_eager")
    if section == "compress":
        with compress(model, Full()):
            generated(model, how)
    else:
        same(generated(model, how), generated(model, None))
    assert "compile_config is not used" in caplog.text and not counters["stats"] and recorder.recordings


def test_beams_say_so(caplog: pytest.LogCaptureFixture) -> None:
    tiny_model().generate(tokens(1, 4), max_new_tokens=2, num_beams=2, compile_config=CompileConfig())
    assert "compile_config is not used: mode beam_search" in caplog.text


def test_a_device_that_records_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    generated(tiny_model(), CompileConfig(), new=2)
    assert "compile_config is not used: steps are recorded on a GPU alone" in caplog.text and "is on cpu" in caplog.text

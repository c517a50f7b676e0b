"""A recorded step on a CPU, with the pretended CUDA graphs of recording.py."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import fathom.decoding.loop as loop
from fathom.caches import (
    H2O,
    KIVI,
    METHODS,
    TOVA,
    VQKV,
    FourierAttention,
    FreqKV,
    Full,
    PyramidKV,
    Scored,
    SnapKV,
    StreamingLLM,
    TreeKV,
    WeightedKV,
    compress,
)
from fathom.decoding import growing, switch
from fathom.decoding.fixed import FixedStep, unsuited
from fathom.decoding.switch import say
from fathom.models.hf_versions import CACHE_NAME
from fathom.models.registry import methods_of
from fathom.ops import kernels
from recording import Pretended, PretendedGraph
from tiny import assert_close, perturb, tiny_model, tokens


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    double = Pretended()
    monkeypatch.setattr(loop, "recorder_for", lambda device: double)
    monkeypatch.setattr(kernels, "TRITON", False)  # it sees PyTorch's operations alone
    return double


@pytest.fixture
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 16 tokens more, so that a few steps fill it."""
    monkeypatch.setattr(growing, "LEAST", 16)


def generated(model: Any, batch: dict[str, Any], fast: bool, **options: Any) -> Any:
    switch.FAST = fast
    try:
        torch.manual_seed(1)
        return model.generate(
            **batch, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
            **{"max_new_tokens": 14, "do_sample": False, **options},
        )  # fmt: skip
    finally:
        switch.FAST = True


def padded(rows: int = 2, length: int = 9) -> dict[str, Any]:
    ids, mask = tokens(rows, length), torch.ones(rows, length, dtype=torch.long)
    ids[0, :4], mask[0, :4] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def same(ours: Any, stock: Any) -> None:
    assert torch.equal(ours.sequences, stock.sequences)
    assert_close(torch.stack(ours.logits), torch.stack(stock.logits), 2e-5)


# Of every method of the model its first variant; depths whose tokens keep different numbers of slots run step by step.
FIELDS: list[dict[str, Any]] = [{"family": "gpt2"}]
for registry in ("depth", "mixer", "residual", "feed_forward", "positions"):
    for name, kind in methods_of(registry).items():
        FIELDS.append({registry: {"name": name, **kind.variants[0]}} if kind.variants else {registry: {"name": name}})
MOVING = ("act", "adaponderlm", "adaptive_latent_cot", "exit_gate", "ponderlm3")


@pytest.mark.parametrize(
    "fields", FIELDS, ids=lambda fields: "-".join(f["name"] for f in fields.values() if "name" in f)
)
def test_a_full_cache_replays_one_recording(
    fields: dict[str, Any], double: Pretended, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(**fields)
    say.cache_clear()
    with caplog.at_level("DEBUG", "fathom.decoding"):
        same(*(generated(model, padded(), fast, max_new_tokens=6) for fast in (True, False)))
    if model.config.depth["name"] in MOVING:
        assert "SlotLayer have no fixed shape" in caplog.text or "StepLayer have no fixed shape" in caplog.text
        assert not double.recordings
    else:
        assert double.recordings == 1 and double.operations


def test_sampling_from_a_recorded_step_draws_as_from_others(double: Pretended) -> None:
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2}
    same(*(generated(tiny_model(), {"input_ids": tokens(1, 6)}, fast, **options) for fast in (True, False)))
    assert double.recordings == 1


@pytest.mark.parametrize(("depth", "new"), [("vanilla", 40), ("pause", 20)])
def test_a_cache_that_is_full_grows_by_a_bucket_and_is_recorded_again(
    depth: str, new: int, double: Pretended, small_room: None
) -> None:
    model, batch = tiny_model(depth={"name": depth}), padded()
    ours, stock = (generated(model, batch, fast, max_new_tokens=new) for fast in (True, False))
    same(ours, stock)
    assert double.recordings == 2
    for mine, theirs in zip(ours[CACHE_NAME].layers, stock[CACHE_NAME].layers, strict=True):
        assert_close(mine.keys, theirs.keys)
        assert mine.get_seq_length() == theirs.get_seq_length()


EVICTING = [TreeKV, StreamingLLM, H2O, TOVA, WeightedKV, Scored]


@pytest.mark.parametrize("positions", ["slot", "original"])
@pytest.mark.parametrize("method", EVICTING)
def test_a_full_budget_replays(method: Any, positions: str, double: Pretended) -> None:
    model = tiny_model(max_position_embeddings=128)
    sizes: dict[str, Any] = {"budget": 16, "positions": positions, "n_sink": 2}
    if method is TreeKV:
        sizes |= {"n_recent": 6, "block": 3}
    with compress(model, method(**sizes)):
        for batch in ({"input_ids": tokens(2, 20)}, padded(2, 20)):
            ours, stock = (generated(model, batch, fast) for fast in (True, False))
            same(ours, stock)
            equal_caches(ours[CACHE_NAME], stock[CACHE_NAME])
    assert double.recordings == 2


def equal_caches(ours: Any, stock: Any) -> None:
    """All states of two compressed caches hold the same."""
    for mine, theirs in zip(ours.layers, stock.layers, strict=True):
        assert mine.seen == theirs.seen
        for one, other in zip(mine.states, theirs.states, strict=True):
            assert one.seen == other.seen and one.stored == other.stored
            for (name, held), (_, expected) in zip(one.tensors(), other.tensors(), strict=True):
                assert held.shape == expected.shape, name
                torch.testing.assert_close(held.double(), expected.double(), rtol=1e-5, atol=1e-5, msg=name)
    assert ours.nbytes() == stock.nbytes()


APPENDING: dict[str, Any] = {
    "full": Full(),
    "snapkv": SnapKV(budget=16, n_recent=4),
    "pyramidkv": PyramidKV(budget=16, n_recent=4, beta=4),
    "kivi": KIVI(group=8, residual=16),
    "fourier_attention": FourierAttention(n_sink=2, n_local=4, frequencies=4, headroom=64),
    "fourier_attention, projection": FourierAttention(
        n_sink=0, n_local=4, frequencies=4, headroom=64, reconstruction="projection"
    ),
    "vqkv": None,
    "vqkv, bits": None,
}


def test_every_cache_method_is_replayed_below_or_above() -> None:
    appending = {name.partition(",")[0] for name in APPENDING}
    assert {*METHODS} == appending | {method.name for method in EVICTING} | {"freqkv"}


@pytest.fixture(scope="module")
def codebooks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Codebooks of the model that the test below uses."""
    path = str(tmp_path_factory.mktemp("vqkv") / "codebooks.safetensors")
    model = tiny_model(max_position_embeddings=128)
    VQKV.calibrate(model, tokens(4, 100), **VQKV.calibration.variant).save(path)  # type: ignore[union-attr]
    return path


@pytest.mark.parametrize("name", APPENDING)
def test_a_cache_that_only_appends_replays_and_grows(
    name: str, codebooks: str, double: Pretended, small_room: None
) -> None:
    """Also where rows, or layers, hold different numbers of tokens: each kind has places of its own."""
    model, method = tiny_model(max_position_embeddings=128), APPENDING[name]
    if method is None:
        kind = {"pack": "bits", "n_sink": 0} if "bits" in name else {}
        method = VQKV(**{"codebooks": codebooks, "n_sink": 2, "n_local": 8, "flush_every": 3, **kind})
    with compress(model, method):
        for batch, new in (({"input_ids": tokens(2, 40)}, 30), (padded(2, 40), 8), (padded(2, 9), 16)):
            double.recordings = 0
            ours, stock = (generated(model, batch, fast, max_new_tokens=new) for fast in (True, False))
            same(ours, stock)
            equal_caches(ours[CACHE_NAME], stock[CACHE_NAME])
            assert double.recordings == 1 + (new > 16)


def test_a_window_that_replays_have_filled_is_refused_as_by_steps(double: Pretended) -> None:
    model, method = tiny_model(), FourierAttention(n_sink=2, n_local=4, frequencies=4, window=40)
    with compress(model, method):
        for fast in (True, False):
            with pytest.raises(ValueError, match="41 middle tokens do not fit the window of 40"):
                generated(model, {"input_ids": tokens(1, 30)}, fast, max_new_tokens=20)
        assert double.recordings == 1
        same(*(generated(model, {"input_ids": tokens(1, 30)}, fast, max_new_tokens=17) for fast in (True, False)))


@pytest.mark.parametrize("start", [5, 16, 40])
def test_freqkv_is_compressed_between_replays_of_one_recording(start: int, double: Pretended) -> None:
    model = tiny_model(max_position_embeddings=128)
    with compress(model, FreqKV(budget=16, n_sink=2, n_recent=1)):
        ours, stock = (generated(model, {"input_ids": tokens(2, start)}, fast, max_new_tokens=30) for fast in (1, 0))
        same(ours, stock)
        assert double.recordings == 1
        equal_caches(ours[CACHE_NAME], stock[CACHE_NAME])
        assert ours[CACHE_NAME].layers[0].states[0].seen == start + 29
        same(*(generated(model, padded(2, start + 4), fast, max_new_tokens=20) for fast in (True, False)))
        assert double.recordings == 2  # rows of two lengths are compressed at other times


@pytest.mark.parametrize("method", [Full(), FreqKV(budget=16, n_sink=2)], ids=lambda method: method.name)
def test_dropout_of_a_model_in_training_is_that_of_steps_kernel_by_kernel(method: Any, double: Pretended) -> None:
    model = tiny_model(attention_dropout=0.5).train()
    with compress(model, method):
        batch = {"input_ids": tokens(1, 12)}
        same(*(generated(model, batch, fast, max_new_tokens=6) for fast in (True, False)))
    assert not double.recordings


def test_replays_make_no_new_tensor_of_the_caches_size(double: Pretended) -> None:
    model = tiny_model()
    out = model(tokens(1, 6), use_cache=True)
    kwargs = {"position_ids": torch.arange(6)[None], "use_cache": True, "logits_to_keep": 1}
    step = FixedStep(model, out[CACHE_NAME], kwargs, double)
    (slots,) = step.slots
    step(tokens(1, 1))
    step(tokens(1, 1, seed=2))
    held = [*(x.data_ptr() for layer in step.cache.layers for x in (layer.keys, layer.values))]
    held += [step.token.data_ptr(), step.position.data_ptr(), slots.place.data_ptr(), slots.visible.data_ptr()]
    logits = step(tokens(1, 1, seed=3)).data_ptr()
    for seed in range(4, 9):
        assert step(tokens(1, 1, seed=seed)).data_ptr() == logits
    again = [*(x.data_ptr() for layer in step.cache.layers for x in (layer.keys, layer.values))]
    again += [step.token.data_ptr(), step.position.data_ptr(), slots.place.data_ptr(), slots.visible.data_ptr()]
    assert held == again and step.recorded == 1 and int(slots.place) == 14


@pytest.mark.parametrize("method", [None, SnapKV(budget=16, n_recent=4)], ids=str)
def test_recordings_are_free_when_the_call_ends(method: Any, double: Pretended) -> None:
    """By reference counts alone: no graph waits for Python's collector, and dies while another one is recorded."""
    model = tiny_model()
    with compress(model, method) if method else contextlib.nullcontext():
        gc.collect()
        gc.disable()
        try:
            out = generated(model, {"input_ids": tokens(1, 20)}, True)
            assert double.recordings == 1 and not PretendedGraph.alive and out[CACHE_NAME].get_seq_length() == 33
        finally:
            gc.enable()


def test_two_threads_in_one_model_get_their_own_texts(double: Pretended) -> None:
    model, found = tiny_model(), {}
    batches = [{"input_ids": tokens(1, 6)}, padded(2, 9)]
    alone = [generated(model, batch, False) for batch in batches]

    def decode(number: int) -> None:
        options = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found[number] = model.generate(**batches[number], **options)

    threads = [threading.Thread(target=decode, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert double.recordings == 2
    assert all(torch.equal(found[number], alone[number].sequences) for number in (0, 1))


def test_what_cannot_be_recorded_runs_kernel_by_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        def record(self, function: Any) -> Any:
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(loop, "recorder_for", lambda device: Full())
    model = tiny_model()
    same(generated(model, padded(), True), generated(model, padded(), False))
    assert [record.message for record in caplog.records if "3 GiB" in record.message]


class Waits(torch.nn.Module):
    """A layer that waits for the device, as experts do that look up which tokens are theirs."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.nonzero(x)
        return self.inner(x)


@pytest.mark.parametrize(
    "method",
    [
        None,
        "ponderlm2",
        TreeKV(budget=16, n_recent=6, n_sink=2, block=3),
        H2O(budget=16, n_sink=2),
        SnapKV(budget=16, n_recent=4),
        FreqKV(budget=16, n_sink=2),
        KIVI(group=8, residual=16),
    ],
    ids=str,
)
def test_a_recording_that_fails_midway_leaves_the_cache_as_it_was(
    method: Any, double: Pretended, caplog: pytest.LogCaptureFixture
) -> None:
    depth, method = (method, None) if method == "ponderlm2" else ("vanilla", method)
    model = tiny_model(max_position_embeddings=128, depth={"name": depth})
    model.model.layers[1].mlp = Waits(model.model.layers[1].mlp)
    batch = {"input_ids": tokens(2, 20)}
    with compress(model, method) if method else contextlib.nullcontext():
        ours, stock = (generated(model, batch, fast) for fast in (True, False))
        same(ours, stock)
        assert ours[CACHE_NAME].get_seq_length() == stock[CACHE_NAME].get_seq_length()
    assert "waits for the device" in caplog.text and not double.recordings
    assert model.config._attn_implementation == "sdpa"


def test_layers_whose_cache_moves_beside_compressed_ones_are_not_replayed(double: Pretended) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            num_hidden_layers=3, num_key_value_heads=2, use_sliding_window=True, sliding_window=9, max_window_layers=2,
            **sizes,
        )
    ).eval()  # fmt: skip
    perturb(model)
    with compress(model, StreamingLLM(budget=16, n_sink=2)):
        batch = {"input_ids": tokens(2, 20)}
        same(generated(model, batch, True), generated(model, batch, False))
    assert not double.recordings


def test_models_that_a_replay_would_miss_are_not_recorded(double: Pretended) -> None:
    model = tiny_model()
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    generated(model, padded(), True)
    assert not double.recordings
    cache = model(tokens(1, 4), use_cache=True)[CACHE_NAME]
    assert "forward hooks" in unsuited(model, cache, {"position_ids": torch.arange(4)[None]})
    handle.remove()
    adaptive = tiny_model(depth={"name": "adaponderlm"})
    same(generated(adaptive, padded(), True), generated(adaptive, padded(), False))
    assert not double.recordings

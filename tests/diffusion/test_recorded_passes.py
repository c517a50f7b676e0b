"""Passes of the sampler that are recorded and replayed, on a CPU with the pretended CUDA graphs of recording.py."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from test_diffusion_invariants import CACHES, OFFICIAL, ids, model, run
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fathom.decoding import switch
from fathom.decoding.graphs import recorder_for
from fathom.diffusion import POLICIES, SparseDLLM, passes, sampling
from fathom.diffusion.low_confidence import LowConfidence
from fathom.diffusion.recorded import Recorded
from fathom.diffusion.sparse_dllm import SparseState
from fathom.ops import kernels
from recording import Pretended


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    double = Pretended()
    monkeypatch.setattr(sampling, "recorder_for", lambda device: double if switch.GRAPHS else None)
    monkeypatch.setattr(kernels, "TRITON", False)  # it sees PyTorch's operations alone
    return double


def both(monkeypatch, tested, policy, cache, **options):
    """Recorded, and kernel by kernel."""
    outs = []
    for graphs in (True, False):
        monkeypatch.setattr(switch, "GRAPHS", graphs)
        prompts, mask = ids(2, 6), torch.ones(2, 6, dtype=torch.long)
        mask[1, :3] = 0
        outs.append(run(tested, prompts, policy, cache, mask, seed=[5, 6], **options))
    recorded, plain = outs
    assert torch.equal(recorded.sequences, plain.sequences) and torch.equal(recorded.revealed, plain.revealed)
    assert torch.equal(recorded.confidence, plain.confidence)
    assert (recorded.nfe, recorded.columns, recorded.cache_bytes) == (plain.nfe, plain.columns, plain.cache_bytes)
    return recorded


# Recordings of two blocks: one of a kind, or one a block where a block's pass has another shape.
RECORDINGS = {"none": 1, "prefix": 2, "dual": 1, "dkv_cache": 0, "dllm_cache": 0, "sparse_dllm": 1}


@pytest.mark.parametrize(
    ("cache", "shift"),  # the column before a block, and the official first step, are of shifted models
    [*((cache, False) for cache in CACHES), (("dual", {}), True), (CACHES[-1], True), (OFFICIAL, True)],
    ids=str,
)
def test_replayed_passes_give_what_passes_give(double, monkeypatch, cache, shift):
    """Tokens, steps and probabilities to the bit, with padding."""
    both(monkeypatch, model("qwen2", shift), ("low_confidence", {}), cache, steps=12)
    assert double.recordings == RECORDINGS[cache[0]]


@pytest.mark.parametrize("policy", [("fourier_sampler", {}), ("threshold", {"threshold": 0.03})], ids=lambda p: p[0])
def test_policies_and_guidance_on_replayed_passes(double, monkeypatch, policy):
    both(monkeypatch, model(), policy, ("dual", {}), cfg_scale=1.5, steps=12)
    assert double.recordings == 1


FIXED = [name for name, policy in POLICIES.items() if policy.fixed_shape]  # FourierSampler by its options


SOME = {"threshold": {"threshold": 0.2}, "dynamic": {"threshold": 0.2}, "entropy_bounded": {"bound": 2.0}}
SOME["fourier_sampler"] = {"variance_scope": "block", "history_size": 3}
GUIDED = {"cfg_scale": 1.5, "suppress_eos": "confidence", "eos_token_id": 7}


@pytest.mark.parametrize(
    ("policy", "cache", "options"),
    [
        *((name, ("dual", {}), GUIDED) for name in FIXED),
        ("low_confidence", ("none", {}), {"schedule": "dream"}),
        ("low_confidence", ("sparse_dllm", {"keep_ratio": 0.7}), {"suppress_eos": "logit", "eos_token_id": 7}),
        ("margin", OFFICIAL, {}),  # on a shifted model; its first step too
        ("low_confidence", ("dllm_cache", {}), {}),  # its passes are not recorded
        ("low_confidence", ("dkv_cache", {}), {}),  # but after its full passes a step predicts other tokens each time
        ("random", ("dual", {}), {}),
    ],
    ids=lambda x: x if isinstance(x, str) else str(x[0]) if isinstance(x, tuple) else "",
)
def test_what_follows_a_pass_is_recorded_too(double, monkeypatch, policy, cache, options):
    """As on a GPU: the head and the policy of a step in one shape, for policies that may have one."""
    options = {"temperature": 0.0, "steps": 12, **options}
    tested = model(shift=cache is OFFICIAL)
    plain = both(monkeypatch, tested, (policy, SOME.get(policy, {})), cache, **options)
    passes_alone, double.recordings = double.recordings, 0
    monkeypatch.setattr(sampling, "records", lambda device: True)
    fixed = both(monkeypatch, tested, (policy, SOME.get(policy, {})), cache, **options)
    assert double.recordings == passes_alone + (policy in FIXED)
    assert torch.equal(fixed.sequences, plain.sequences) and torch.equal(fixed.revealed, plain.revealed)
    torch.testing.assert_close(fixed.confidence, plain.confidence)
    assert (fixed.nfe, fixed.columns) == (plain.nfe, plain.columns)


def test_a_policy_that_reads_values_may_not_say_that_its_steps_have_a_shape(double, monkeypatch, caplog):
    class Reads(LowConfidence):
        def rank(self, view, memory):
            return view.probability * (2.0 if float(view.probability.max()) > 0 else 1.0)

    monkeypatch.setattr(sampling, "records", lambda device: True)
    plain = run(model(), ids(2, 6), ("low_confidence", {}), ("dual", {}), temperature=0.0, steps=12)
    before = double.recordings
    read = model().generate(ids(2, 6), policy=Reads(), block_cache="dual", max_new_tokens=12, block_length=6, steps=12)
    assert torch.equal(read, plain.sequences) and double.recordings == before + 1  # of the pass alone
    assert "could not be recorded, and runs kernel by kernel" in caplog.text


def test_how_many_operations_stand_beside_a_pass(double, monkeypatch):
    """What a step without a cache issues, its pass apart, as recorded and kernel by kernel."""

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += not function.is_view
            return function(*args, **(kwargs or {}))

    def record(function, record=double.record):
        replay = record(function)

        def launched():
            with _disable_current_modes():
                replay()

        return launched

    def beside(fixed: bool) -> float:
        monkeypatch.setattr(sampling, "records", lambda device: fixed)
        found = []
        for steps in (4, 10):
            with Count() as counted:
                model().generate(ids(2, 6), max_new_tokens=10, block_length=10, steps=steps)
            found.append(counted.calls)
        return (found[1] - found[0]) / 6

    monkeypatch.setattr(double, "record", record)
    few, many = beside(True), beside(False)
    assert few < 35 and few < 0.6 * many, (few, many)


@pytest.mark.parametrize(
    "fields",
    [
        {"depth": {"name": "loop", "passes": 2}},
        {"mixer": {"name": "depth_attention"}},
        {"residual": {"name": "attnres"}},
    ],
    ids=str,
)
def test_models_that_run_their_stack_in_another_way_are_recorded(double, monkeypatch, fields):
    both(monkeypatch, model(**fields), ("low_confidence", {}), ("sparse_dllm", {}), steps=12)
    assert double.recordings == 1


def test_kept_sets_of_other_sizes_are_recorded_again(double, monkeypatch):
    """With `evict` "suffix" every block keeps more."""
    both(monkeypatch, model(), ("low_confidence", {}), ("sparse_dllm", {"evict": "suffix"}), steps=12)
    assert double.recordings == 2


def test_what_cannot_be_recorded_runs_kernel_by_kernel(double, monkeypatch, caplog):
    tested = model()
    alone = run(tested, ids(2, 6), ("low_confidence", {}), ("dual", {}))
    handle = tested.model.layers[0].register_forward_hook(lambda *_: None)
    with caplog.at_level("DEBUG", "fathom.decoding"):
        run(tested, ids(2, 6), ("low_confidence", {}), ("dual", {}))
    handle.remove()
    assert "passes of the sampler are not recorded: model.layers.0 has forward hooks" in caplog.text
    assert recorder_for(torch.device("cpu")) is None

    def record(function):
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    before = double.recordings
    monkeypatch.setattr(double, "record", record)
    out = run(tested, ids(2, 6), ("low_confidence", {}), ("dual", {}))
    assert torch.equal(out.sequences, alone.sequences) and double.recordings == before
    assert caplog.text.count("could not be recorded, and runs kernel by kernel: tried to allocate 3 GiB") == 1


def test_recordings_and_kept_states_are_free_when_the_call_ends(double, monkeypatch):
    """By reference counts alone: memory is back at once, and no graph dies while another one is recorded."""
    kept = []

    def stop(canvas, column):
        raise KeyError("stop")

    class Watched(Recorded):
        def __init__(self, *args):
            super().__init__(*args)
            kept.append(weakref.ref(self))

    class Kept(SparseState):
        def __init__(self, *args):
            super().__init__(*args)
            kept.append(weakref.ref(self))

    monkeypatch.setattr(passes, "Recorded", Watched)
    monkeypatch.setattr(SparseDLLM, "new_state", lambda self, runs: Kept(self, runs))
    gc.collect()
    gc.disable()
    try:
        run(model(), ids(2, 6), ("low_confidence", {}), ("sparse_dllm", {"delay_steps": 0}))
        assert len(kept) == 2 and [one() for one in kept] == [None, None] and double.recordings == 1
        with pytest.raises(KeyError, match="stop"):  # its frames are alive, the recording is not
            model().generate(ids(2, 6), max_new_tokens=12, block_length=6, block_cache=SparseDLLM(), on_block=stop)
        assert len(kept) == 4 and kept[3]() is None
    finally:
        gc.enable()


def test_a_pass_after_the_warm_one_reads_no_value(double):
    """Full passes without a cache: one is run, one recorded, and all but the first are replays."""
    model().generate(ids(2, 6), max_new_tokens=6, block_length=6, steps=6)
    operations = double.operations
    assert double.recordings == 1 and operations
    model().generate(ids(2, 6), max_new_tokens=6, block_length=6, steps=3)
    assert double.operations - operations == operations * 2 // 5

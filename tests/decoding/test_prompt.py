"""Long prompts are read in parts: the numbers of one forward, and no tensor that grows with prompt × width."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import fathom.caches.token_budget as token_budget
import fathom.decoding.prompt as prompt
import fathom.ops.cached_attention as cached_attention
from fathom.caches import KIVI, FreqKV, Full, SnapKV, StreamingLLM, TreeKV, WeightedKV, compress
from fathom.caches.compress import prefill
from tiny import assert_close, tiny_model, tokens

DEPTHS: list[dict[str, Any]] = [
    {}, {"depth": {"name": "loop", "passes": 2}}, {"depth": {"name": "pondering", "steps": 1}},
    {"depth": {"name": "adaponderlm"}}, {"depth": {"name": "adaptive_latent_cot"}},
    {"depth": {"name": "ponderlm2", "prefill": "sequential"}}, {"mixer": {"name": "depth_attention"}},
    {"residual": {"name": "attnres"}}, {"family": "gpt2"},
]  # fmt: skip


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "TOGETHER", 8)
    monkeypatch.setattr(token_budget, "LONG", 16)
    monkeypatch.setattr(token_budget, "PART", 8)


class Lengths:
    """Counts the tokens of every forward."""

    def __init__(self, model: Any):
        self.seen: list[int] = []
        self.handle = model.register_forward_pre_hook(self.look, with_kwargs=True)

    def look(self, module: Any, args: Any, kwargs: Any) -> None:
        self.seen.append(kwargs["input_ids"].shape[1])


def logits_of(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    out = model.generate(
        ids, max_new_tokens=3, do_sample=False, eos_token_id=None, return_dict_in_generate=True, output_logits=True,
        **options,
    )  # fmt: skip
    return torch.stack(out.logits, 1)


@pytest.mark.parametrize("fields", DEPTHS, ids=str)
def test_parts_give_the_logits_of_one_forward(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(**fields)
    ids = tokens(2, 26)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    whole, padded = logits_of(model, ids), logits_of(model, ids, attention_mask=mask)
    monkeypatch.setattr(prompt, "TOGETHER", 16)
    lengths = Lengths(model)
    assert_close(logits_of(model, ids), whole, 1e-4 if "adapt" in str(fields) else 1e-5)
    assert lengths.seen[:4] == [8, 8, 8, 2]
    assert_close(logits_of(model, ids, attention_mask=mask), padded)


def test_a_jacobi_prompt_is_read_whole(short_parts: None) -> None:
    model = tiny_model(depth={"name": "ponderlm2"})
    lengths = Lengths(model)
    logits_of(model, tokens(1, 26))
    assert lengths.seen[0] == 26


def test_beams_read_in_parts_too(short_parts: None) -> None:
    model = tiny_model()
    lengths = Lengths(model)
    model.generate(tokens(1, 26), max_new_tokens=2, num_beams=2)
    assert lengths.seen[0] == 4
    assert lengths.seen.count(26) == 0


@pytest.mark.parametrize(
    ("method", "part"),
    [
        (Full(), 8), (FreqKV(budget=16, n_sink=2, n_recent=4), 8), (WeightedKV(budget=16, chunk=4), 8),
        (TreeKV(budget=16, n_sink=2, n_recent=6, block=3), 8), (StreamingLLM(budget=16, n_sink=2), 8),
        (SnapKV(budget=16, n_recent=4), 26), (KIVI(group=8), 26),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)  # fmt: skip
def test_under_compress_parts_are_those_of_prefill(method: Any, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(max_position_embeddings=128)
    ids = tokens(1, 26)
    with compress(model, method):
        expected = prefill(model, ids, chunk_size=part).logits[:, -1]
        whole = logits_of(model, ids)[:, 0]
        for name, value in (("LONG", 16), ("PART", 8)):
            monkeypatch.setattr(token_budget, name, value)
        monkeypatch.setattr(prompt, "TOGETHER", 8)
        lengths = Lengths(model)
        found = logits_of(model, ids)[:, 0]
    assert lengths.seen[0] == part
    assert_close(found, expected)
    if method.sequential or method.name == "weightedkv":
        assert_close(found, whole)


def test_rows_of_other_lengths_stay_exact_under_eviction(short_parts: None) -> None:
    """A padded row would be cut at other tokens than the row alone, so the prompt is read whole."""
    model = tiny_model(max_position_embeddings=128)
    mask = torch.ones(2, 26, dtype=torch.long)
    mask[0, :5] = 0
    with compress(model, TreeKV(budget=16, n_sink=2, n_recent=6, block=3)):
        lengths = Lengths(model)
        logits_of(model, tokens(2, 26), attention_mask=mask)
    assert lengths.seen[0] == 26


class Largest(TorchDispatchMode):
    """The most numbers in a tensor that an operation makes, views and caches left out."""

    def __init__(self, heads: int, width: int):
        super().__init__()
        self.cache, self.most = (heads, width), 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            new = isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given
            if new and (x.ndim != 4 or (x.shape[1], x.shape[3]) != self.cache):  # the cache is what grows with the text
                self.most = max(self.most, x.untyped_storage().nbytes() // x.itemsize)
        return out


def largest(model: Any, rows: int, length: int, method: Any = None) -> int:
    with Largest(heads=2, width=8) as mode:
        if method is None:
            model.generate(tokens(rows, length), max_new_tokens=2, do_sample=False)
        else:
            with compress(model, method):
                model.generate(tokens(rows, length), max_new_tokens=2, do_sample=False)
    return mode.most


@pytest.mark.parametrize("method", [None, Full(), TreeKV(budget=16, n_sink=2, n_recent=6, block=3)], ids=str)
def test_no_activation_grows_with_the_prompt(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, the MLP's activations alone have prompt × width numbers; in parts the largest tensor stays as it is."""
    monkeypatch.setattr(cached_attention, "SCORES_AT_ONCE", 256)
    model = tiny_model(max_position_embeddings=4096, intermediate_size=256)
    whole = largest(model, 1, 512, method)
    assert whole >= 512 * 256
    monkeypatch.setattr(prompt, "TOGETHER", 64)
    monkeypatch.setattr(token_budget, "LONG", 64)
    monkeypatch.setattr(token_budget, "PART", 64)
    short, long = largest(model, 1, 512, method), largest(model, 1, 2048, method)
    assert long <= 1.1 * short < whole / 4
    if method is None:
        assert largest(model, 4, 512) <= 1.1 * short


def test_stock_models_outside_compress_are_left_alone(short_parts: None) -> None:
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    lengths = Lengths(model)
    model.generate(tokens(1, 26), max_new_tokens=1)
    assert lengths.seen == [26]

"""Exact transforms keep the logits that transformers computes; the hardened score stays at 1.

Tolerances: stock RMSNorm and RoPE run in float32 even in a float64 model, so logits agree to about 1e-6
there; LayerNorm families agree to 1e-14.
"""

import pytest
import torch

from conftest import FAMILIES
from fathom.lineage.attack import apply_exact, logit_error, probe_tokens
from fathom.lineage.awm import awm
from fathom.lineage.pairs import compare
from fathom.lineage.transforms import EXACT

LLAMA = ["permute", "sign", "scale", "rescale_norms", "fold", "rotate", "rope", "value_output", "heads", "neurons",
         "head_shift", "vocabulary", "deepen", "split_neurons", "add_heads", "widen"]  # fmt: skip
CASES = [("llama_tied", name) for name in LLAMA] + [
    ("gpt2", "qk_general"), ("gpt2", "rotate"), ("gpt_neox", "qk_general"), ("gpt_neox", "rope"), ("gpt_neox", "heads"),
    ("phi", "qk_general"), ("qwen3", "qk_norm"), ("gemma3", "qk_norm"), ("mixtral", "experts"),
    ("deepseek_v3", "rotate"), ("deepseek_v3", "neurons"), ("qwen2", "deepen"), ("olmo2", "heads"), ("phi3", "rope"),
]  # fmt: skip


def hardened(original, changed, mode="procrustes"):
    """Lowest score over q, k and all parts of all layers, in float32."""
    result = awm(original.checkpoint(), changed.checkpoint(), alignment=mode, parts=True)
    return min(min(s.q, s.k, *s.parts.values()) for s in result.layers)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_exact_transform(weights, family, name):
    original = weights(family)
    changed = apply_exact(original, name)
    assert logit_error(original, changed, probe_tokens(original)) < 3e-6
    assert any(not torch.equal(changed.tensors[k], v) for k, v in original.tensors.items() if k in changed.tensors) or (
        len(changed.tensors) != len(original.tensors)
    )
    assert hardened(original, changed) == pytest.approx(1, abs=1e-4)
    if name not in {"rotate", "deepen"}:
        assert hardened(original, changed, "lap") == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(("family", "seed"), [*((family, 0) for family in FAMILIES), *(("olmo", n) for n in (1, 2, 3))])
def test_everything_at_once(weights, family, seed):
    """Also where nothing decides the sign of a direction that all readers ignore, as LayerNorm's mean (OLMo)."""
    original = weights(family)
    changed = apply_exact(original, "all", seed)
    assert logit_error(original, changed, probe_tokens(original)) < 5e-6
    assert hardened(original, changed) == pytest.approx(1, abs=1e-4)


T15 = ["loud_heads", "null_products", "opposed_heads", "inert_layers", "loud_rows", "stale_tokenizer", "no_tokenizer"]


@pytest.mark.parametrize("name", T15)
@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_what_writes_nothing_hides_nothing(weights, family, name):
    """T15 to T20, alone and under everything else at once: equal logits, and the verdict stands."""
    original = weights(family)
    changed = apply_exact(original, name)
    assert logit_error(original, changed, probe_tokens(original)) < 3e-6
    assert compare(original.checkpoint(), changed.checkpoint()).verdict == "related"
    hidden = apply_exact(changed, "all", 1)
    result = compare(original.checkpoint(), hidden.checkpoint())
    assert result.verdict == "related" and result.method == "awm hardened-procrustes"
    assert result.score == pytest.approx(1, abs=2e-3)


def test_published_method_is_evaded(weights):
    """Folding, rotating and pair scaling hide a model from the published AWM: the reason for the hardened mode."""
    original = weights("llama")
    a = original.checkpoint()
    score = {
        n: awm(a, apply_exact(original, n).checkpoint(), hardened=False).score
        for n in ("rope", "rescale_norms", "rotate")
    }
    assert score["rope"] < 0.8 and score["rescale_norms"] < 0.8
    assert abs(score["rotate"]) < 0.15  # chance level at this width (64) is about 0.06


def test_lossless_and_lossy_dtype(weights):
    """T14: a lossless change of dtype scores 1 ± 1e-4, rounding float64 noise to bfloat16 1 ± 1e-3."""
    original = weights("llama")
    rounded = apply_exact(original, "half_precision")
    assert hardened(rounded, rounded.to(torch.bfloat16)) == pytest.approx(1, abs=1e-4)
    assert hardened(original, rounded) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("family", "name", "reason"),
    [
        ("gpt2", "sign", "mean"),
        ("llama", "qk_general", "rotates"),
        ("qwen3", "rope", "QK-norm"),
        ("gemma2", "rotate", "commute"),
        ("llama", "experts", "mixture"),
        ("deepseek_v3", "heads", "no 'q'"),
        ("gemma", "widen", "embedding"),
        ("mpt", "heads", "ALiBi"),
        ("olmo", "scale", "eps is not in"),
    ],
)
def test_inapplicable_transforms_say_why(weights, family, name, reason):
    with pytest.raises(ValueError, match=reason):
        apply_exact(weights(family), name)


def test_unknown_transform_lists_the_known():
    with pytest.raises(ValueError, match="rotate"):
        apply_exact(None, "twist")
    assert all(t.summary and t.code for t in EXACT.values())


def test_a_broken_transform_is_caught(weights):
    """The check can fail: an inverse where the inverse transpose belongs changes the logits."""
    original = weights("llama")
    wrong = original.clone()
    wrong.set(1, "v", original.get(1, "v") * 1.01)
    assert logit_error(original, wrong, probe_tokens(original)) > 1e-4

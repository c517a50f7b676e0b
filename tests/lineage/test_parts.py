"""What a verdict over all layers passes over: parts that are the same, parts without effect, layers out of place."""

import pytest
import torch

from fathom.lineage.attack import apply_exact
from fathom.lineage.awm import awm
from fathom.lineage.pairs import compare
from fathom.lineage.shared_parts import Part, sentence, shared_parts
from fathom.lineage.transforms import _with_groups


def with_layers(base, layers):
    """A model of these layers, [(weights, layer)], between the embedding and head of `base`."""
    made = base.clone()
    made.tensors = {k: v for k, v in base.tensors.items() if not k.startswith("layers.")}
    for new, (source, old) in enumerate(layers):
        for role in source.roles(old):
            made.set(new, role, source.get(old, role))
    made.config["num_hidden_layers"] = len(layers)
    return made


def test_a_copied_embedding_and_head_are_named(weights):
    """All layers drawn anew: the whole is no copy, and the two parts that are get named."""
    a, stranger = weights("llama"), weights("llama", 1)
    b = with_layers(a, [(stranger, l) for l in range(4)])
    result = compare(a.checkpoint(), b.checkpoint())
    assert result.verdict == "shares parts" and result.exit_code == 5
    assert {p["b"] for p in result.shared} == {"embedding", "output head", "final norm"}
    assert all(p["equal"] for p in result.shared)
    assert result.reasons[0] == "parts are the same in both models: embedding, final norm, output head"
    assert shared_parts(a.checkpoint(), stranger.checkpoint()).alike == []


def test_copied_layers_are_named_wherever_they_stand(weights):
    """One layer of four, at another place, in a model that shares nothing else; a little noise makes it near."""
    a, stranger = weights("llama"), weights("llama", 1)
    b = with_layers(stranger, [(stranger, 0), (stranger, 1), (stranger, 2), (a, 0)])
    noisy = b.get(3, "down")
    b.set(3, "down", noisy + 0.2 * noisy.std() * torch.randn(noisy.shape, generator=torch.Generator().manual_seed(0)))
    result = compare(a.checkpoint(), b.checkpoint())
    assert result.verdict == "shares parts"
    found = {(p["a"], p["b"]): p for p in result.shared}
    assert found["layer 0 q", "layer 3 q"]["equal"] and not found["layer 0 down", "layer 3 down"]["equal"]
    assert 0.95 < found["layer 0 down", "layer 3 down"]["cosine"] < 0.99
    assert {p["b"].split()[1] for p in result.shared} == {"3"}


def test_heads_without_effect_frame_nobody(weights):
    """A stranger given silent heads that hold another model's queries and keys: no evidence, and listed apart."""
    a, b = weights("llama"), weights("llama", 1)

    def fill(extra, role, x):
        if role not in {"q", "k"}:
            return torch.zeros_like(x[:extra])
        own = a.get(0, role).reshape(x.shape)
        return 30 * own[:extra]

    framed = _with_groups(b, "frame", fill)
    assert abs(awm(a.checkpoint(), framed.checkpoint(), anchor="identity").agreement) < 0.1
    result = compare(a.checkpoint(), framed.checkpoint())
    assert result.verdict == "inconclusive" and not result.shared  # random embeddings: nothing to match rows by
    assert any("heads that write nothing" in p["b"] for p in result.inert)
    assert any("no evidence" in reason for reason in result.reasons)


def test_layers_are_matched_by_content(weights):
    """Depth is equal, order is not: a layer dropped at the front, a strange one put at the end."""
    a, stranger = weights("llama"), weights("llama", 1)
    b = with_layers(a, [(a, 1), (a, 2), (a, 3), (stranger, 0)])
    result = awm(a.checkpoint(), b.checkpoint())
    assert [(s.layer_a, s.layer_b) for s in result.layers] == [(0, 3), (1, 0), (2, 1), (3, 2)]
    assert result.agreement > 0.99 and any("by their content" in note for note in result.notes)
    assert compare(a.checkpoint(), b.checkpoint()).verdict == "related"
    hidden = apply_exact(b, "all", 3)
    assert compare(a.checkpoint(), hidden.checkpoint()).verdict == "related"


def test_a_constant_matrix_is_a_reason_for_doubt(weights):
    a, b = weights("llama"), weights("llama", 1).clone()
    for layer in range(4):
        b.set(layer, "k", b.get(layer, "k").mean(1, keepdim=True) / b.get(layer, "attn_norm") + 0 * b.get(layer, "k"))
    result = compare(a.checkpoint(), b.checkpoint())
    assert result.verdict == "inconclusive"
    assert any("constant over the residual axes" in reason for reason in result.reasons)


@pytest.mark.parametrize("family", ["llama_tied", "gpt2"])
def test_an_untied_head_is_known_for_what_it_is(weights, family):
    """Folding stores the head apart; such a model still meets the null of tied ones."""
    from fathom.lineage.rows import ties

    assert ties(apply_exact(weights(family), "fold").checkpoint()) and not ties(weights("llama").checkpoint())


def test_sentence_puts_layers_together():
    parts = [Part("embedding", "embedding", 1, True)]
    parts += [Part(f"layer {l} {r}", f"layer {l} {r}", 1, True) for l in (0, 1, 3) for r in ("q", "k")]
    assert sentence(parts) == "embedding, layers 0–1, 3 (q, k)"

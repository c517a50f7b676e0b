"""HuRef's terms against dense matrices, its invariances, the published defects, extractors and pictures."""

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr

from fathom.lineage.attack import apply_exact
from fathom.lineage.errors import NoAnchorError
from fathom.lineage.huref import (
    DEFAULT,
    PAPER,
    HuRefOptions,
    fingerprint,
    ics,
    invariant_terms,
    pooled_vector,
    select_tokens,
)
from fathom.lineage.picture import creature, distance, features
from fathom.lineage.stylegan2 import StyleGAN2

EXACT_LLAMA = ["permute", "sign", "scale", "fold", "rotate", "rope", "value_output", "heads", "neurons", "vocabulary",
               "deepen", "split_neurons", "add_heads", "widen", "all"]  # fmt: skip


def dense_terms(model, rows, layers):
    """The definition, written out head by head in numpy (norm gains folded): every head's W_qᵀW_k, at the size that its
    rotary pairs have once balanced, weighed by the norm of its W_oW_v."""
    g = model.geometry
    x = model.embedding()[rows].numpy()
    for layer in layers:
        w = {r: model.read(layer, r).numpy() for r in ("q", "k", "v", "o", "up", "down", "attn_norm", "ffn_norm")}
        a, b, most = 0, 0, 0
        for j in range(g.heads):
            kv = j // (g.heads // g.kv_heads)
            mine, shared = slice(j * g.head_dim, (j + 1) * g.head_dim), slice(kv * g.head_dim, (kv + 1) * g.head_dim)
            q, k, v = w["q"][mine] * w["attn_norm"], w["k"][shared] * w["attn_norm"], w["v"][shared] * w["attn_norm"]
            pairs = [np.linalg.norm(m.reshape(2, -1, m.shape[1]), axis=(0, 2)) for m in (q, k)]
            size = (pairs[0] * pairs[1]).sum()  # ‖q‖² = ‖k‖² = Σ ‖q pair‖‖k pair‖ after balancing
            writes = np.linalg.norm(w["o"][:, mine] @ v)
            a, most = a + writes / size * (x @ q.T @ k @ x.T), max(most, writes)
            b = b + x @ v.T @ w["o"][:, mine].T @ x.T
        yield from (a / most, b, x @ (w["up"] * w["ffn_norm"]).T @ w["down"].T @ x.T)


def test_terms_and_ics_equal_the_definition(weights):
    a, b = (weights("llama", s).checkpoint(torch.float64) for s in (0, 1))
    rows, _, _ = select_tokens(a, b, HuRefOptions(tokens=50))
    ours, theirs = invariant_terms(a, rows), invariant_terms(b, rows)
    dense = list(dense_terms(a, rows, [2, 3])), list(dense_terms(b, rows, [2, 3]))
    for term, want in zip(ours, dense[0]):
        np.testing.assert_allclose((term.left @ term.right.T).numpy(), want, rtol=1e-9, atol=1e-9 * np.abs(want).max())
    want = 100 * np.mean([pearsonr(m.ravel(), n.ravel())[0] for m, n in zip(*dense)])
    result = ics(a, b, HuRefOptions(tokens=50))
    assert result.score == pytest.approx(want, abs=1e-8) and result.tokens == 50
    assert list(result.terms) == ["M_a[-2]", "M_b[-2]", "M_c[-2]", "M_a[-1]", "M_b[-1]", "M_c[-1]"]
    assert ics(b, a, HuRefOptions(tokens=50)).score == pytest.approx(want, abs=1e-8)
    assert abs(want) < 5 and len(ours) == len(theirs) == 6


@pytest.mark.parametrize("name", EXACT_LLAMA)
def test_ics_is_invariant(weights, name):
    a = weights("llama")
    changed = apply_exact(a, name)
    assert ics(a.checkpoint(torch.float64), changed.checkpoint(torch.float64)).score == pytest.approx(100, abs=1e-3)


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3", "all"), ("gpt2", "all"), ("mixtral", "all"), ("gemma3", "all"), ("gpt_neox", "all")]
)
def test_ics_is_invariant_in_other_families(weights, family, name):
    a = weights(family)
    assert ics(a.checkpoint(torch.float64), apply_exact(a, name).checkpoint(torch.float64)).score > 99.999


@pytest.mark.parametrize(
    ("option", "name", "below"),
    [
        (HuRefOptions(glu_term="hadamard"), "sign", 90),
        (HuRefOptions(gqa="tile"), "rope", 90),
        (HuRefOptions(fold_norms=False), "rotate", 97),
        (PAPER, "all", 80),
    ],
)
def test_published_choices_break_where_documented(weights, option, name, below):
    a = weights("llama")
    assert ics(a.checkpoint(), a.checkpoint(), option).score == pytest.approx(100, abs=1e-3)
    assert ics(a.checkpoint(), apply_exact(a, name).checkpoint(), option).score < below


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("factor", [1e-30, 1e-18, 1e18, 1e30])
def test_terms_do_not_leave_float32(weights, family, factor):
    """Every matrix times a factor changes no correlation, but products of four of them are 1e-120 … 1e120."""
    model = weights(family).to(torch.float32)
    scaled = model.clone()
    scaled.tensors = {key: t * factor if t.ndim == 2 else t for key, t in model.tensors.items()}
    a, b = model.checkpoint(), scaled.checkpoint()
    assert ics(a, b).score == pytest.approx(100, abs=1e-3) and ics(b, b).score == pytest.approx(100, abs=1e-3)
    assert torch.cosine_similarity(fingerprint(a).vector, fingerprint(b).vector, dim=0) > 0.99999


def test_token_order_matters(weights):
    a = weights("llama").checkpoint()
    rows = list(range(256))
    shuffled = np.random.default_rng(0).permutation(rows).tolist()
    one, other = invariant_terms(a, rows), invariant_terms(a, shuffled)
    assert abs(one[0].covariance(other[0])) < 0.05 * one[0].covariance(one[0])


def test_pooling_equals_the_dense_matrix(weights):
    a = weights("llama").checkpoint(torch.float64)
    terms = invariant_terms(a, list(range(256)))
    for options, matrices in (
        (HuRefOptions(standardise=False), [t.left @ t.right.T for t in terms]),
        (DEFAULT, [t.dense() for t in terms]),
    ):
        want = torch.stack(matrices).reshape(512, -1).mean(1)
        want = (want - want.mean()) / want.std()
        torch.testing.assert_close(pooled_vector(terms, options), want, rtol=1e-9, atol=1e-9)
    assert want.mean().abs() < 1e-12 and want.std().item() == pytest.approx(1)
    with pytest.raises(ValueError, match="256"):
        pooled_vector(invariant_terms(a, list(range(100))))


def test_fingerprint_follows_the_function_not_the_weights(weights):
    a = weights("llama")
    mark = fingerprint(a.checkpoint())
    assert len(mark.tokens) == 256 and mark.layers == [2, 3]
    for name in ("all", "scale", "vocabulary"):
        other = fingerprint(apply_exact(a, name).checkpoint(), tokens=mark.tokens)
        assert torch.cosine_similarity(mark.vector, other.vector, dim=0) > 0.9999
        assert other.token_digest == mark.token_digest
    stranger = fingerprint(weights("llama", 1).checkpoint(), tokens=mark.tokens)
    assert torch.cosine_similarity(mark.vector, stranger.vector, dim=0).abs() < 0.3
    with pytest.raises(NoAnchorError, match="unknown"):
        fingerprint(a.checkpoint(), tokens=[b"never"])


def test_pictures_tell_models_apart():
    """Distance of creatures: near vectors (cosine 0.99) below 0.09, independent ones above 0.12, over 30 pairs each."""
    g = np.random.default_rng(0)
    near, far = [], []
    for _ in range(30):
        v, n = g.standard_normal((2, 512))
        n -= n @ v / (v @ v) * v
        n *= np.linalg.norm(v) / np.linalg.norm(n)
        picture = creature(v, 64)
        near.append(distance(picture, creature(0.99 * v + (1 - 0.99**2) ** 0.5 * n, 64)))
        far.append(distance(picture, creature(n, 64)))
    assert max(near) < 0.09 and min(far) > 0.12
    assert np.array_equal(creature(v), creature(2.5 * v))  # only the direction counts
    step = np.abs(features(v) - features(v + 1e-3 * n)).max()
    assert 0 < step < 2e-3
    with pytest.raises(ValueError, match="512"):
        creature(np.zeros(3))


def test_stylegan2_generator_shapes_and_determinism(tmp_path):
    """Architecture of a 16² generator with random weights: shapes, determinism, and the grouped convolution per
    sample."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=g)

    state = {"mapping.w_avg": normal(512), "synthesis.b4.const": normal(16, 4, 4)}
    for i in range(8):
        state |= {f"mapping.fc{i}.weight": normal(512, 512) * 100, f"mapping.fc{i}.bias": normal(512)}
    for r in (4, 8, 16):
        for name in ("conv1",) if r == 4 else ("conv0", "conv1"):
            key = f"synthesis.b{r}.{name}"
            state |= {
                f"{key}.weight": normal(16, 16, 3, 3),
                f"{key}.bias": normal(16),
                f"{key}.noise_strength": normal(),
            }
            state |= {
                f"{key}.noise_const": normal(r, r),
                f"{key}.affine.weight": normal(16, 512),
                f"{key}.affine.bias": normal(16),
            }
        key = f"synthesis.b{r}.torgb"
        state |= {f"{key}.weight": normal(3, 16, 1, 1), f"{key}.bias": normal(3)}
        state |= {f"{key}.affine.weight": normal(16, 512), f"{key}.affine.bias": normal(16)}
    generator = StyleGAN2(state)
    v, w = normal(512).numpy(), normal(512).numpy()
    picture = generator(v)
    assert picture.shape == (16, 16, 3) and picture.dtype == np.uint8
    assert np.array_equal(picture, generator(v)) and not np.array_equal(picture, generator(w))
    both = generator.synthesis(generator.mapping(torch.tensor(np.stack([v, w]))))
    torch.testing.assert_close(
        both[:1], generator.synthesis(generator.mapping(torch.tensor(v)[None])), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ValueError, match="G_ema"):
        StyleGAN2({"x": torch.zeros(1)})
    (tmp_path / "g.pkl").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ValueError, match="safetensors"):
        StyleGAN2.load(tmp_path / "g.pkl")

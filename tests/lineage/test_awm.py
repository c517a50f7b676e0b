"""AWM against closed forms, dense U-centring, planted maps, and unrelated matrices."""

import numpy as np
import pytest
import torch

from conftest import WIDTH
from fathom.lineage.align import align
from fathom.lineage.attack import apply_exact
from fathom.lineage.awm import awm, spectral_power
from fathom.lineage.canonical import balance_product
from fathom.lineage.cka import Samples, biased_cka, centred_gram, unbiased_cka
from fathom.lineage.errors import NoAnchorError, NoEvidenceError
from fathom.lineage.short_products import gram, is_short, precision


def oracle(x, y):
    """Unbiased CKA from the definition: sums over distinct indices (Song et al.), numpy float64."""
    d = len(x)

    def hsic(k, l):
        k, l = k - np.diag(np.diag(k)), l - np.diag(np.diag(l))
        one = np.ones(d)
        return (
            np.trace(k @ l)
            + (one @ k @ one) * (one @ l @ one) / ((d - 1) * (d - 2))
            - 2 / (d - 2) * (one @ k @ l @ one)
        )

    k, l = x @ x.T, y @ y.T
    return hsic(k, l) / np.sqrt(hsic(k, k) * hsic(l, l))


@pytest.mark.parametrize(("p", "q"), [(3, 5), (40, 11), (70, 90), (20, 33)])
def test_closed_form_gram_form_and_definition_agree(p, q):
    g = torch.Generator().manual_seed(p)
    x = torch.randn(33, p, generator=g, dtype=torch.float64)
    y = 0.5 * x[:, :1] + torch.randn(33, q, generator=g, dtype=torch.float64)
    want = oracle(x.numpy(), y.numpy())
    assert unbiased_cka(Samples.of(x), Samples.of(y)) == pytest.approx(want, rel=1e-10)
    assert (centred_gram(x) * centred_gram(y)).sum().item() == pytest.approx(want, rel=1e-10)


def test_products_of_bfloat16_numbers_lose_nothing():
    """On units that take bfloat16 or TF32, where this machine has them: float64 is the judge."""
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(300, n, generator=g).bfloat16().float() for n in (200, 310))
    assert is_short(x) and is_short(x.T) and is_short(-4 * x.flip(1)) and is_short(x[::2])
    nearly = x.clone()
    nearly[-1, -1] += 2**-20
    assert not is_short(nearly) and not is_short(nearly.T) and not is_short(x.double())
    with precision(True):
        product = (x.T @ y).double()
    exact = x.double().T @ y.double()
    assert ((product - exact).abs() <= 1e-6 * (x.double().abs().T @ y.double().abs())).all()
    score = unbiased_cka(Samples.of(x), Samples.of(y))
    assert score == pytest.approx(oracle(x.double().numpy(), y.double().numpy()), abs=1e-6)

    wide = torch.randn(1031, 7, generator=g, dtype=torch.float64)  # odd, and above the size where blocks begin
    torch.testing.assert_close(gram(wide), torch.einsum("ik,jk->ij", wide, wide))

    torch.set_float32_matmul_precision("high")  # a training script's choice does not reach other matrices
    try:
        with pytest.raises(KeyError), precision(False):
            assert torch.get_float32_matmul_precision() == "highest"
            raise KeyError
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_invariances_and_degenerate_inputs():
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(50, 20, generator=g, dtype=torch.float64) for _ in range(2))
    u = torch.linalg.qr(torch.randn(20, 20, generator=g, dtype=torch.float64))[0]
    want = unbiased_cka(Samples.of(x), Samples.of(y))
    assert unbiased_cka(Samples.of(x @ u * 1e6), Samples.of(-1e-6 * y)) == pytest.approx(want, rel=1e-9)
    assert unbiased_cka(Samples.of(x), Samples.of(x)) == pytest.approx(1, abs=1e-12)
    constant, zero = torch.ones(50, 7), torch.zeros(50, 7)
    for flat in (constant, zero, 1000 * constant):
        assert unbiased_cka(Samples.of(flat), Samples.of(x.float())) == 0
        assert centred_gram(flat).abs().max() == 0
    duplicate = torch.cat([x, x])
    assert np.isfinite(unbiased_cka(Samples.of(duplicate), Samples.of(torch.cat([y, y]))))
    with pytest.raises(ValueError, match="same samples"):
        unbiased_cka(Samples.of(x), Samples.of(y[:30]))
    with pytest.raises(ValueError, match="at least 4"):
        Samples.of(x[:3])


def test_unbiased_is_the_point():
    """Independent Gaussians: unbiased about 0, biased far above it."""
    g = torch.Generator().manual_seed(0)
    scores, biased = [], []
    for _ in range(20):
        x, y = (torch.randn(128, 96, generator=g) for _ in range(2))
        scores.append(unbiased_cka(Samples.of(x), Samples.of(y)))
        biased.append(biased_cka(x, y))
    assert abs(np.mean(scores)) < 4 * np.std(scores) / 20**0.5 + 1e-3
    assert np.mean(biased) > 0.3


def test_lap_finds_planted_map_and_kept_dims():
    g = torch.Generator().manual_seed(0)
    e = torch.randn(400, WIDTH, generator=g)
    order, signs = torch.randperm(WIDTH, generator=g), torch.randint(0, 2, (WIDTH,), generator=g) * 2.0 - 1
    rows = list(range(400))
    found = align(e, e[:, order] * signs + 0.3 * torch.randn(400, WIDTH, generator=g), rows, rows, "lap")
    assert torch.equal(found.index, order) and torch.equal(found.sign, signs)
    assert 0.8 < found.confidence < 1 and found.margin > 0.5
    narrow = align(e, e[:, order[:40]] * signs[:40], rows, rows, "lap")
    assert torch.equal(narrow.index, order[:40]) and torch.equal(narrow.sign, signs[:40])
    with pytest.raises(ValueError, match="wider"):
        align(e[:, :10], e, rows, rows, "lap")
    with pytest.raises(NoAnchorError, match="no shared tokens"):
        align(e, e, [], [], "lap")


def test_procrustes_finds_planted_rotation():
    g = torch.Generator().manual_seed(0)
    e = torch.randn(400, WIDTH, generator=g, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64))[0]
    found = align(e, 3 * e @ turn, list(range(400)), list(range(400)), "procrustes")
    torch.testing.assert_close(found.rotation, turn)
    assert found.confidence == pytest.approx(1)


def test_self_score_and_symmetry(weights):
    a, b = weights("llama").checkpoint(), weights("llama", 1).checkpoint()
    for options in ({"hardened": False}, {}, {"alignment": "procrustes"}, {"power": 0.25}):
        assert awm(a, a, **options).score == pytest.approx(1, abs=1e-6)
    # Signs go to one side only and U-centring sees them: symmetric to O(1/d), about 1e-4 at real widths.
    assert awm(a, b).score == pytest.approx(awm(b, a).score, abs=0.2 / WIDTH)
    assert abs(awm(a, b, hardened=False).score) < 0.15


def test_depth_pruning_recovers_kept_layers(weights):
    original = weights("llama")
    kept = [0, 2, 3]
    pruned = original.clone()
    pruned.tensors = {k: v for k, v in original.tensors.items() if not k.startswith("layers.")}
    for new, old in enumerate(kept):
        for role in original.roles(old):
            pruned.set(new, role, original.get(old, role))
    pruned.config["num_hidden_layers"] = len(kept)
    for a, b in ((original, pruned), (pruned, original)):
        result = awm(a.checkpoint(), b.checkpoint())
        assert result.score == pytest.approx(1, abs=1e-4) and result.order == 1
        assert [s.layer_a if a is original else s.layer_b for s in result.layers] == kept


def test_width_pruning_is_matched_by_rectangular_lap(weights):
    original = weights("llama")
    keep = torch.arange(0, WIDTH, 2)
    pruned = original.clone()
    for key, tensor in original.tensors.items():
        axis = {"o": 0, "down": 0}.get(key.split(".")[-1], -1)
        pruned.tensors[key] = tensor.index_select(axis, keep)
    pruned.config["hidden_size"] = len(keep)
    paper = awm(original.checkpoint(), pruned.checkpoint(), hardened=False)
    assert paper.score == pytest.approx(1, abs=1e-4)
    # Pair balance is computed over the dims a model has, so half the dims balance a little differently.
    assert awm(original.checkpoint(), pruned.checkpoint()).score > 0.99


def test_replaced_embedding_falls_back_to_other_anchors(weights):
    """A re-initialised input embedding: axes as they are, or the output head when they were permuted too."""
    original = weights("llama")
    fresh = original.clone()
    fresh.tensors["embed"] = torch.randn_like(original.tensors["embed"])
    result = awm(original.checkpoint(), fresh.checkpoint())
    assert (
        result.score == pytest.approx(1, abs=1e-4)
        and result.alignment.anchor == "identity"
        and result.anchors_tried == 1
    )
    moved = apply_exact(fresh, "permute")
    result = awm(original.checkpoint(), moved.checkpoint())
    assert (
        result.score == pytest.approx(1, abs=1e-4) and result.alignment.anchor == "head" and result.anchors_tried == 3
    )


def test_balance_product_is_invariant_and_exact():
    g = torch.Generator().manual_seed(0)
    a = torch.randn(2, 3, 5, 20, generator=g, dtype=torch.float64)
    b = torch.randn(2, 1, 5, 20, generator=g, dtype=torch.float64)
    m = torch.randn(2, 1, 5, 5, generator=g, dtype=torch.float64)
    product = torch.einsum("gmhd,gnhe->gmnde", a, b)
    one = balance_product(a, b)
    two = balance_product(m @ a, torch.linalg.inv(m).mT @ b)
    for x, y in (one, two):
        torch.testing.assert_close(torch.einsum("gmhd,gnhe->gmnde", x, y), product)
    for x, y in zip(one, two):  # equal up to the sign of each singular direction
        torch.testing.assert_close(x.abs(), y.abs(), rtol=1e-8, atol=1e-8)


def test_spectral_power_against_svd():
    w = torch.randn(30, 20, dtype=torch.float64)
    u, s, vt = torch.linalg.svd(w, full_matrices=False)
    torch.testing.assert_close(spectral_power(w, 0.25), u * s.pow(0.25) @ vt)
    torch.testing.assert_close(spectral_power(w.T, 0.5), vt.T * s.sqrt() @ u.T)


@pytest.mark.parametrize("power", [18, 21])
def test_exact_scales_at_the_ends_of_float32(weights, power):
    """Rotary pairs of q and k scaled against each other, gains against readers, the stream itself: factors whose
    squares float32 cannot hold."""
    original, factor = weights("llama").to(torch.bfloat16), 2.0 ** round(power * np.log2(10))
    changed, g = original.clone(), original.geometry
    pairs = torch.ones(2, g.head_dim // 2)
    pairs[:, ::2] = factor
    for layer in range(changed.depth):
        for role, scale in (("q", pairs), ("k", 1 / pairs)):
            heads = original.get(layer, role).view(-1, 2, g.head_dim // 2, WIDTH)
            changed.set(layer, role, (heads * scale[..., None]).reshape(-1, WIDTH).bfloat16())
    assert awm(original.checkpoint(), changed.checkpoint()).score == pytest.approx(1, abs=1e-4)
    folded = original.clone()
    for layer in range(folded.depth):
        folded.set(layer, "attn_norm", original.get(layer, "attn_norm") * factor)
        for role in "qkv":
            folded.set(layer, role, original.get(layer, role) / factor)
    assert awm(original.checkpoint(), folded.checkpoint()).score == pytest.approx(1, abs=1e-4)
    stream = original.clone()
    for scale in (factor, 1 / factor):
        stream.tensors["embed"] = original.tensors["embed"] * scale
        result = awm(original.checkpoint(), apply_exact(stream, "permute").checkpoint())
        assert result.score == pytest.approx(1, abs=1e-4) and result.alignment.anchor == "embedding"


def test_scores_do_not_depend_on_scale():
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(40, n, generator=g) for n in (30, 50))
    want = oracle(x.double().numpy(), y.double().numpy())
    for scale in (1e-30, 1e-20, 1e20, 1e30):
        assert unbiased_cka(Samples.of(x * scale), Samples.of(y)) == pytest.approx(want, abs=1e-6)
        assert (centred_gram(x * scale) * centred_gram(y)).sum().item() == pytest.approx(want, abs=1e-6)


def test_a_constant_on_all_samples_is_not_seen():
    """Columns with means far above their spread: the rest decides, and float32 keeps it."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 40, generator=g)
    y = x[:, :20] + 0.5 * torch.randn(60, 20, generator=g)
    want = oracle(x.double().numpy(), y.double().numpy())
    for offset in (1, 10, 100):
        moved = x + offset * torch.randn(40, generator=g)
        assert unbiased_cka(Samples.of(moved), Samples.of(y)) == pytest.approx(want, abs=1e-5)
        assert (centred_gram(moved) * centred_gram(y)).sum().item() == pytest.approx(want, abs=1e-5)


def test_layers_whose_attention_writes_nothing_are_left_out(weights):
    """W_o = 0: queries and keys are no part of the function, so they neither lower a score nor count as compared."""
    silent = weights("llama").clone()
    silent.set(1, "o", torch.zeros_like(silent.get(1, "o")))
    result = awm(silent.checkpoint(), silent.checkpoint())
    assert result.score == pytest.approx(1, abs=1e-6) and result.coverage == 0.75
    other = silent.clone()
    other.set(1, "q", torch.randn_like(other.get(1, "q")))
    assert awm(silent.checkpoint(), other.checkpoint()).score == pytest.approx(1, abs=1e-6)
    for layer in range(silent.depth):
        silent.set(layer, "o", torch.zeros_like(silent.get(layer, "o")))
    with pytest.raises(NoEvidenceError, match="query and key"):
        awm(silent.checkpoint(), silent.checkpoint())

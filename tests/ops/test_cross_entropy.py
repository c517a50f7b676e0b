"""Cross-entropy from hidden states against F.cross_entropy on materialised logits."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from checked import linear_cross_entropy, plain_cross_entropy

from fathom.ops.cross_entropy import gradients_of_chunk, losses_of_chunk, token_cross_entropies
from fathom.ops.vocabulary_mixture import mixture_of_chunk, vocabulary_mixture
from tiny import assert_close

B, T, D, V = 3, 7, 6, 13


def inputs(dtype=torch.float64, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in ((B, T, D), (V, D)))
    targets = torch.randint(0, V, (B, T), generator=generator)
    targets[torch.rand(B, T, generator=generator) < 0.3] = -100
    targets[0, 0], targets[0, 1] = 0, V - 1
    return hidden.requires_grad_(requires_grad), weight.requires_grad_(requires_grad), targets


def plain(hidden, weight, targets):
    logits = (hidden @ weight.T).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("chunk", [1, 4, 20, 21, 4096])
def test_value_and_gradients(dtype, tolerance, chunk):
    hidden, weight, targets = inputs(dtype)
    expected, actual = plain(hidden, weight, targets), linear_cross_entropy(hidden, weight, targets, chunk)[0]
    assert actual.dtype == dtype
    assert_close(actual, expected, tolerance)
    terms = linear_cross_entropy(hidden, weight, targets, chunk)[1]
    each = F.cross_entropy((hidden @ weight.T).transpose(1, 2), targets, ignore_index=-100, reduction="none")
    assert_close(terms, each, tolerance)
    assert not terms.requires_grad
    for a, b in zip(
        torch.autograd.grad(3.5 * actual, (hidden, weight)),
        torch.autograd.grad(3.5 * expected, (hidden, weight)),
        strict=True,
    ):
        assert_close(a, b, tolerance)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_what_needs_a_gradient_gets_one(needs):
    hidden, weight, targets = inputs()
    hidden, weight = (x.detach().requires_grad_(n) for x, n in zip((hidden, weight), needs, strict=True))
    loss = linear_cross_entropy(hidden, weight, targets, 4)[0]
    assert_close(loss, plain(hidden, weight, targets), 1e-12)
    assert loss.requires_grad == any(needs)
    if any(needs):
        loss.backward()
        assert [x.grad is not None for x in (hidden, weight)] == list(needs)


def test_gradcheck():
    hidden, weight, targets = inputs()
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, targets, 4)[0], (hidden, weight))


def test_second_derivatives_are_refused_not_left_out():
    hidden, weight, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, targets, 4)[0]
    with pytest.raises(RuntimeError, match=r"create_graph=True: .* no second derivatives; use eval mode"):
        torch.autograd.grad(loss, (hidden, weight), create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_over_items_is_not_rounded_before_it_scales(dtype):
    """1/37 in bf16 is 0.23 % off: every gradient would be, in the same direction."""
    hidden, weight, targets = inputs(dtype)
    loss = linear_cross_entropy(hidden, weight, targets, 4)[0]
    sums = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    for mean, total in zip(torch.autograd.grad(loss / 37, (hidden, weight)), sums, strict=True):
        assert torch.equal(mean, (total.double() / 37).to(dtype))


def test_all_targets_ignored():
    hidden, weight, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100), 4)[0]
    loss.backward()
    assert loss.item() == 0 and hidden.grad.abs().max() == 0 and weight.grad.abs().max() == 0


def test_large_logits_do_not_overflow():
    hidden, weight, targets = inputs(torch.float32)
    big, expected = hidden * 1e4, plain(hidden.double() * 1e4, weight.double(), targets)
    loss = linear_cross_entropy(big, weight, targets, 4)[0]
    assert loss.isfinite()
    assert_close(loss.double(), expected)
    assert torch.autograd.grad(loss, weight)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_as_its_logits_allow(dtype):
    """Against float64 on the same rounded inputs."""
    hidden, weight, targets = inputs(dtype)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected, actual = plain(*exact, targets), linear_cross_entropy(hidden, weight, targets, 4)[0]
    assert actual.dtype == torch.float32
    assert_close(actual.double(), expected, torch.finfo(dtype).eps)
    for a, b in zip(torch.autograd.grad(actual, (hidden, weight)), torch.autograd.grad(expected, exact), strict=True):
        assert a.dtype == dtype
        assert_close(a.double(), b, 4 * torch.finfo(dtype).eps)


def test_autocast_gives_full_precision_gradients_near_the_exact_ones():
    hidden, weight, targets = inputs(torch.float32)
    expected = plain(hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        actual = linear_cross_entropy(hidden, weight, targets, 4)[0]
    assert actual.dtype == torch.float32
    assert_close(actual, expected, 0.01)
    for a, b in zip(
        torch.autograd.grad(actual, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)), strict=True
    ):
        assert a.dtype == torch.float32
        assert_close(a, b, 0.03)


def test_no_tensor_of_tokens_by_vocabulary_is_kept():
    hidden = torch.randn(1, 512, 4, requires_grad=True)
    weight = torch.randn(1000, 4, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        linear_cross_entropy(hidden, weight, torch.zeros(1, 512, dtype=torch.long), 64)[0]
    assert kept and max(kept) < 512 * 1000 / 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_plain_form_sums_in_fp32_or_wider(dtype):
    hidden, weight, targets = inputs(dtype)
    logits = (hidden @ weight.T).flatten(0, 1)
    loss = plain_cross_entropy(logits, targets.flatten()).sum()
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    kept = targets.flatten() != -100
    exact = -logits.double().log_softmax(-1)[kept, targets.flatten()[kept]].sum()
    assert_close(loss.double(), exact, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_compiled_chunks_are_the_plain_ones(dtype):
    """What `training.compile: layers` compiles beside the layers, gradients and odd last chunks among it."""
    torch._dynamo.reset()
    hidden, weight, targets = inputs(dtype)
    of_chunk = torch.compile(gradients_of_chunk, backend="aot_eager")
    losses = torch.compile(losses_of_chunk, backend="aot_eager")
    pairs = [
        (plain(hidden, weight, targets), linear_cross_entropy(hidden, weight, targets, 4, of_chunk)[0]),
        *((token_cross_entropies(hidden, weight, targets, f).square().sum() for f in (losses_of_chunk, losses)),),
    ]
    mix = torch.compile(mixture_of_chunk, backend="aot_eager")
    forms = [vocabulary_mixture(hidden, weight, 2 * weight, chunk=5, of_chunk=f) for f in (mixture_of_chunk, mix)]
    pairs.append(tuple(form.square().sum() for form in forms))
    for expected, actual in pairs:
        assert_close(actual, expected, 1e-12 if dtype == torch.float64 else 1e-5)
        for a, b in zip(
            torch.autograd.grad(actual, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)), strict=True
        ):
            assert_close(a, b, 1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("hidden_dtype, dtype", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_hidden_states_in_another_dtype_than_autocast(hidden_dtype, dtype):
    hidden, weight, targets = inputs(torch.float32)
    half = hidden.detach().to(hidden_dtype).requires_grad_()
    with torch.autocast("cpu", dtype):
        loss = linear_cross_entropy(half, weight, targets, 4)[0]
    found = torch.autograd.grad(loss, (half, weight))
    wanted = torch.autograd.grad(plain(hidden, weight, targets), (hidden, weight))
    for a, b, own in zip(found, wanted, (hidden_dtype, torch.float32), strict=True):
        assert a.dtype == own
        assert_close(a.float(), b, 0.03)


def test_the_eager_form_holds_four_and_a_half_chunks_of_logits():
    """In fp32; one more would be 1.6 GB of a vocabulary of 50 thousand."""
    hidden = torch.randn(1, 512, 8, requires_grad=True)
    weight, targets = torch.randn(20_000, 8, requires_grad=True), torch.randint(0, 20_000, (1, 512))
    with torch.profiler.profile(profile_memory=True) as profile:
        linear_cross_entropy(hidden, weight, targets, chunk=256)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = [0, *itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))]
    assert 3 < max(held) / (256 * 20_000 * 4) < 4.7

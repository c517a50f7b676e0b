"""The invariants of continuous diffusion with a contextual decoder, against closed forms and plain code in float64."""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from latent_models import LENGTH, MASK, Plain, ids, model, randn
from transformers import AutoConfig, AutoModel

from fathom.latents.decoder import CrossAttention
from fathom.latents.encoder import Latents
from fathom.latents.process import Process
from fathom.latents.sampling import SOLVERS, decode, stepped
from tiny import assert_close

TIMES = torch.linspace(0.01, 1.0, 34, dtype=torch.float64)
PROCESSES = [Process("vp", schedule) for schedule in ("tangent", "cosine", "linear", "sqrt")] + [Process("rectified")]
every_process = pytest.mark.parametrize("process", PROCESSES, ids=lambda p: p.schedule if p.kind == "vp" else p.kind)
shared = functools.cache(model)  # of tests that change nothing


def drawn(generator, rows):
    return torch.randn(rows, 1, 1, dtype=torch.float64, generator=generator)


# ---------------------------------------------------------------- 1 to 3: the process


@every_process
def test_alpha_and_sigma_and_their_rates(process):
    alpha, sigma = process.alpha_sigma(TIMES)
    if process.kind == "vp":
        torch.testing.assert_close(alpha**2 + sigma**2, torch.ones_like(TIMES))
    else:
        torch.testing.assert_close(alpha + sigma, torch.ones_like(TIMES))
    assert (alpha.diff() < 0).all() and (sigma.diff() > 0).all() and alpha[-1] < 0.01
    t = TIMES[TIMES < 0.95].clone().requires_grad_()
    for part, rate in zip(process.alpha_sigma(t), process.rates(t.detach()), strict=True):
        (expected,) = torch.autograd.grad(part.sum(), t, retain_graph=True)
        torch.testing.assert_close(rate, expected, rtol=1e-6, atol=1e-9)
    f, square = process.drift(t.detach())
    alpha, sigma = process.alpha_sigma(t.detach())
    of_alpha, _ = process.rates(t.detach())
    torch.testing.assert_close(f, of_alpha / alpha)
    if process.kind == "vp":  # f = −β/2, g² = β
        torch.testing.assert_close(square, process.beta(t.detach()))
        torch.testing.assert_close(f, -process.beta(t.detach()) / 2)
    else:
        torch.testing.assert_close(square, 2 * t.detach() / (1 - t.detach()))


def test_the_tangent_schedule_is_the_sheets():
    t = TIMES[:-1]
    tangent = torch.tan(math.pi * t / 2)
    torch.testing.assert_close(Process(delta=9.0).alpha_sigma(t)[0], 1 / (1 + 81 * tangent**2).sqrt())
    beta = math.pi * 81 * tangent * (1 + tangent**2) / (1 + 81 * tangent**2)
    torch.testing.assert_close(Process(delta=9.0).beta(t), beta)
    for same in (Process(delta=1.0), Process(schedule="cosine")):
        torch.testing.assert_close(same.alpha_sigma(TIMES)[0], torch.cos(math.pi * TIMES / 2))
    narrow = Process().alpha_sigma(torch.tensor([1.0, 1e-4], dtype=torch.bfloat16))
    assert narrow[0].dtype == torch.float32 and narrow[0][0] == 0 and narrow[1][0] == 1 and narrow[1][1] > 0


@every_process
@pytest.mark.parametrize("prediction", ["x0", "v", "eps"])
def test_predictions_say_the_same_vectors(process, prediction):
    process = Process(process.kind, process.schedule, prediction=prediction)
    x0, noise = randn(4, 5, 3, dtype=torch.float64), randn(4, 5, 3, seed=1, dtype=torch.float64)
    t = torch.tensor([0.05, 0.4, 0.8, 0.99], dtype=torch.float64)
    x = process.corrupt(x0, t, noise)
    said = process.target(x0, t, noise)
    torch.testing.assert_close(process.denoised(said, x, t), x0)
    torch.testing.assert_close(process.noise(x0, x, t), noise)
    if prediction == "v" and process.kind == "rectified":  # the velocity dx/dt
        torch.testing.assert_close(said, noise - x0)
    each = torch.rand(4, 5, dtype=torch.float64)  # a time for every token
    spread = process.corrupt(x0, each, noise)
    for row in range(4):
        for token in range(5):
            alpha, sigma = process.alpha_sigma(each[row, token])
            torch.testing.assert_close(spread[row, token], alpha * x0[row, token] + sigma * noise[row, token])


@every_process
def test_solvers_with_an_oracle_follow_the_process(process):
    """x̂₀ = x₀: DDIM stays on α x₀ + σ ε exactly, Euler's ODE nears it with more steps; the noisy solvers have its
    variance, `ancestral` with any number of steps, Euler's SDE with thousands."""
    x0, noise = torch.full((4096, 1, 1), 0.7, dtype=torch.float64), randn(4096, 1, 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)

    def run(solver, steps, begin=0.9, end=0.05):
        x = process.corrupt(x0, torch.full((4096,), begin, dtype=torch.float64), noise)
        times = torch.linspace(begin, end, steps + 1, dtype=torch.float64)
        for t, s in pairwise(times):
            x = stepped(process, solver, x, x0, t, s, functools.partial(drawn, generator, len(x)))
        return x

    alpha, sigma = process.alpha_sigma(torch.tensor(0.05, dtype=torch.float64))
    expected = alpha * x0 + sigma * noise
    torch.testing.assert_close(run("ddim", 7), expected)
    errors = [float((run("ode", steps) - expected).abs().max()) for steps in (500, 1000)]
    straight = process.kind == "rectified"  # where one step of Euler's is exact
    assert errors[1] < (1e-9 if straight else min(0.6 * errors[0], 0.02))
    for solver, steps in (("ancestral", 6), ("sde", 1500)):
        x = run(solver, steps)
        assert float(x.mean()) == pytest.approx(float(alpha * 0.7), abs=0.02)
        assert float(x.var()) == pytest.approx(float(sigma**2), rel=0.1)  # of 4096 draws: standard error 2.2 %


def test_eulers_sde_needs_thousands_of_steps():
    """What the guide warns of: of 50 steps from 1 to 0.01 the variance is ten times σ²."""
    process, x = Process(), randn(8192, 1, 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    times = torch.linspace(1, 0.01, 51, dtype=torch.float64)
    for t, s in pairwise(times):
        x = stepped(process, "sde", x, torch.zeros_like(x), t, s, functools.partial(drawn, generator, len(x)))
    assert float(process.alpha_sigma(times[-1])[1] ** 2) == pytest.approx(0.0196, abs=2e-4)
    assert float(x.var()) == pytest.approx(0.218, rel=0.1)


# ---------------------------------------------------------------- 4: the norm


@pytest.mark.parametrize("normalisation", ["per_dim", "scalar", "l2"])
@pytest.mark.parametrize("bottleneck", ["none", "pca", "linear"])
def test_the_norm_is_that_of_the_training_set_and_inverts(normalisation, bottleneck):
    width = {"none": None}.get(bottleneck, 8)
    space = model(normalisation=normalisation, bottleneck=bottleneck, latent_dim=width).space
    text = ids(16)
    with torch.no_grad():
        raw = space.features(text).double()
        z, x = space.projected(raw.float()), space.encode(text)
    assert x.shape == (16, LENGTH, width or 32)
    if bottleneck != "none":
        basis = space.directions.double()
        torch.testing.assert_close(basis.T @ basis, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-6)
        centered = raw.flatten(0, 1) - raw.flatten(0, 1).mean(0)
        assert_close(z.flatten(0, 1).double(), centered @ basis, 1e-4)
        if bottleneck == "pca":  # no other directions have more variance: the singular values of the centered rows
            best = torch.linalg.svdvals(centered)[:8] ** 2
            assert (centered @ basis).square().sum().item() == pytest.approx(best.sum().item(), rel=1e-5)
    flat = x.flatten(0, 1).double()
    if normalisation == "per_dim":
        torch.testing.assert_close(flat.mean(0), torch.zeros_like(flat[0]), rtol=0, atol=1e-4)
        torch.testing.assert_close(flat.var(0, correction=0), torch.ones_like(flat[0]), rtol=1e-3, atol=0)
    elif normalisation == "scalar":
        assert float(flat.mean()) == pytest.approx(0, abs=1e-4)
        assert float(flat.var(correction=0)) == pytest.approx(1, rel=1e-3)
        assert flat.var(0).max() > 1.2 * flat.var(0).min()  # dimensions keep their ratios
    else:
        torch.testing.assert_close(x.square().mean(-1), torch.ones(16, LENGTH), rtol=1e-5, atol=0)
        torch.testing.assert_close(space.normalise(x), x, rtol=1e-5, atol=1e-5)
        return
    torch.testing.assert_close(space.normalise(z) * space.deviation + space.mean, z, rtol=1e-4, atol=1e-5)


def test_special_tokens_and_padding_have_vectors_of_their_own():
    space, text = shared().space, ids(2)
    text[0, 3] = 2  # the end of a text
    mask = torch.ones_like(text, dtype=torch.bool)
    mask[1, 9:] = False
    x = space.encode(text, mask)
    row = space.encoder.get_input_embeddings().weight[2]
    torch.testing.assert_close(x[0, 3], (row - row.mean()) / (row.var(correction=0) + 1e-5).sqrt())
    assert (x[1, 9:] == 0).all() and (x[1, :9] != 0).any()
    torch.testing.assert_close(x[1, :9], space.encode(text[1:, :9])[0], rtol=1e-4, atol=1e-5)
    kept = model(specials="kept").space.encode(text)
    assert not torch.allclose(kept[0, 3], x[0, 3]) and torch.allclose(kept[0, 4], space.encode(text)[0, 4])


@torch.no_grad()
def test_states_of_an_early_layer_need_no_layer_behind_it():
    text = ids(2)
    for depth in ({"name": "vanilla"}, {"name": "pondering", "steps": 1}):
        for layer in (0, 1, 2):
            tested = model(frozen={"depth": depth}, layer=layer).space
            expected = tested.encoder(text, output_hidden_states=True).hidden_states[layer]
            if layer < 2:  # of two
                with mock.patch.object(tested.encoder.model.layers[1], "forward", side_effect=AssertionError):
                    found = tested.features(text)
            else:
                found = tested.features(text)
            assert torch.equal(found, expected)


# ---------------------------------------------------------------- 5 and 6: the parts


@pytest.mark.parametrize("options", [{}, {"time": "adaln", "self_conditioning": "concat"}, {"skips": False}], ids=str)
def test_the_denoiser_is_the_one_written_out(options):
    tested, x, previous = shared(**options), randn(2, LENGTH, 32), randn(2, LENGTH, 32, seed=1)
    t = torch.tensor([0.2, 0.9])
    plain = Plain(tested.denoiser_mean)
    with torch.no_grad():
        for given in (previous, None):
            found = tested.denoise(x, t, given)
            for row in range(2):
                expected = plain.denoised(x[row], float(t[row]), None if given is None else given[row])
                assert_close(found[row].double(), expected, 2e-5)


@pytest.mark.parametrize("mode", ["add", "concat"])
def test_no_estimate_of_the_step_before_counts_as_zeros(mode):
    tested, x, t = shared(self_conditioning=mode), randn(2, LENGTH, 32), torch.tensor([0.3, 0.7])
    with torch.no_grad():
        none, zeros = tested.denoise(x, t), tested.denoise(x, t, torch.zeros_like(x))
        torch.testing.assert_close(none, zeros, rtol=0, atol=1e-6)
        assert (tested.denoise(x, t, x) - none).abs().max() > 1e-3
        off = model(self_conditioning="none")
        assert torch.equal(off.denoise(x, t, x), off.denoise(x, t))


DECODERS = [{}, {"memory_positions": "learned"}, {"memory_positions": "none"}, {"diagonal": True}]


@pytest.mark.parametrize("options", DECODERS, ids=str)
def test_the_decoder_is_the_one_written_out(options):
    tested, text, z = shared(**options), ids(2), randn(2, LENGTH, 32)
    with torch.no_grad():
        logits = tested.decoder_logits(text, None, z)
    for row in range(2):
        expected = Plain(tested.decoder).logits([1, *text[row, :-1].tolist()], z[row])
        assert_close(logits[row].double(), expected, 2e-5)


@pytest.mark.parametrize("options", DECODERS, ids=str)
def test_the_decoder_is_causal_and_reads_every_row_of_the_memory(options):
    tested, text = shared(**options), ids(1)
    z = randn(1, LENGTH, 32).requires_grad_()
    logits = tested.decoder_logits(text, None, z)
    for i in (0, 5, LENGTH - 1):
        changed = text.clone()
        changed[0, i:] = (changed[0, i:] + 7) % 90 + 3
        torch.testing.assert_close(tested.decoder_logits(changed, None, z)[0, : i + 1], logits[0, : i + 1])
        (gradient,) = torch.autograd.grad(logits[0, i].logsumexp(0), z, retain_graph=True)
        assert (gradient[0].abs().amax(-1) > 0).all()
    plain = tested.decoder(input_ids=text, use_cache=False).logits  # without a memory a language model
    again = tested.decoder_logits(text, None, z, use_memory=False)
    assert plain.shape == again.shape and not torch.allclose(again, logits)


# ---------------------------------------------------------------- 7 to 9: decoding


@pytest.mark.parametrize("options", DECODERS, ids=str)
def test_cached_decoding_is_the_full_forward_and_reads_the_memory_once(options):
    tested = shared(**options)
    latents = Latents(randn(2, LENGTH, 32), None, tested.space.fingerprint())
    made = CrossAttention.keys_values
    with mock.patch.object(CrossAttention, "keys_values", autospec=True, side_effect=made) as counted:
        text = tested.decode(latents)
    assert counted.call_count == tested.decoder.config.num_hidden_layers
    expected = torch.full((2, 1), 1)
    with torch.no_grad():
        memory = tested.decoder.read(latents.values)
        for _ in range(LENGTH):
            logits = tested.decoder(input_ids=expected, memory=memory, use_cache=False).logits[:, -1]
            expected = torch.cat([expected, logits.argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(text, expected[:, 1:])
        whole = tested.decoder(input_ids=expected, memory=memory, use_cache=False).logits
        first = tested.decoder(input_ids=expected[:, :4], memory=memory, use_cache=True)
        cache = first.cache if hasattr(first, "cache") else first.past_key_values
        steps = [first.logits]
        for i in range(4, LENGTH + 1):
            steps.append(tested.decoder(input_ids=expected[:, i : i + 1], memory=memory, past_key_values=cache).logits)
        assert_close(torch.cat(steps, dim=1), whole)


def test_rows_of_the_memory_are_found_by_their_positions():
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    text, z = ids(2), randn(2, LENGTH, 32)
    inputs = F.pad(text[:, :-1], (1, 0), value=1)
    for positions in ("rotary", "learned", "none"):
        decoder = shared(memory_positions=positions).decoder
        with torch.no_grad():
            plain = decoder(input_ids=inputs, memory=decoder.read(z)).logits
            moved = decoder(input_ids=inputs, memory=decoder.read(z[:, order])).logits
            places = order[None].expand(2, -1)
            with_places = decoder(input_ids=inputs, memory=decoder.read(z[:, order], position_ids=places)).logits
        assert_close(with_places, plain)
        assert ((moved - plain).abs().max() > 1e-3) == (positions != "none")


def test_the_temperature_is_that_of_the_softmax():
    tested = shared()
    z = randn(1, 1, 32).expand(4000, -1, -1)
    latents = Latents(z, None, tested.space.fingerprint())
    with torch.no_grad():
        logits = tested.decoder(input_ids=torch.tensor([[1]]), memory=tested.decoder.read(z[:1])).logits[0, 0].double()
    greedy = decode(tested, latents, temperature=0.0)
    assert (greedy == logits.argmax()).all()
    assert torch.equal(decode(tested, latents, temperature=1e-4), greedy)
    for temperature in (1.0, 2.0):
        drawn = decode(tested, latents, temperature=temperature, seed=5).flatten().bincount(minlength=97) / 4000
        expected = (logits / temperature).softmax(0)
        error = (expected * (1 - expected) / 4000).sqrt()
        assert ((drawn - expected).abs() <= 4.5 * error + 1e-9).all()
    nucleus = decode(tested, latents, temperature=1.0, top_p=0.5)
    probability, token = logits.softmax(0).sort(descending=True)
    kept = token[: int((probability.cumsum(0) < 0.5).sum()) + 1]
    assert set(nucleus.flatten().tolist()) <= set(kept.tolist())


# ---------------------------------------------------------------- 12 to 14: stages, rows, counts


@pytest.mark.parametrize("stage", ["latent_diffusion", "contextual_decoder"])
def test_no_gradient_crosses_the_stages(stage):
    tested = model().train()
    tested.requires_grad_(True)
    tested.space.encoder.requires_grad_(False)
    given = {"t": torch.tensor([0.2, 0.5, 0.9]), "self_condition": True} if stage == "latent_diffusion" else {}
    tested(ids(), stage=stage, labels=ids(), **given).loss.backward()
    reached = {name.split(".")[0] for name, p in tested.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == {"denoiser" if stage == "latent_diffusion" else "decoder"}
    tested.train_stage(stage)
    assert {name.split(".")[0] for name, p in tested.named_parameters() if p.requires_grad} == reached
    counts = tested.part_parameters()
    assert set(counts) == {"encoder", "denoiser", "decoder"}
    assert counts["decoder"] == sum(p.numel() for p in tested.decoder.parameters())


def test_losses_are_means_over_tokens_and_dimensions():
    tested, text = shared(), ids(2)
    t, noise = torch.tensor([0.3, 0.6]), randn(2, LENGTH, 32)
    labels = text.clone()
    labels[1, 7:] = -100
    with torch.no_grad():
        x0 = tested.space.encode(text)
        loss = tested(text, stage="latent_diffusion", labels=labels, t=t, noise=noise, self_condition=True).loss
        expected = 0.0
        for row in range(2):
            alpha = 1 / math.sqrt(1 + 81 * math.tan(math.pi * float(t[row]) / 2) ** 2)
            x = alpha * x0[row] + math.sqrt(1 - alpha**2) * noise[row]
            plain = Plain(tested.denoiser)  # the weights that learn
            said = plain.denoised(x, float(t[row]), plain.denoised(x, float(t[row]), None).float())
            kept = labels[row] != -100
            expected += float((said - x0[row])[kept].square().mean(-1).sum())
        assert float(loss) == pytest.approx(expected / 19, rel=1e-5)
        logits = tested.decoder_logits(text, None, x0)
        expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        assert float(tested(text, labels=labels, z=x0).loss) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_rows_are_independent_and_padding_changes_nothing(solver):
    tested, prompt = shared(), ids(2, 4)
    given = {"solver": solver, "steps": 4, "temperature": 0.0, "max_new_tokens": 6, "return_dict_in_generate": True}
    padded = prompt.clone()
    mask = torch.ones_like(prompt)
    mask[1, :2] = 0
    both = tested.generate(padded, mask, seed=[3, 4], **given)
    first = tested.generate(prompt[:1], seed=[3], **given)
    second = tested.generate(prompt[1:, 2:], seed=[4], **given)
    assert torch.equal(both.sequences[0], first.sequences[0]) and torch.equal(both.sequences[0, :4], prompt[0])
    assert torch.equal(both.sequences[1, 2:], second.sequences[0])
    assert_close(both.latents.values[0], first.latents.values[0], 1e-4)
    assert_close(both.latents.values[1, 2:], second.latents.values[0], 1e-4)


def test_padding_that_is_masked_is_not_seen():
    tested, text = shared(padding="masked"), ids(2)
    mask = torch.ones_like(text, dtype=torch.bool)
    mask[:, 9:] = False
    other = text.clone()
    other[:, 9:] = 5
    z = randn(2, LENGTH, 32)
    z_other = torch.where(mask[..., None], z, randn(2, LENGTH, 32, seed=9))
    with torch.no_grad():
        a = tested.decoder_logits(text, mask, z)[:, :9]
        b = tested.decoder_logits(other, mask, z_other)[:, :9]
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, tested.decoder_logits(text[:, :9], None, z[:, :9]), rtol=1e-4, atol=1e-5)
        t = torch.tensor([0.3, 0.6])
        seen = [tested.denoise(x, t, mask=mask)[:, :9] for x in (z, z_other)]
        torch.testing.assert_close(*seen)
        targets = shared()  # padding as targets: seen, as a vector of zeros
        assert not torch.allclose(*(targets.denoise(x, t, mask=mask)[:, :9] for x in (z, z_other)))


def counted(kind):
    return mock.patch.object(kind, "forward", autospec=True, side_effect=kind.forward)


def test_passes_and_tokens_are_counted_apart():
    tested = shared()
    for prompt, new in ((None, LENGTH), (ids(2, 5), LENGTH - 5)):
        with counted(type(tested.denoiser)) as passes, counted(type(tested.decoder)) as steps:
            out = tested.generate(prompt, rows=2, steps=7, return_dict_in_generate=True)
        assert out.nfe == passes.call_count == 7
        assert out.decoder_steps == steps.call_count == new
        assert out.sequences.shape == (2, LENGTH)


def test_known_tokens_stay_and_holes_are_filled():
    tested, text = shared(), ids(2)
    holes = text.clone()
    holes[0, 2:5] = holes[1, 6:] = MASK
    for temperature in (0.0, 1.0):
        out = tested.generate(holes, infill=True, steps=3, temperature=temperature)
        assert torch.equal(out[holes != MASK], text[holes != MASK]) and out.shape == text.shape


def test_what_is_known_outlives_an_eos_that_is_written_before_it(monkeypatch):
    """Every hole becomes EOS (2): known text after it stays, and the row ends after its last known token."""
    tested, text = shared(), ids(2)
    text[0, 1] = 2  # known, it ends nothing
    holes = text.clone()
    holes[0, 3:5] = holes[0, 9:] = holes[1, 6:] = MASK
    plain = tested.decoder.forward

    def only_eos(*args, **kwargs):
        out = plain(*args, **kwargs)
        out.logits[:] = torch.nn.functional.one_hot(torch.tensor(2), out.logits.shape[-1])
        return out

    monkeypatch.setattr(tested.decoder, "forward", only_eos)
    out = tested.generate(holes, infill=True, steps=3, temperature=0, stop_at_eos=True)
    assert out[0].tolist() == [*text[0, :3].tolist(), 2, 2, *text[0, 5:9].tolist(), 2, 0, 0]
    assert out[1].tolist() == [*text[1, :6].tolist(), 2, *[0] * 5]
    out = tested.generate(rows=2, temperature=0, steps=3, stop_at_eos=True)
    assert out.tolist() == [[2, *[0] * 11]] * 2


@pytest.mark.parametrize("solver", ["ddim", "ancestral", "ode", "sde"])
@pytest.mark.parametrize("options", [{}, {"schedule": "cosine"}, {"process": "rectified"}])
def test_a_denoiser_of_noise_that_errs_a_little_samples_near_the_data(options, solver, monkeypatch):
    """All vectors are c: ε = (x − α c)/σ. An error of 0.01 must not be divided by α = 0 at t = 1."""
    tested = model(prediction="eps", **options)
    c = randn(1, 1, tested.config.latent_dim)

    def noise(x, t, previous=None, mask=None):
        alpha, sigma = (part[:, None, None] for part in tested.process.alpha_sigma(t))
        return (x - alpha * c) / sigma + 0.01

    monkeypatch.setattr(tested.denoiser_mean, "forward", noise)
    found = tested.generate(rows=2, steps=50, solver=solver, temperature=0, return_dict_in_generate=True).latents.values
    assert float((found - c).abs().max()) < 0.05


# ---------------------------------------------------------------- saved and loaded; what is refused


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_saved_and_loaded_by_the_auto_class(tied, tmp_path):
    frozen = {"tie_word_embeddings": tied}
    tested = model(decoder=frozen, frozen=frozen, bottleneck="pca", latent_dim=8, diagonal=True)
    tested.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(tested) and AutoConfig.from_pretrained(tmp_path).codar["latent_dim"] == 8
    given = {"rows": 2, "steps": 3, "temperature": 0.0}
    assert torch.equal(loaded.generate(**given), tested.generate(**given))
    with torch.no_grad():
        torch.testing.assert_close(loaded.encode(ids()).values, tested.encode(ids()).values, rtol=0, atol=0)
    encoder = loaded.space.encoder
    assert (encoder.lm_head.weight is encoder.model.embed_tokens.weight) == tied
    state = loaded.state_dict()
    state.pop("denoiser.input.bias")
    loaded.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"missing.*denoiser\.input\.bias"):
        AutoModel.from_pretrained(tmp_path)


def test_the_running_mean_follows_the_weights():
    tested = model()
    before = [p.clone() for p in tested.denoiser_mean.parameters()]
    tested.update_mean(0)  # decay 1/10
    for mean, old, weight in zip(tested.denoiser_mean.parameters(), before, tested.denoiser.parameters(), strict=True):
        torch.testing.assert_close(mean, 0.1 * old + 0.9 * weight)


@pytest.mark.parametrize(("call", "said"), [
    (lambda m: m.denoise(randn(1, 4, 32), torch.tensor([0.0])), "t=0.0: must be above 0 and at most 1"),
    (lambda m: m.denoise(randn(1, 4, 32), torch.tensor([1.5])), "t=1.5: must be above 0 and at most 1"),
    (lambda m: m.denoise(randn(1, 4, 16), torch.tensor([0.5])), "vectors of width 16: .* latent_dim=32"),
    (lambda m: m.encode(ids(1, 13)), "13 tokens: .* length=12"),
    (lambda m: m.encode(torch.tensor([[5, 97]])), "inputs: row 0 holds the id 97, .* below vocab_size=97"),
    (lambda m: m.generate(torch.tensor([[5], [-1]])), "inputs: row 1 holds the id -1, which must be at least 0"),
    (lambda m: m.generate([[1, 2]]), "inputs: give token ids"),
    (lambda m: m.generate(steps=2.0), "steps=2.0: must be a whole number"),
    (lambda m: m.generate(temperature="1"), "temperature='1': must be a number"),
    (lambda m: m.generate(torch.ones(1, 2)), r"inputs of torch\.float32: give token ids"),
    (lambda m: m.decode(Latents(randn(1, 4, 32), None, 7)), "space=7: these vectors have another norm"),
    (lambda m: m.decode(Latents(randn(1, 4, 16), None, m.space.fingerprint())), "width 16"),
    (lambda m: m.generate(ids(1, 6), max_new_tokens=7), "max_new_tokens=7: .* 13; the model was trained .* length=12"),
    (lambda m: m.generate(ids(1, 12)), "max_new_tokens=None"),
    (lambda m: m.generate(restandardise=True, max_new_tokens=1), "restandardise=True: one token has no variance"),
    (lambda m: m.generate(solver="heun"), "solver='heun': must be one of ddim, ancestral, ode, sde"),
    (lambda m: m.generate(step=3), r"step=3: no option of LatentGenerationConfig \(did you mean 'steps'\?\)"),
    (lambda m: m.generate(ids(), infill=True), "infill=True: no row holds the mask token 96"),
    (lambda m: m.generate(ids(1, 4), torch.tensor([[1, 1, 1, 0]])), "padded on the right"),
    (lambda m: m(ids(), stage="both"), "stage='both': must be one of"),
    (lambda m: model(latent_dim=16), "latent_dim=16: the encoder's vectors have 32; give a bottleneck"),
    (lambda m: model(bottleneck="pca", latent_dim=64), "latent_dim=64: a bottleneck of 32"),
    (lambda m: model(layer=3), "layer=3: the encoder has 2 layers"),
    (lambda m: model(schedule="cos"), "codar option schedule='cos': must be one of"),
    (lambda m: model(sched="cosine"), r"codar option 'sched' does not exist \(did you mean 'schedule'\?\)"),
    (lambda m: model({"depth": {"name": "loop"}}), "denoiser: depth='loop': its blocks run with depth='vanilla'"),
    (lambda m: model(source="learned"), "source='learned' with bottleneck='none' and normalisation='per_dim'"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call(shared())


def test_padding_may_have_any_id():
    inputs, mask = torch.tensor([[-100, 5, 6]]), torch.tensor([[0, 1, 1]])
    out = shared().generate(inputs, mask, max_new_tokens=3)
    zeros = shared().generate(inputs.clamp(min=0), mask, max_new_tokens=3)
    assert out[0, :3].tolist() == [-100, 5, 6] and torch.equal(out[:, 1:], zeros[:, 1:])


def test_a_model_that_has_not_been_trained_does_not_write():
    tested = model()
    tested.config.trained = ["latent_diffusion"]
    with pytest.raises(ValueError, match="stage 'contextual_decoder' has not been trained yet"):
        tested.generate()
    tested.space.fitted.fill_(False)
    with pytest.raises(ValueError, match="the norm of the vectors is not fitted"):
        tested.encode(ids())

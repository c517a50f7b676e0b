"""Noise levels, Euler steps, guidance and the training loss, against closed forms."""

from __future__ import annotations

import dataclasses

import mova_tiny as tiny
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch._dynamo.testing import CompileCounter

from fathom.audiovideo import FlowMatchPairScheduler, Mova, MovaModel, branches
from fathom.audiovideo.guidance import guided
from fathom.audiovideo.joint import condition
from fathom.audiovideo.scheduler import add_noise, draw, levels, shifted, unshifted


def test_the_shift_is_monotone_and_fixes_its_ends():
    u = torch.linspace(0, 1, 101, dtype=torch.float64)
    for a in (0.5, 1.0, 5.0):
        sigma = shifted(u, a)
        assert sigma[0] == 0 and sigma[-1] == 1 and (sigma.diff() > 0).all()
        torch.testing.assert_close(unshifted(sigma, a), u)
    assert torch.equal(shifted(u, 1.0), u)


def test_the_schedule_has_the_levels_of_the_sheet_and_of_diffusers():
    scheduler = FlowMatchPairScheduler(video_shift=5.0, audio_shift=1.0)
    video, audio = scheduler.sigmas.T
    assert [round(float(x), 5) for x in video[:3]] == [1.0, 0.99595, 0.99176]
    assert round(float(video[49]), 5) == 0.10504 and video[50] == audio[50] == 0
    stock = FlowMatchEulerDiscreteScheduler(shift=5.0)
    stock.set_timesteps(sigmas=(1 - torch.arange(50).double() * ((1 - 0.003 / 1.002) / 50)).numpy())
    torch.testing.assert_close(video.float(), stock.sigmas, atol=1e-6, rtol=0)
    for steps, high in ((50, 18), (25, 9), (10, 4)):
        scheduler.set_timesteps(steps)
        assert int((scheduler.sigmas[:-1, 0] >= 0.9).sum()) == high
    assert round(float(levels(25, 5.0)[-1]), 3) == 0.183


def test_the_table_of_training_has_359_levels_for_the_first_expert():
    table = levels(1000, 5.0)
    assert int((table >= 0.9).sum()) == 359 and round(float(table[-1]), 4) == 0.0196 and table[0] == 1
    u = (torch.arange(4000) + 0.5) / 4000
    for quantised in (True, False):
        high, low = (draw(u, 5.0, quantised, *ends) for ends in ((0.9, None), (None, 0.9)))
        assert high.min() >= 0.9 and low.max() < 0.9 and low.min() > 0
    assert set(draw(u.double(), 5.0, True).tolist()) == set(table.tolist())
    assert (draw(u.double(), 5.0, False) >= 0.9).double().mean() == pytest.approx(1 - 0.9 / 1.4, abs=3e-4)


def test_quantised_steps_are_exact_where_the_number_of_steps_divides_1000():
    exact, table = FlowMatchPairScheduler(), FlowMatchPairScheduler(quantize_sigma=True)
    for steps, differs in ((10, False), (25, False), (40, False), (50, False), (30, True)):
        for scheduler in (exact, table):
            scheduler.set_timesteps(steps)
        worst = float((exact.sigmas - table.sigmas).abs().max())
        assert (worst > 1e-5) == differs and worst < 1.5e-3


def test_euler_steps_on_the_exact_velocity_end_at_the_clean_latents():
    x0, noise = (torch.randn(2, 3, 5, dtype=torch.float64) for _ in range(2))
    scheduler = FlowMatchPairScheduler(video_shift=7.0, audio_shift=0.7)
    scheduler.set_timesteps(7)
    samples = noise, 2 * noise
    for n in range(7):
        samples = scheduler.step((noise - x0, 2 * noise - x0), n, samples)
    for found in samples:
        torch.testing.assert_close(found, x0)
    sigma = torch.tensor([0.3, 0.8], dtype=torch.float64)
    torch.testing.assert_close(add_noise(x0, noise, sigma) - sigma[:, None, None] * (noise - x0), x0)


# Guidance


def velocities(asked):
    """Velocities of a model with known branches: text adds 2, the bridge 5, both together 1 more."""
    found = [1.0 + 2 * b.text + 5 * b.bridge + (b.text and b.bridge) for b in asked]
    return [(torch.tensor([x]), torch.tensor([-3 * x])) for x in found]


@pytest.mark.parametrize(
    ("text", "bridge", "evaluations"), [(1, 1, 1), (5, 1, 2), (3.5, 3.5, 2), (5, 3.5, 3), (1, 2, 3)]
)
def test_guidance_is_its_formula_with_as_few_evaluations(text, bridge, evaluations):
    asked = []

    def evaluate(some):
        asked.extend(some)
        return velocities(some)

    none, of_bridge, both = 1.0, 6.0, 9.0
    expected = none + bridge * (of_bridge - none) + text * (both - of_bridge)
    for batched in (True, False):
        asked.clear()
        video, audio = guided(evaluate, text, bridge, batched)
        assert len(asked) == evaluations
        assert float(video) == pytest.approx(expected) and float(audio) == pytest.approx(-3 * expected)
    assert sum(branch.weight for branch in branches(text, bridge)) == pytest.approx(1)


# Training


def test_the_condition_marks_the_first_latent_frame():
    first = torch.randn(2, 3, 5, 2, 2)
    found = condition(first, 4)
    assert found.shape[1] == 7 and (found[:, :4, 0] == 1).all() and not found[:, :4, 1:].any()
    assert torch.equal(found[:, 4:], first)


def loss_by_hand(model: MovaModel, batch, expert: int, sigma_v, sigma_a):
    """One clip at a time, from x_σ on."""
    total = 0.0
    for row in range(len(batch["video"])):
        one = {name: value[row : row + 1] for name, value in batch.items()}
        states = model.text_encoder(input_ids=one["input_ids"], attention_mask=one["attention_mask"])[0]
        states = states * one["attention_mask"][..., None]
        s_v, s_a = float(sigma_v[row]), float(sigma_a[row])
        x_v = (1 - s_v) * one["video"] + s_v * one["video_noise"]
        x_a = (1 - s_a) * one["audio"] + s_a * one["audio_noise"]
        mask = torch.zeros(1, 4, *x_v.shape[2:])
        mask[:, :, 0] = 1
        v, a = model.velocities(
            expert, torch.cat([x_v, mask, one["first"]], 1), x_a, states,
            torch.tensor([1000 * s_v]), torch.tensor([1000 * s_a]),
        )  # fmt: skip
        total += ((v - one["video_noise"] + one["video"]) ** 2).mean()
        total += model.config.method.audio_weight * ((a - one["audio_noise"] + one["audio"]) ** 2).mean()
    return total


def test_the_loss_is_the_sum_of_both_over_the_clips_of_the_step():
    model = tiny.model(text_dropout=0.0, audio_weight=0.7, audio_shift=2.0)
    batch = tiny.batch(model.config, 3)
    model.train()
    u = batch["uniform"].double()
    for step, expert in ((0, 0), (1, 1)):
        model.step = step
        edge = 0.9 / (5 - 4 * 0.9)
        u_v = edge + (1 - edge) * u[:, 0] if expert == 0 else edge * u[:, 0]
        right = loss_by_hand(model, batch, expert, 5 * u_v / (1 + 4 * u_v), 2 * u[:, 1] / (1 + u[:, 1]))
        found = model(**batch, num_items_in_batch=torch.tensor(6))
        torch.testing.assert_close(found.loss, right.float() / 6, rtol=1e-5, atol=0)
    model.eval()  # each clip asks the expert of its own noise level
    sigma_v, sigma_a = 5 * u[:, 0] / (1 + 4 * u[:, 0]), 2 * u[:, 1] / (1 + u[:, 1])
    each = [
        loss_by_hand(model, {k: v[i : i + 1] for k, v in batch.items()}, int(s < 0.9), sigma_v[i : i + 1], sigma_a[i:])
        for i, s in enumerate(sigma_v)
    ]
    assert {bool(s < 0.9) for s in sigma_v} == {True, False}
    torch.testing.assert_close(model(**batch).loss, sum(each).float() / 3, rtol=1e-5, atol=0)


def test_only_the_expert_whose_turn_it_is_has_gradients():
    model = tiny.model(bridge_dropout=0.5)
    model.train()
    for step, idle in ((0, "video_dit_2"), (1, "video_dit"), (2, "video_dit_2")):
        model.zero_grad(set_to_none=True)
        model.step = step
        model(**tiny.batch(model.config)).loss.backward()
        without = {name.split(".")[0] for name, weight in model.named_parameters() if weight.grad is None}
        assert without == {idle, "text_encoder"}
    low_first = tiny.model(even_expert="low")
    assert [low_first.training_expert(step) for step in range(3)] == [1, 0, 1]
    assert [tiny.model(experts=1).training_expert(step) for step in range(2)] == [0, 0]


def test_noise_is_shared_only_where_it_is_asked_for():
    u = torch.tensor([[0.2, 0.9], [0.7, 0.1]], dtype=torch.float64)
    model = tiny.model()
    one, other = (model.noise_levels(u, Mova(noise=noise), 1) for noise in ("independent", "shared"))
    assert torch.equal(one[0], other[0])
    torch.testing.assert_close(one[1], shifted(u[:, 1], 5.0))
    torch.testing.assert_close(other[1], other[0])
    wide = model.noise_levels(u, Mova(noise="shared", audio_shift=1.0), None)
    torch.testing.assert_close(wide[1], u[:, 0])


def test_dropped_captions_are_empty_and_dropped_bridges_are_off():
    model = tiny.model(text_dropout=0.5, bridge_dropout=0.5)
    batch = tiny.batch(model.config, 2)
    model.train()

    def loss(text: float, bridge: float, **changes):
        uniform = batch["uniform"].clone()
        uniform[:, 2], uniform[:, 3] = text, bridge
        return model(**{**batch, "uniform": uniform, **changes}).loss

    empty = {"input_ids": batch["null_ids"], "attention_mask": batch["null_mask"]}
    assert torch.equal(loss(0.4, 0.9), loss(0.6, 0.9, **empty)) and not torch.equal(loss(0.4, 0.9), loss(0.6, 0.9))
    off = loss(0.6, 0.4)
    bridge, model.dual_tower_bridge = model.dual_tower_bridge, None
    assert torch.equal(off, loss(0.6, 0.9))
    model.dual_tower_bridge = bridge


def test_what_stands_behind_a_caption_has_no_effect():
    model = tiny.model().eval()
    batch = tiny.batch(model.config, 3)
    other = batch["input_ids"].clone()
    other[batch["attention_mask"] == 0] = 7
    torch.testing.assert_close(model(**batch).loss, model(**{**batch, "input_ids": other}).loss, rtol=1e-6, atol=0)


def test_phases_change_shifts_and_dropout_at_their_share():
    method = Mova(phases=({"share": 1, "audio_shift": 1.0, "text_dropout": 0.5}, {"share": 3}))
    assert [method.at(p).text_dropout for p in (0, 0.2, 0.25, 0.9, 1.0)] == [0.5, 0.5, 0.2, 0.2, 0.2]
    assert method.at(0.1).audio_shift == 1 and method.at(0.5).audio_shift == 5
    assert Mova.from_section(method.to_section()) == method and dataclasses.asdict(
        Mova().at(0.3)
    ) == dataclasses.asdict(Mova())


@pytest.mark.slow
def test_compiled_layers_are_one_graph_whatever_the_noise_and_the_expert():
    model = tiny.model(bridge_dropout=0.5).train()
    batches = [tiny.batch(model.config, seed=step) for step in range(3)]
    right = []
    for step, batch in enumerate(batches):
        model.step = step
        right.append(model(**batch).loss.detach())
    counter = CompileCounter()
    model.compile_blocks(backend=counter)
    for step, batch in enumerate(batches):
        model.step = step
        torch.testing.assert_close(model(**batch).loss, right[step])
    assert counter.frame_count == 2  # a layer of both towers with its exchange, and a video block alone


def test_checkpointing_changes_nothing():
    model = tiny.model(pooled_adaln=True)
    model.train()
    batch = tiny.batch(model.config)
    losses, gradients = [], []
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable()
        model.zero_grad(set_to_none=True)
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None})
    assert torch.equal(*losses) and gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        torch.testing.assert_close(value, gradients[1][name], rtol=1e-5, atol=1e-7)

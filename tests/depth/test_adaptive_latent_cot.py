"""Adaptive Latent CoT against an oracle that runs all slots again each step, under a dense mask and without a cache."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache

from fathom import FathomConfig, FathomForCausalLM
from fathom.cost import forward_flops_per_token, kv_bytes_per_token, training_flops_per_token
from fathom.depth.halting import COLLAPSED_AFTER
from tiny import SIZES, assert_close, tiny_model, tokens

FAMILIES = ("llama", "qwen3", "gpt_neox", "gpt2")
STOPPING = {"steps": 3, "threshold": 0.25, "router_bias": 0.0}  # tokens of the tiny model stop after every step


def make(family="llama", double=True, seed=0, **options):
    model = tiny_model(family, seed=seed, depth={"name": "adaptive_latent_cot", **STOPPING, **options})
    return model.double() if double else model


def same_weights(model, **fields):
    other = tiny_model(model.config.backbone, **fields).to(next(model.parameters()).dtype)
    other.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("depth.")}, strict=False)
    return other


def force_router(model, logit):
    for router in model.depth.routers:
        with torch.no_grad():
            router.weight.zero_()
            router.bias.fill_(logit)


def traced(model, *args, **kwargs):
    out = []
    hook = model.depth.register_forward_hook(lambda module, arguments, output: out.append(output))
    result = model(*args, **kwargs)
    hook.remove()
    return result, out[0]


def oracle(model, ids, penalty_inputs=None):
    """Logits [B, T, V], passes, exit masses, and the states z [B, T, M + 1, d]: slots are laid out step by step, and
    every step runs all T·(k + 1) slots from the start, those that must not run hidden from all others."""
    decoder, options = model.model, model.depth.options
    length, d = ids.shape[1], model.config.hidden_size
    table = model.config.embed_scale * decoder.embed_tokens.weight
    logits, passes, masses, states = [], [], [], []
    for row in ids:
        inputs = [table[row]]
        ran = [[True] * length]
        reach, exits = torch.ones(length, dtype=torch.float64), torch.zeros(length, options.steps + 1).double()
        stop_at, mixed = [None] * length, torch.zeros(length, d, dtype=torch.float64)
        z_all = torch.zeros(length, options.steps + 1, d, dtype=torch.float64)
        for k in range(1, options.steps + 2):
            x, slots = torch.cat(inputs)[None], [(t, s) for s in range(k) for t in range(length)]
            mask = torch.full((len(slots), len(slots)), torch.finfo(torch.float64).min, dtype=torch.float64)
            for a, (t, s) in enumerate(slots):
                for b, (u, r) in enumerate(slots):
                    if u <= t and r <= s and (ran[r][u] or a == b):
                        mask[a, b] = 0
            positions = torch.tensor([[t for t, _ in slots]])
            rotary = decoder.rotary_emb(x, positions) if decoder.rotary_emb else None
            if rotary is None:
                x = x + decoder.embed_positions(positions)
            for layer in decoder.layers:
                x = layer(x, decoder.residual, position_embeddings=rotary, attention_mask=mask[None, None])[0]
            z = decoder.norm(x)[0, -length:]
            z_all[:, k - 1] = z
            going = []
            for t in range(length):
                if not ran[k - 1][t]:
                    going.append(False)
                    continue
                onward = torch.tensor(0.0).double()
                if k <= options.steps:
                    router = model.depth.routers[k - 1 if options.router_per_step else 0]
                    g = (router.weight @ z[t] + router.bias).sigmoid()[0]
                    onward = reach[t] - g if options.halting == "act" else reach[t] * g
                goes = k <= options.steps and bool(onward > options.threshold)
                exits[t, k - 1] = reach[t] - onward if goes else reach[t]
                mixed[t] += exits[t, k - 1] * z[t]
                reach[t] = onward
                stop_at[t] = stop_at[t] if goes else k
                going.append(goes)
            inputs.append(z)
            ran.append(going)
        logits.append(model.lm_head(mixed))
        passes.append(torch.tensor(stop_at))
        masses.append(exits)
        states.append(z_all)
    return tuple(torch.stack(x) for x in (logits, passes, masses, states))


@pytest.mark.parametrize(
    "options", [{}, {"router_per_step": True}, {"halting": "act", "threshold": 0.3, "router_bias": -0.7}], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_parallel_and_cached_forms_equal_the_definition(family, options, form):
    model, ids = make(family, **options), tokens(2, 7)
    expected, passes, masses, _ = oracle(model, ids)
    assert passes.unique().numel() > 1
    for mode in (model, copy.deepcopy(model).train()):
        result, found = traced(mode, ids, use_cache=False)
        assert torch.equal(found.trace["passes"], passes)
        assert_close(result.logits, expected, 1e-9)
        steps = found.trace["exit"].shape[-1]
        assert_close(found.trace["exit"], masses[..., :steps], 1e-9)
        assert masses[..., steps:].abs().max() == 0 if steps < 4 else True
    cache = DynamicCache()
    pieces = [model(part, past_key_values=cache).logits for part in ids.split((3, 1, 1, 2), dim=1)]
    assert_close(torch.cat(pieces, dim=1), expected, 1e-9)


@torch.no_grad()
def test_masses_and_steps_satisfy_their_definitions(form):
    ids = tokens(3, 40)
    for threshold in (0.0, 1e-4, 0.1, 0.3, 0.6, 0.999):
        model = tiny_model(depth={"name": "adaptive_latent_cot", **STOPPING, "threshold": threshold}).double()
        _, found = traced(model, ids, use_cache=False)
        exits, passes = found.trace["exit"], found.trace["passes"]
        torch.testing.assert_close(exits.sum(-1), torch.ones_like(exits[..., 0]), rtol=0, atol=1e-14)
        assert passes.min() >= 1 and passes.max() <= 4
        reach = 1 - torch.cat((torch.zeros_like(exits[..., :1]), exits.cumsum(-1)), dim=-1)
        assert (reach.diff(dim=-1) <= 1e-15).all()
        steps = torch.arange(exits.shape[-1])
        assert ((exits > 0) == (steps < passes[..., None])).all()  # a slot that did not run has no mass


@torch.no_grad()
def test_constant_routers_are_fixed_depth_and_the_ordinary_decoder():
    ids = tokens(2, 9)
    model = make()
    force_router(model, 60.0)
    _, _, _, states = oracle(model, ids)
    result, found = traced(model, ids)
    assert found.trace["passes"].unique().tolist() == [4]
    assert_close(result.logits, model.lm_head(states[:, :, -1]), 1e-9)
    fixed = same_weights(model, depth={"name": "adaptive_latent_cot", "steps": 3, "halting": "fixed"})
    assert_close(fixed(ids).logits, result.logits, 1e-12)
    force_router(model, -60.0)
    result, found = traced(model, ids)
    assert found.trace["passes"].unique().tolist() == [1]
    assert torch.equal(result.logits, same_weights(model)(ids).logits)  # the vanilla decoder, bit by bit


@torch.no_grad()
def test_step_0_sees_no_latent_step():
    """Its states are the ordinary decoder's whatever the router does: exit masses of the first step times them."""
    ids = tokens(2, 9)
    for options in ({}, {"threshold": 0.0}, {"steps": 1}, {"router_bias": 3.0}):
        model, seen = make(**options), []
        hook = model.model.norm.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
        model(ids, use_cache=False)
        hook.remove()
        first = seen[0]
        vanilla = same_weights(model)(ids, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(first, vanilla)


@torch.no_grad()
def test_router_decisions_do_not_see_the_future(form):
    model, ids = make(), tokens(1, 12)
    _, full = traced(model, ids)
    for t in (1, 5, 11):
        _, part = traced(model, ids[:, :t])
        steps = part.trace["exit"].shape[-1]
        assert torch.equal(part.trace["passes"], full.trace["passes"][:, :t])
        assert_close(part.trace["exit"], full.trace["exit"][:, :t, :steps], 1e-12)


@torch.no_grad()
def test_padding_on_either_side_and_the_batch_change_nothing(form):
    model, ids, lengths = make(), tokens(3, 9), (4, 9, 6)
    for right in (True, False):
        mask = torch.tensor([[1] * n + [0] * (9 - n) if right else [0] * (9 - n) + [1] * n for n in lengths])
        padded, found = traced(model, ids.masked_fill(mask == 0, 0), attention_mask=mask, use_cache=False)
        for row, n in enumerate(lengths):
            real = mask[row].bool()
            alone, own = traced(model, ids[row : row + 1, real])
            assert_close(padded.logits[row, real], alone.logits[0], 1e-9)
            assert torch.equal(found.trace["passes"][row, real], own.trace["passes"][0])
            assert found.trace["passes"][row, ~real].tolist() == [1] * (9 - n)


@torch.no_grad()
def test_dead_rows_are_never_seen_when_rows_stop_apart(form):
    """Long decoding of a ragged batch equals each row alone, across the moments when the cache closes its gaps."""
    model, ids = make(), tokens(4, 60)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    prompt, cache = 12, DynamicCache()
    model(ids[:, :prompt], attention_mask=mask[:, :prompt], past_key_values=cache)
    pieces, columns = [], []
    for t in range(prompt, 60):
        pieces.append(model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache).logits)
        columns.append(cache.layers[0].keys.shape[-2])
    assert min(b - a for a, b in pairwise(columns)) < 0  # gaps were closed
    for row in range(4):
        real = mask[row].bool()
        alone, found = traced(model, ids[row : row + 1, real], use_cache=False)
        assert found.trace["passes"].unique().numel() > 1
        assert_close(torch.cat(pieces, dim=1)[row], alone.logits[0, -48:], 1e-9)


def penalty_by_hand(model, ids, labels, power, on):
    _, passes, masses, states = oracle(model, ids)
    reach = 1 - torch.cat((torch.zeros_like(masses[..., :1]), masses.cumsum(-1)), dim=-1)
    total, count = 0.0, 0
    for row in range(len(ids)):
        for t in range(ids.shape[1] - 1):
            if labels[row, t + 1] < 0:
                continue
            count += 1
            mixture = model.lm_head((masses[row, t, :, None] * states[row, t]).sum(0)).softmax(-1)
            for k in range(1, min(passes[row, t].item(), 3) + 1):
                z = states[row, t, k - 1]
                router = model.depth.routers[0]
                g = (router.weight @ z + router.bias).sigmoid().item()
                onward = reach[row, t, k - 1] * g  # of the step that was pruned, too
                p = model.lm_head(z).softmax(-1) if on == "step" else mixture
                cost = g if model.depth.options.penalty_on == "gate" else onward.item()
                total += p[labels[row, t + 1]].item() ** power * cost
    return total / count


@pytest.mark.parametrize("on", ["step", "mixture"])
@pytest.mark.parametrize("penalty_on", ["reach", "gate"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 2.0])
@torch.no_grad()
def test_the_penalty_is_its_formula(beta, penalty_on, on, form):
    model = make(penalty=0.7, beta=beta, penalty_on=penalty_on, correctness_from=on)
    ids = tokens(2, 7)
    labels = ids.masked_fill(torch.tensor([[0, 0, 1, 0, 0, 1, 0], [0] * 7]).bool(), -100)
    _, found = traced(copy.deepcopy(model).train(), ids, labels=labels)
    expected = penalty_by_hand(model, ids, labels, beta, on)
    assert found.losses["penalty"].item() == pytest.approx(0.7 * expected, rel=1e-9)
    assert not traced(model, ids, labels=labels)[1].losses  # held-out loss is the cross-entropy alone


@pytest.mark.parametrize("on", ["step", "mixture"])
@torch.no_grad()
def test_padding_has_no_part_in_the_penalty(on, form):
    """Not even the last one before a row's text, whose target is a real token."""
    model, ids, labels = make(penalty=1.0, correctness_from=on).train(), tokens(2, 7), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    _, found = traced(model, ids, attention_mask=mask, labels=labels.masked_fill(mask == 0, -100))
    alone = [
        traced(model, ids[row : row + 1, start:], labels=labels[row : row + 1, start:])[1]
        for row, start in ((0, 0), (1, 3))
    ]
    expected = (6 * alone[0].losses["penalty"] + 3 * alone[1].losses["penalty"]) / 9
    assert found.losses["penalty"].item() == pytest.approx(expected.item(), rel=1e-9)


@torch.no_grad()
def test_with_beta_0_the_penalty_is_the_expected_number_of_latent_steps(form):
    model, ids = make(penalty=1.0, beta=0.0, threshold=0.0), tokens(2, 9)
    _, found = traced(copy.deepcopy(model).train(), ids, labels=ids)
    exits = found.trace["exit"][:, :-1]
    steps = (exits * torch.arange(4)).sum(-1)  # Σ_k reach_{k+1} = Σ_k (k − 1)·exit_k
    assert found.losses["penalty"].item() == pytest.approx(steps.mean().item(), rel=1e-9)


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("on", ["step", "mixture"])
def test_correctness_has_no_gradient(on, form):
    """The penalty's gradient is the one with p^β as constants: none at the head, none but through the router."""
    ids = tokens(2, 7)
    model = make(penalty=0.7, beta=1.5, correctness_from=on).train()
    _, found = traced(model, ids, labels=ids)
    found.losses["penalty"].backward()
    head = model.lm_head.weight.grad
    assert head is None or head.abs().max() == 0
    assert model.depth.routers[0].weight.grad.abs().max() > 0
    table = model.model.embed_tokens.weight.grad
    assert table.abs().max() > 0  # reach depends on z
    detached = make(penalty=0.7, beta=1.5, correctness_from=on, detach_router=True).train()
    _, found = traced(detached, ids, labels=ids)
    found.losses["penalty"].backward()
    assert detached.depth.routers[0].weight.grad.abs().max() > 0
    assert detached.model.embed_tokens.weight.grad is None or detached.model.embed_tokens.weight.grad.abs().max() == 0


def test_without_a_penalty_the_router_learns_from_the_cross_entropy_alone():
    ids = tokens(2, 7)
    free = gradients(make(penalty=0.0).train(), ids)
    assert free["depth.routers.0.weight"].abs().max() > 0
    unscored = make(penalty=0.0, beta=0.0, correctness_from="mixture").train()
    for name, gradient in gradients(unscored, ids).items():
        torch.testing.assert_close(gradient, free[name])


@pytest.mark.parametrize("per_step", [False, True])
def test_every_router_is_in_the_graph_when_no_token_reaches_it(per_step, form):
    """DDP expects a gradient of every parameter on every rank."""
    model, ids = make(router_per_step=per_step, penalty=0.0).train(), tokens(2, 7)
    force_router(model, -60.0)
    assert all(gradient is not None for gradient in gradients(model, ids).values())


def test_gradients_through_detached_steps_stop(form):
    ids = tokens(2, 7)
    whole, cut = (
        gradients(make(penalty=0.0).train(), ids),
        gradients(make(penalty=0.0, detach_between_steps=True).train(), ids),
    )
    assert not torch.allclose(whole["model.layers.0.mlp.up_proj.weight"], cut["model.layers.0.mlp.up_proj.weight"])
    torch.testing.assert_close(whole["lm_head.weight"], cut["lm_head.weight"])  # the forward is the same


def test_exploring_runs_slots_below_the_threshold_in_training_only(form):
    model, ids = make(explore=1.0), tokens(2, 9)
    force_router(model, -3.0)
    assert traced(model, ids)[1].trace["passes"].unique().tolist() == [1]
    assert traced(model.train(), ids)[1].trace["passes"].unique().tolist() == [4]


@torch.no_grad()
def test_the_threshold_at_inference_may_differ():
    ids = tokens(2, 9)
    model = make(eval_threshold=0.6)
    assert_close(model(ids).logits, make(threshold=0.6)(ids).logits, 1e-12)
    assert_close(model.train()(ids).logits, make()(ids).logits, 1e-12)


def test_act_is_graves_algorithm(form):
    """N = min{n: Σ h ≥ 1 − ε}, remainder R = 1 − Σ_{n<N} h, ponder cost N + R."""
    model, ids = make(halting="act", threshold=0.15, penalty=0.3), tokens(2, 7)
    _, passes, _, states = oracle(model, ids)
    router, cost = model.depth.routers[0], 0.0
    for row in range(2):
        for t in range(7):
            total, n = 0.0, 0
            while True:
                n += 1
                h = 1.0 if n == 4 else (router.weight @ states[row, t, n - 1] + router.bias).sigmoid().item()
                if total + h >= 1 - 0.15 or n == 4:
                    break
                total += h
            assert n == passes[row, t]
            cost += (n + 1 - total) / 12 if t < 6 else 0
    _, found = traced(copy.deepcopy(model).train(), ids, labels=ids)
    assert found.losses["penalty"].item() == pytest.approx(0.3 * cost, rel=1e-9)


@torch.no_grad()
def test_exit_gate_trains_on_every_exit_and_reads_one(form):
    """Ouro: Σ_k exit_k·CE_k − λ·H(exit) in training; at inference the first state with a CDF of 1 − τ."""
    model, ids = make(halting="exit_gate", threshold=0.5, penalty=0.2), tokens(2, 7)
    force = same_weights(model, depth={"name": "adaptive_latent_cot", "steps": 3, "halting": "fixed"})
    _, found = traced(copy.deepcopy(model).train(), ids, labels=ids)
    seen = []
    hook = force.model.norm.register_forward_hook(lambda module, args, out: seen.append(out))
    force(ids, use_cache=False)  # all steps run in training
    hook.remove()
    states = torch.stack([z.flatten(0, 1)[:14].view(2, 7, -1) for z in seen])  # laid flat or not
    router = model.depth.routers[0]
    gate = (states[:3] @ router.weight + router.bias).sigmoid()
    mass, left = [], torch.ones(2, 7).double()
    for k in range(3):
        mass.append(left * gate[k])
        left = left * (1 - gate[k])
    mass = torch.stack([*mass, left])
    losses = -model.lm_head(states).log_softmax(-1)[:, :, :-1].gather(-1, ids[:, 1:].expand(4, 2, 6)[..., None])[..., 0]
    entropy = -(mass * mass.log()).sum(0)[:, :-1]
    expected = ((mass[:, :, :-1] * losses).sum(0) - 0.2 * entropy).mean()
    assert found.objective.item() == pytest.approx(expected.item(), rel=1e-9)
    assert model.train()(ids, labels=ids).loss.item() == pytest.approx(expected.item(), rel=1e-9)
    result, read = traced(model.eval(), ids)
    passes = read.trace["passes"]
    assert 0 < (passes == 1).sum() < passes.numel()
    first = torch.tensor([[seen[0][b, t] @ router.weight + router.bias for t in range(7)] for b in range(2)]).sigmoid()
    assert torch.equal(passes == 1, first >= 0.5)
    one = passes == 1
    assert_close(result.logits[one], model.lm_head(seen[0])[one], 1e-9)


def test_exit_gate_gradients_equal_finite_differences(form):
    model, ids = make(halting="exit_gate", threshold=0.3, penalty=0.2).train(), tokens(2, 5)
    found = gradients(model, ids)
    for name in ("depth.routers.0.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"):
        parameter = model.get_parameter(name)
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-5 * direction)
                values.append(model(ids, labels=ids).loss.item())
                parameter.sub_(sign * 1e-5 * direction)
        slope = (found[name] * direction).sum().item()
        assert slope == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6, abs=1e-9)


@torch.no_grad()
def test_costs_by_measured_steps():
    model, ids = make(double=False), tokens(1, 50)
    cache = DynamicCache()
    _, found = traced(model, ids, past_key_values=cache)
    passes = found.trace["passes"]
    ran = [(passes > k).double().mean().item() for k in range(4)]
    slots = int(passes.sum())
    assert {layer.keys.shape[-2] for layer in cache.layers} == {slots} and slots < 200
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == pytest.approx(50 * kv_bytes_per_token(model.config, torch.float32, ran))
    terms, full, vanilla = (
        forward_flops_per_token(config, 50, ran=shares)
        for config, shares in ((model.config, ran), (model.config, None), (same_weights(model).config, None))
    )
    assert terms.linear == pytest.approx(slots / 50 * vanilla.linear)
    assert (full.linear, full.attention) == (4 * vanilla.linear, 10 * vanilla.attention)
    pairs = sum(min(n, k + 1) for t in range(50) for k in range(passes[0, t]) for n in passes[0, : t + 1].tolist())
    # depths taken as independent of each other and of the position: an approximation, on 50 tokens a coarse one
    assert terms.attention == pytest.approx(4 * 8 * 4 * 2 * pairs / 50, rel=0.1)
    assert terms.head == vanilla.head
    steps = training_flops_per_token(model.config, 50, ran=ran) - 3 * terms.matmul
    assert steps == pytest.approx(sum(ran[:3]) * 2 * 32 * 97)  # a head a step, no backward
    for wrong in ((1.0, 0.5), (1.0, 0.5, 0.6, 0.1), (1.2, 1, 1, 1)):
        with pytest.raises(ValueError, match="needs 4 shares between 0 and 1"):
            forward_flops_per_token(model.config, 50, ran=wrong)
    with pytest.raises(ValueError, match="do not stop on their own under depth='vanilla'"):
        forward_flops_per_token(FathomConfig(**SIZES), 50, ran=(1.0,))


@torch.no_grad()
def test_bfloat16_forms_agree_to_a_few_of_its_digits(form):
    """Tolerance 3e-2 of the largest logit: 8 bits of mantissa, four steps. Reach is fp32; the same slots run unless a
    reach is within rounding of τ."""
    model, ids = make(double=False).to(torch.bfloat16), tokens(2, 12)
    parallel, found = traced(model, ids, use_cache=False)
    passes = found.trace["passes"]
    assert passes.unique().numel() > 1 and found.trace["exit"].dtype == torch.float32
    cache = DynamicCache()
    decoded = [traced(model, ids[:, t : t + 1], past_key_values=cache) for t in range(12)]
    assert torch.equal(torch.cat([step[1].trace["passes"] for step in decoded], dim=1), passes)
    assert_close(torch.cat([step[0].logits for step in decoded], dim=1), parallel.logits, 3e-2)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, found = traced(make(double=False), ids, use_cache=False)
    assert found.trace["exit"].dtype == torch.float32
    assert_close(mixed.logits.float(), make(double=False)(ids).logits, 5e-2)


@pytest.mark.parametrize("halting", ["random", "uniform"])
@torch.no_grad()
def test_reference_schedules(halting):
    model = tiny_model(
        depth={"name": "adaptive_latent_cot", "halting": halting, "mean_passes": 2.25}, max_position_embeddings=4096
    )
    _, found = traced(model, tokens(1, 2000), use_cache=False)
    assert found.trace["passes"].double().mean().item() == pytest.approx(2.25, abs=0.06)
    assert not list(model.depth.parameters())


def test_starts_as_documented_and_counts_its_parameters():
    for per_step, routers in ((False, 1), (True, 3)):
        depth = {"name": "adaptive_latent_cot", "router_per_step": per_step}
        model = FathomForCausalLM(FathomConfig(**SIZES, depth=depth))
        assert sum(p.numel() for p in model.depth.parameters()) == routers * (32 + 1)
        assert all(r.weight.abs().max() == 0 and r.bias.item() == 2.0 for r in model.depth.routers)
    config = FathomConfig(**SIZES, depth={"name": "adaptive_latent_cot", "scale_embeds": True})
    assert config.embed_scale == pytest.approx((2.5 * 32) ** 0.5)


@pytest.mark.parametrize("option", ["threshold", "eval_threshold"])
def test_a_threshold_that_prunes_everything_is_refused(option):
    with pytest.raises(ValueError, match=rf"{option}=1.0: .*below 1; .*prunes every latent step.*steps=0"):
        FathomConfig(depth={"name": "adaptive_latent_cot", option: 1.0})


@pytest.mark.parametrize("halting", ["router", "act", "exit_gate"])
def test_a_batch_of_padding_alone_has_every_gradient(halting):
    model, ids = make(halting=halting, router_per_step=True).train(), tokens(2, 8)
    model(ids, attention_mask=0 * ids, labels=0 * ids - 100, num_items_in_batch=20).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("halting", ["act", "fixed", "exit_gate"])
def test_exploring_is_for_routers(halting):
    with pytest.raises(ValueError, match=rf'explore=0.5: applies only with halting="router", not {halting!r}'):
        FathomConfig(depth={"name": "adaptive_latent_cot", "explore": 0.5, "halting": halting})


def test_training_with_a_threshold_above_the_routers_start_is_reported():
    model, ids = make(threshold=0.9, router_bias=0.0).train(), tokens(1, 4)
    force_router(model, 0.0)
    with pytest.warns(UserWarning, match=r"latent_cot: every token stopped.*penalty or threshold.*router_bias"):
        for _ in range(COLLAPSED_AFTER):
            model(ids, labels=ids)


@torch.no_grad()
def test_a_collapsed_router_is_reported_with_the_knobs_to_turn():
    model, ids = make(), tokens(1, 4)
    force_router(model, -50.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(COLLAPSED_AFTER - 1):
            model(ids)
    with pytest.warns(UserWarning, match=r"latent_cot: every token stopped.*penalty or threshold.*router_bias"):
        model(ids)
    force_router(model, 3.0)
    model(ids)
    assert model.depth.watch.forwards == 0

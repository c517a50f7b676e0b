"""AdaPonderLM against the equations written out pass by pass; its dense, sparse and cached forms against each other."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, Trainer, TrainingArguments

from fathom import FathomConfig, FathomForCausalLM
from fathom.cost import forward_flops_per_token, kv_bytes_per_token
from fathom.depth.adaponderlm import mean_of_smallest
from fathom.depth.halting import COLLAPSED_AFTER
from fathom.train import Phases
from tiny import SIZES, assert_close, tiny_model, tokens

FAMILIES = ("llama", "qwen3", "gpt_neox", "gpt2")
HALTING = {"steps": 3, "threshold": 0.45}  # tokens of the tiny model leave after every pass


def make(family="llama", double=True, seed=0, **options):
    model = tiny_model(family, seed=seed, depth={"name": "adaponderlm", **HALTING, **options})
    return model.double() if double else model


def pondering_of(model, name="pondering", **options):
    """The same weights under another depth method."""
    fields = {"depth": {"name": name, **options}}
    other = tiny_model(model.config.backbone, **fields).to(next(model.parameters()).dtype)
    other.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("depth.")}, strict=False)
    return other


def force_gates(model, logit):
    for gate in model.depth.gates:
        with torch.no_grad():
            gate.score.weight.zero_()
            gate.score.bias.fill_(logit)


def traced(model, *args, **kwargs):
    out = []
    hook = model.depth.register_forward_hook(lambda module, arguments, output: out.append((output.trace, arguments[0])))
    result = model(*args, **kwargs)
    hook.remove()
    return result, out[0][0]["passes"], out[0][1]


def attention(layer, x, rotary, frozen, active):
    """One layer's attention with K ← where(m, K, K_before); returns the output and the aligned K, V."""
    module, (rows, length, _) = layer.self_attn, x.shape
    x = layer.input_layernorm(x)
    q, k, v = (p(x).view(rows, length, -1, module.head_dim) for p in (module.q_proj, module.k_proj, module.v_proj))
    if module.qk_norm:
        q, k = module.q_norm(q), module.k_norm(k)
    if rotary is not None:
        cos, sin = (part[:, :, None] for part in rotary)
        width = cos.shape[-1]

        def turn(y):
            a, b = y[..., : width // 2], y[..., width // 2 : width]
            return torch.cat((y[..., :width] * cos + torch.cat((-b, a), -1) * sin, y[..., width:]), -1)

        q, k = turn(q), turn(k)
    if frozen is not None:
        k, v = (torch.where(active[:, :, None, None], new, old) for new, old in zip((k, v), frozen, strict=True))
    groups = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bshd->bhqs", q, k.repeat_interleave(groups, 2)) / module.head_dim**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("bhqs,bshd->bqhd", scores.softmax(-1), v.repeat_interleave(groups, 2))
    return module.o_proj(mixed.flatten(2)), (k, v)


def oracle(model, ids):
    """Logits, passes, and the aligned keys and values by pass and layer: every pass over every token."""
    decoder, options = model.model, model.depth.options
    table = model.config.embed_scale * decoder.embed_tokens.weight
    positions = torch.arange(ids.shape[1])[None]
    e = first = table[ids] * (options.steps if options.premultiply_steps else 1)
    rotary = decoder.rotary_emb(e, positions) if decoder.rotary_emb else None
    active, out, kept, inputs = torch.ones_like(ids).bool(), None, [], [e]
    passes = torch.zeros_like(ids)
    for i in range(options.steps + 1):
        x, now = e if rotary else e + decoder.embed_positions(positions), []
        for number, layer in enumerate(decoder.layers):
            attended, aligned = attention(layer, x, rotary, kept[-1][number] if kept else None, active)
            now.append(aligned)
            if layer.parallel:
                x = x + attended + layer.mlp(layer.post_attention_layernorm(x))
            else:
                x = x + attended
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        kept.append(now)
        h = decoder.norm(x)
        out = h if out is None or not options.freeze_readout else torch.where(active[..., None], h, out)
        passes = passes + active
        if i == options.steps:
            break
        gate = model.depth.gates[i]
        s = (F.gelu(gate.up_proj(h)) @ gate.score.weight + gate.score.bias).sigmoid()
        active = active & (s >= options.threshold)
        logits = model.lm_head(h)
        if options.top_k:
            logits = logits.masked_fill(logits < logits.topk(options.top_k).values[..., -1:], float("-inf"))
        thought = s[..., None] * (logits.softmax(-1) @ table)
        e = torch.where(active[..., None], (e if options.accumulate else first) + thought, e)
        inputs.append(e)
    return model.lm_head(out), passes, kept, inputs


OPTIONS = (
    {},
    {"accumulate": False},
    {"top_k": 5, "premultiply_steps": True, "scale_embeds": True},
    {"freeze_readout": False},
    {"accumulate": False, "freeze_readout": False},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_dense_sparse_and_cached_forms_equal_the_equations(family, options, form):
    model, ids = make(family, **options), tokens(3, 9)
    expected, passes, _, _ = oracle(model, ids)
    assert passes.unique().numel() > 1  # tokens halt at different passes
    result, sparse, _ = traced(model, ids, use_cache=False)
    assert torch.equal(sparse, passes)
    assert_close(result.logits, expected, 1e-9)
    cache = DynamicCache()
    pieces = [model(part, past_key_values=cache).logits for part in ids.split((4, 1, 1, 3), dim=1)]
    assert_close(torch.cat(pieces, dim=1), expected, 1e-9)
    result, dense, _ = traced(copy.deepcopy(model).train(), ids)
    assert torch.equal(dense, passes)
    assert_close(result.logits, expected, 1e-9)


@torch.no_grad()
def test_halted_tokens_keep_keys_values_and_input():
    model, ids = make(), tokens(3, 9)
    _, passes, kept, inputs = oracle(model, ids)
    for mode in (model.eval(), copy.deepcopy(model).train()):
        _, _, stack = traced(mode, ids, use_cache=False)
        for i, layers in enumerate(stack.slots):
            for layer, (key, value) in enumerate(layers):
                assert_close(key.transpose(1, 2), kept[i][layer][0], 1e-9)
                assert_close(value.transpose(1, 2), kept[i][layer][1], 1e-9)
    for i in range(1, 4):
        halted = passes <= i
        assert halted.any()
        assert torch.equal(inputs[i][halted], inputs[i - 1][halted])
        for layer in range(2):
            for before, after in zip(kept[i - 1][layer], kept[i][layer], strict=True):
                assert torch.equal(after[halted], before[halted])
                assert not torch.equal(after[~halted], before[~halted])


@pytest.mark.parametrize("options", [{}, {"accumulate": False}, {"top_k": 5, "premultiply_steps": True}], ids=str)
@torch.no_grad()
def test_open_gates_are_pondering_and_so_is_the_fixed_schedule(options):
    model, ids = make(threshold=0.0, **options), tokens(2, 9)
    force_gates(model, 50.0)
    expected = pondering_of(model, steps=3, **options)(ids).logits
    assert torch.equal(model(ids).logits, expected)
    fixed = pondering_of(model, "adaponderlm", steps=3, halting="fixed", **options)
    assert torch.equal(fixed(ids).logits, expected)


@torch.no_grad()
def test_closed_gates_are_the_ordinary_decoder():
    model, ids = make(), tokens(2, 9)
    force_gates(model, -50.0)
    expected = pondering_of(model, "vanilla")(ids).logits
    assert torch.equal(model(ids).logits, expected)
    assert torch.equal(copy.deepcopy(model).train()(ids).logits, expected)


@torch.no_grad()
def test_threshold_0_halts_nobody_and_the_comparison_includes_equality():
    model, ids = make(threshold=0.0), tokens(1, 5)
    force_gates(model, -800.0)  # σ underflows to 0, and 0 ≥ 0
    assert traced(model, ids)[1].unique().tolist() == [4]
    model = make(threshold=0.5)
    force_gates(model, 0.0)
    assert traced(model, ids)[1].unique().tolist() == [4]
    force_gates(model, -1e-9)
    assert traced(model, ids)[1].unique().tolist() == [1]


@torch.no_grad()
def test_without_the_frozen_readout_all_passes_run_and_logits_differ():
    ids = tokens(2, 9)
    frozen, literal = make()(ids).logits, make(freeze_readout=False)(ids).logits
    assert (frozen - literal).abs().max() > 1e-3


@torch.no_grad()
def test_compact_cache_holds_the_passes_that_ran(form):
    model, ids = make(double=False), tokens(1, 40)
    cache = DynamicCache()
    _, passes, _ = traced(model, ids[:, :25], past_key_values=cache)
    counts = [passes]
    for t in range(25, 40):
        counts.append(traced(model, ids[:, t : t + 1], past_key_values=cache)[1])
    every = torch.cat(counts, dim=1)
    slots = int(every.sum())
    assert slots < 4 * 40
    assert {layer.keys.shape[-2] for layer in cache.layers} == {slots}
    ran = [(every > i).double().mean().item() for i in range(4)]
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == pytest.approx(40 * kv_bytes_per_token(model.config, torch.float32, ran))
    full, measured = (forward_flops_per_token(model.config, 40, ran=r) for r in (None, ran))
    assert measured.linear / full.linear == pytest.approx(every.double().mean().item() / 4)


@torch.no_grad()
def test_right_padding_and_the_batch_change_nothing(form):
    model, ids = make(), tokens(3, 9)
    mask = torch.tensor([[1] * n + [0] * (9 - n) for n in (4, 9, 6)])
    padded, passes, _ = traced(model, ids.masked_fill(mask == 0, 0), attention_mask=mask)
    for row, n in enumerate((4, 9, 6)):
        alone, own, _ = traced(model, ids[row : row + 1, :n])
        assert_close(padded.logits[row, :n], alone.logits[0], 1e-9)
        assert torch.equal(passes[row, :n], own[0])


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(form):
    model, ids = make(), tokens(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    packed = model(ids, position_ids=positions, use_cache=False).logits
    for part in (slice(0, 5), slice(5, 9)):
        assert_close(packed[:, part], model(ids[:, part]).logits, 1e-9)


@torch.no_grad()
def test_a_schedule_of_one_pass_is_no_collapse():
    model, ids = make(halting="uniform", mean_passes=1.0), tokens(1, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(COLLAPSED_AFTER + 1):
            model(ids)
    assert model.depth.watch.forwards == 0


def test_mean_of_smallest():
    values = torch.tensor([3.0, -1.0, 2.0, 0.5, 7.0], requires_grad=True)
    assert mean_of_smallest(values, 0.0) == 0
    assert mean_of_smallest(values, 1.0) == values.mean()
    assert mean_of_smallest(values, 0.01) == -1  # at least one
    assert mean_of_smallest(values, 0.59) == (-1 + 0.5) / 2  # ⌊2.95⌋
    assert mean_of_smallest(values.flip(0), 0.59) == (-1 + 0.5) / 2
    mean_of_smallest(values, 0.59).backward()
    assert values.grad.tolist() == [0, 0.5, 0, 0.5, 0]


def loss_of(model, ids, progress, **kwargs):
    model.depth.progress = progress
    return model(ids, labels=ids, **kwargs).loss


@pytest.mark.parametrize("penalty_on", ["logit", "prob"])
def test_the_penalty_is_the_smallest_gates_of_the_dense_run(penalty_on):
    """By the gates of every pass and token, halted ones among them."""
    model, ids = make(penalty_on=penalty_on, penalty=0.7, prune=0.4).train(), tokens(2, 9)
    gates = []
    hooks = [gate.register_forward_hook(lambda module, args, out: gates.append(out)) for gate in model.depth.gates]
    plain = loss_of(model, ids, 0.0)
    gates.clear()
    loss = loss_of(model, ids, 0.3)  # half-way between 0.1 and 0.5: k = 0.2
    values = torch.stack(gates).flatten()
    assert len(values) == 3 * 2 * 9
    values = values.sigmoid() if penalty_on == "prob" else values
    smallest = values.sort().values[: int(0.2 * 54)]
    assert torch.allclose(loss - plain, 0.7 * smallest.mean())
    for hook in hooks:
        hook.remove()


def test_the_penalty_ends_where_a_token_is_safely_halted():
    model, ids = make(threshold=1e-4).train(), tokens(2, 6)
    force_gates(model, -30.0)
    model.zero_grad()
    model.depth.progress = 1.0
    out = model(ids, labels=ids)
    out.loss.backward()
    plain = make(threshold=1e-4, penalty=0.0).train()
    plain.load_state_dict(model.state_dict())
    plain.depth.progress = 1.0
    plain(ids, labels=ids).loss.backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, parameter.grad)
    logit = torch.tensor(1e-4 / (1 - 1e-4), dtype=torch.float64).log()
    assert torch.allclose(out.loss - plain(ids, labels=ids).loss, 0.1 * (logit - 2))


def test_before_the_second_phase_the_loss_is_the_cross_entropy_bit_by_bit():
    model, ids = make(double=False).train(), tokens(2, 9)
    alone = make(double=False, penalty=0.0, prune=0.0).train()
    assert loss_of(model, ids, 0.0999) == loss_of(alone, ids, 0.0999)
    assert loss_of(model, ids, 0.11) != loss_of(alone, ids, 0.11)
    shares = []
    for progress in (0.0, 0.1, 0.2, 0.3, 0.5, 0.9):
        model.depth.progress = progress
        shares.append(model.depth.pruned_share)
    assert shares == pytest.approx([0, 0, 0.025, 0.05, 0.1, 0.1])


def test_training_that_never_says_how_far_it_is_warns_once(tmp_path):
    data = [{"input_ids": tokens(1, 9, seed=n)[0], "labels": tokens(1, 9, seed=n)[0]} for n in range(8)]
    options = TrainingArguments(str(tmp_path), max_steps=4, report_to=[], use_cpu=True, disable_tqdm=True)
    for callbacks, expected in (([], 0.0), ([Phases()], 3 / 4)):
        model = make(double=False, gate_only=1.0).train()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            start = model.model.norm.weight.clone()
            Trainer(model, options, train_dataset=data, callbacks=callbacks).train()
        assert sum("add fathom.train.Phases()" in str(entry.message) for entry in seen) == (not callbacks)
        assert model.depth.progress == expected
        assert torch.equal(model.model.norm.weight, start) == bool(callbacks)


def test_phases_reach_the_method_that_peft_trains_and_leave_frozen_parameters_alone(tmp_path):
    data = [{"input_ids": tokens(1, 9, seed=n)[0], "labels": tokens(1, 9, seed=n)[0]} for n in range(8)]
    options = TrainingArguments(str(tmp_path), max_steps=8, report_to=[], use_cpu=True, disable_tqdm=True)
    for to_save in ([], ["depth"]):
        model = make(double=False, gate_only=0.5).train()
        model.model.embed_tokens.requires_grad_(False)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=to_save)
        adapted = peft.get_peft_model(model, config)
        seen = []
        depth = adapted.base_model.model.depth
        depth = depth.modules_to_save["default"] if to_save else depth
        depth.register_forward_hook(
            lambda module, args, out, seen=seen: seen.append((module.progress, "penalty" in out.losses))
        )
        Trainer(adapted, options, train_dataset=data, callbacks=[Phases()]).train()
        assert [progress for progress, _ in seen] == [n / 8 for n in range(8)]
        assert [penalised for _, penalised in seen] == [n / 8 > 0.1 for n in range(8)]
        assert any(p.abs().sum() for name, p in adapted.named_parameters() if "lora_B" in name)  # moved after a half


def test_gates_alone_are_refused_where_there_are_none():
    with pytest.raises(ValueError, match=r"gate_only=0.5: .*halting='fixed' there are no gates.*gate_only=0"):
        FathomConfig(depth={"name": "adaponderlm", "halting": "fixed", "gate_only": 0.5})


def test_a_batch_of_padding_alone_has_a_penalty_of_0_and_every_gradient():
    model, ids = make().train(), tokens(1, 8)
    model.depth.progress = 0.7
    model(ids, attention_mask=0 * ids, labels=0 * ids - 100, num_items_in_batch=20).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_growing_share_is_no_new_graph_every_step():
    model, ids = make(double=False).train(), tokens(2, 9)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    for step in range(12):
        model.depth.progress = 0.2 + step / 100
        compiled(ids, labels=ids).loss.backward()
        if step == 1:
            known = len(graphs)
    assert len(graphs) == known


def test_padding_has_no_gate_in_the_penalty():
    model, ids = make(penalty=1.0).train(), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    model.depth.progress = 1.0
    gates = []
    for gate in model.depth.gates:
        gate.register_forward_hook(lambda module, args, out: gates.append(out))
    outputs = []
    model.depth.register_forward_hook(lambda module, args, out: outputs.append(out))
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    values = torch.stack(gates)[:, mask.bool()].flatten()
    assert torch.allclose(outputs[0].losses["penalty"], values.sort().values[: int(0.1 * len(values))].mean())


def test_gradients_of_the_penalised_loss_equal_finite_differences():
    model, ids = make(penalty=0.5, prune=0.5).train(), tokens(2, 6)
    loss = loss_of(model, ids, 1.0)
    loss.backward()
    for name, parameter in model.named_parameters():
        if not name.startswith("depth.gates.0"):
            continue
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-6 * direction)
                values.append(loss_of(model, ids, 1.0).item())
                parameter.sub_(sign * 1e-6 * direction)
        slope = (parameter.grad * direction).sum().item()
        assert slope == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5, abs=1e-9)


def test_parameters_are_the_gates():
    model = make()
    d, k = 32, 3
    assert sum(p.numel() for p in model.depth.parameters()) == k * (d * 4 * d + 4 * d + 4 * d + 1)
    fresh = FathomForCausalLM(FathomConfig(**SIZES, depth={"name": "adaponderlm", "gate_bias": 5.0}))
    for gate in fresh.depth.gates:
        assert gate.score.weight.abs().max() == 0 and gate.score.bias.item() == 5.0


@torch.no_grad()
def test_bfloat16_forms_agree_to_a_few_of_its_digits():
    """Tolerance 3e-2 of the largest logit: 8 bits of mantissa, four passes. Gates are compared in fp32, so the same
    tokens halt unless a gate is within rounding of τ."""
    model, ids = make(double=False).to(torch.bfloat16), tokens(2, 12)
    dense, passes, _ = traced(copy.deepcopy(model).train(), ids)
    sparse, same, _ = traced(model, ids, use_cache=False)
    assert torch.equal(passes, same) and passes.unique().numel() > 1
    cache = DynamicCache()
    decoded = [traced(model, ids[:, t : t + 1], past_key_values=cache) for t in range(12)]
    assert torch.equal(torch.cat([step[1] for step in decoded], dim=1), passes)
    assert_close(sparse.logits, dense.logits, 3e-2)
    assert_close(torch.cat([step[0].logits for step in decoded], dim=1), dense.logits, 3e-2)


@pytest.mark.parametrize("halting", ["random", "uniform"])
@torch.no_grad()
def test_reference_schedules_have_the_mean_that_is_asked_for(halting):
    model = tiny_model(
        depth={"name": "adaponderlm", "halting": halting, "mean_passes": 2.6}, max_position_embeddings=4096
    )
    _, passes, _ = traced(model, tokens(1, 2000), use_cache=False)
    assert passes.double().mean().item() == pytest.approx(2.6, abs=0.06 if halting == "random" else 1e-3)
    assert set(passes.unique().tolist()) == ({1, 2, 3, 4} if halting == "random" else {2, 3})
    assert not list(model.depth.parameters())


@torch.no_grad()
def test_continuing_from_a_pondering_checkpoint(tmp_path):
    torch.manual_seed(0)
    base = FathomForCausalLM(FathomConfig(**SIZES, depth={"name": "pondering", "steps": 3})).eval()
    base.save_pretrained(tmp_path)
    config = FathomConfig.from_pretrained(tmp_path)

    def continued(**options):
        fields = {**config.to_dict(), "depth": {"name": "adaponderlm", "gate_bias": 5.0, **options}}
        return FathomForCausalLM.from_pretrained(tmp_path, config=FathomConfig(**fields)).eval()

    ids = tokens(2, 9)
    expected = base(ids).logits
    actual = continued()(ids).logits
    assert 0 < (actual - expected).abs().max() / expected.abs().max() < 1e-2
    with pytest.raises(ValueError, match=r"pondering.*steps=3, not 2; set steps=3"):
        continued(steps=2)
    with pytest.raises(ValueError, match=r"accumulate=True, not False; set accumulate=True"):
        continued(accumulate=False)


def test_a_threshold_that_halts_everything_is_refused():
    with pytest.raises(ValueError, match=r"threshold=1.0: .*below 1; .*steps=0"):
        FathomConfig(depth={"name": "adaponderlm", "threshold": 1.0})
    with pytest.raises(ValueError, match=r"prune_from=0.6.*prune_full=0.5"):
        FathomConfig(depth={"name": "adaponderlm", "prune_from": 0.6})
    with pytest.raises(ValueError, match=r"mean_passes=None: is needed with halting=\"random\""):
        FathomConfig(depth={"name": "adaponderlm", "halting": "random"})
    with pytest.raises(ValueError, match=r"mean_passes=2.0: applies only with halting"):
        FathomConfig(depth={"name": "adaponderlm", "mean_passes": 2.0})
    with pytest.raises(ValueError, match=r"mean_passes=5.0: must be between 1 and 4"):
        FathomConfig(depth={"name": "adaponderlm", "halting": "uniform", "mean_passes": 5.0})


@torch.no_grad()
@pytest.mark.parametrize("freeze_readout", [True, False])
def test_a_collapsed_gate_is_reported_once(freeze_readout):
    model, ids = make(freeze_readout=freeze_readout), tokens(1, 4)
    force_gates(model, -50.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(COLLAPSED_AFTER - 1):
            model(ids)
        for _ in range(50):  # decoding single tokens says nothing
            model(ids[:, :1])
    with pytest.warns(UserWarning, match=r"adaponderlm: every token stopped.*lower prune, penalty or threshold"):
        model(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids)

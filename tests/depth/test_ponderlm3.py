"""PonderLM-3 against a row-by-row, slot-by-slot oracle written from the definition, without caches or layouts."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from fathom import FathomConfig, FathomForCausalLM
from fathom.cost import forward_flops_per_token, training_flops_per_token
from fathom.cost.sizes import kv_bytes_per_token
from fathom.depth import ponderlm2
from fathom.depth.ponderlm3 import tail_sums
from fathom.models.slots import CHANNEL
from tiny import assert_close, tiny_model, tokens

FAMILIES = ("llama", "qwen3", "gpt_neox", "gpt2")


def make(family="llama", double=True, spread=6.0, **options):
    """`spread` widens the router's logits, so that tokens differ in how far they think."""
    options = {"random_sweeps": False, "penalty_weight": 0.0, **options}
    model = tiny_model(family, depth={"name": "ponderlm3", **options})
    with torch.no_grad():
        model.depth.router.weight.mul_(spread)
    return model.double() if double else model


def route_all_to(model, depth):
    """s one-hot at `depth`, up to e^−200."""
    with torch.no_grad():
        model.depth.router.weight.zero_()
        model.depth.router.bias.fill_(-200.0)
        model.depth.router.bias[depth] = 200.0
    return model


def router_logits(model, h):
    router = model.depth.router
    if model.depth.options.router == "mlp":
        v = h @ router.hidden.weight.T
        h = v / 2 * (1 + torch.erf(v / math.sqrt(2)))
    return h @ router.weight.T + router.bias


def oracle_row(model, ids):
    """One row: logits [T, V], slots run per token, shares [T, K + 1]."""
    decoder, options = model.model, model.depth.options
    table = model.config.embed_scale * decoder.embed_tokens.weight

    def last_state(slots, positions, biases):
        x, positions = torch.stack(slots)[None], torch.tensor([positions])
        rotary = decoder.rotary_emb(x, positions) if decoder.rotary_emb else None
        if rotary is None:
            x = x + decoder.embed_positions(positions)
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
        mask = (mask + torch.stack(biases))[None, None]
        for layer in decoder.layers:
            x = layer(x, decoder.residual, position_embeddings=rotary, attention_mask=mask)[0]
        return decoder.norm(x)[0, -1]

    slots, positions, biases, logits, ran, shares = [], [], [], [], [], []
    for t in range(len(ids)):
        slots.append(table[ids[t]])
        positions.append(t)
        biases.append(torch.zeros((), dtype=table.dtype))
        h = last_state(slots, positions, biases)
        s = router_logits(model, h).softmax(-1)
        mixed, k = s[0] * h, 0
        while k < options.thoughts and s[k + 1 :].sum() >= options.threshold:
            k += 1
            slots.append(h)
            positions.append(t)
            biases.append(s[k:].sum().log())
            h = last_state(slots, positions, biases)
            mixed = mixed + s[k] * h
        logits.append(model.lm_head(mixed))
        ran.append(k + 1)
        shares.append(s)
    return torch.stack(logits), ran, torch.stack(shares)


def oracle(model, ids):
    return torch.stack([oracle_row(model, row)[0] for row in ids])


def slots_run(model, ids):
    return [oracle_row(model, row)[1] for row in ids]


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("options", [{"thoughts": 1}, {"thoughts": 3}, {"thoughts": 2, "router": "mlp"}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_both_modes_equal_the_definition(family, options, threshold):
    options = {"threshold": threshold, **options}
    ids = tokens(2, 6)
    model = make(family, spread=12.0, sweeps=5 * options["thoughts"], **options)
    expected = oracle(model, ids)
    if threshold:  # tokens differ
        ran = slots_run(model, ids)
        assert len({*ran[0], *ran[1]}) > 1
    assert_close(model(ids).logits, expected, 1e-9)
    exact = make(family, spread=12.0, prefill="sequential", **options)
    assert_close(exact(ids).logits, expected, 1e-9)
    assert_close(exact(ids, use_cache=False).logits, expected, 1e-9)


@torch.no_grad()
def test_training_runs_every_slot_under_the_soft_mask():
    ids = tokens(2, 5)
    model = make(thoughts=2, threshold=0.3, sweeps=8).train()
    soft = make(thoughts=2, threshold=0.0)
    logits = oracle(soft, ids)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert_close(model(ids, labels=ids).loss, expected, 1e-9)


@torch.no_grad()
def test_all_at_no_thought_is_vanilla_and_runs_no_thought():
    ids = tokens(2, 7)
    vanilla = tiny_model().double()
    for prefill in ("jacobi", "sequential"):
        model = route_all_to(make(prefill=prefill), 0)
        model.load_state_dict({**model.state_dict(), **vanilla.state_dict()})
        cache = DynamicCache()
        assert_close(model(ids, past_key_values=cache).logits, vanilla(ids).logits, 1e-12)
        assert_close(
            model(ids[:, :1], past_key_values=cache).logits, vanilla(torch.cat((ids, ids[:, :1]), 1)).logits[:, -1:]
        )
        assert {layer.keys.shape[-2] for layer in cache.layers} == {8}


@pytest.mark.parametrize("thoughts", [1, 3])
@torch.no_grad()
def test_all_at_every_thought_is_ponderlm2(thoughts):
    ids = tokens(2, 6)
    model = route_all_to(make(thoughts=thoughts, sweeps=5 * thoughts), thoughts)
    options = {"thoughts": thoughts, "sweeps": 5 * thoughts, "random_sweeps": False}
    fixed = tiny_model(depth={"name": "ponderlm2", **options}).double()
    fixed.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("depth.")})
    assert_close(model(ids).logits, fixed(ids).logits, 1e-9)


@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_sweeps_shrink_the_error_and_the_bound_is_tight(training):
    ids, errors = tokens(2, 6), []
    expected = oracle(make(thoughts=1, threshold=0.0), ids)
    for sweeps in range(6):
        model = make(thoughts=1, threshold=0.0, sweeps=sweeps).train(training)
        errors.append((model(ids).logits - expected).abs().max().item())
    assert errors[5] < 1e-12 < 1e-9 < errors[4]
    assert errors[4] < errors[0]


@torch.no_grad()
def test_pruning_costs_in_proportion_to_the_dropped_mass():
    """The last thought has w = ε everywhere; dropping it moves the logits by O(ε)."""
    ids, errors = tokens(2, 6), []
    for epsilon in (1e-3, 1e-4, 1e-5):
        outputs = []
        for threshold in (0.0, 2 * epsilon):
            model = make(thoughts=2, threshold=threshold, prefill="sequential")
            model.depth.router.weight.zero_()
            model.depth.router.bias.copy_(torch.tensor([0.5, 0.5 - epsilon, epsilon]).log())
            outputs.append(model(ids).logits)
        errors.append((outputs[0] - outputs[1]).abs().max().item())
    assert errors[0] > 1e-6
    for larger, smaller in itertools.pairwise(errors):
        assert 9 < larger / smaller < 11


@torch.no_grad()
def test_tail_sums_and_the_expected_number_of_thoughts():
    model, ids = make(sweeps=18), tokens(2, 7)
    seen = []
    hook = model.depth.register_forward_hook(lambda module, args, out: seen.append(out))
    model(ids)
    hook.remove()
    s = seen[0].trace["shares"]
    assert_close(s, torch.stack([oracle_row(model, row)[2] for row in ids]), 1e-9)
    w = tail_sums(s)
    assert (s.sum(-1) - 1).abs().max() < 1e-12
    assert torch.equal(w[..., 0], torch.ones(2, 7, dtype=w.dtype)) and (w.diff(dim=-1) <= 0).all()
    assert_close(w[..., 1:].sum(-1), (s * torch.arange(4)).sum(-1), 1e-12)
    assert torch.equal(seen[0].trace["passes"], (w >= model.depth.options.threshold).sum(-1))


PENALTIES = {
    "steps": lambda s: (s @ torch.arange(4.0).to(s)).mean(),
    "target": lambda s: ((s @ torch.arange(4.0).to(s)).mean() - 1.5) ** 2,
    "prior": lambda s: F.kl_div(s.new_tensor([0.4, 0.3, 0.2, 0.1]).log(), s.mean(0), reduction="sum"),
}


@pytest.mark.parametrize("penalty", PENALTIES)
def test_the_penalty_is_of_the_tokens_that_have_a_target(penalty):
    """Those that weigh the loss; a padding among them, the last one before a row's text, takes no thought."""
    options = {"penalty": penalty, "target": 1.5, "prior": (0.4, 0.3, 0.2, 0.1), "threshold": 0.0, "sweeps": 15}
    ids, mask = tokens(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 3:5] = -100
    shares = [oracle_row(make(**options), row[start:])[2] for row, start in zip(ids, (2, 0))]
    padding = F.one_hot(torch.tensor([0]), 4).double()
    shares = torch.cat((padding, shares[0][:3], shares[1][[0, 1, 4]]))
    plain = make(**options).train()(ids, attention_mask=mask, labels=labels).loss
    weighted = make(penalty_weight=0.7, **options).train()
    loss = weighted(ids, attention_mask=mask, labels=labels).loss
    assert_close(loss - plain, 0.7 * PENALTIES[penalty](shares), 1e-8)
    with torch.no_grad():  # an evaluation loss is the language model's alone
        assert_close(weighted.eval()(ids, attention_mask=mask, labels=labels).loss, plain, 1e-9)


def test_micro_batches_of_few_and_many_targets_add_up_to_the_batch():
    """Loss and gradients, padded on the left and with labels of -100."""
    model, ids, mask = make(penalty_weight=0.5).train(), tokens(4, 6), torch.ones(4, 6, dtype=torch.long)
    mask[0, :3] = mask[3, :1] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :5] = labels[2, 3:] = -100
    items, found = (labels[:, 1:] != -100).sum(), []
    for rows in (4, 2, 1):
        model.zero_grad()
        losses = [
            model(part, attention_mask=real, labels=wanted, num_items_in_batch=items).loss
            for part, real, wanted in zip(*(x.split(rows) for x in (ids, mask, labels)), strict=True)
        ]
        sum(losses).backward()
        found.append([sum(losses), *(p.grad.clone() for p in model.parameters())])
    assert items == 11 and found[0][0] > 0
    for others in found[1:]:
        for actual, expected in zip(others, found[0], strict=True):
            assert_close(actual, expected, 1e-9)


@pytest.mark.parametrize("penalty", ["steps", "target", "prior"])
def test_a_micro_batch_of_padding_adds_nothing(penalty):
    """Its labels are all ignored; the other micro-batches of the step bring the items."""
    model, ids = make(thoughts=2, penalty=penalty, penalty_weight=0.5).train(), tokens(2, 5)
    padding, ignored = torch.zeros_like(ids), torch.full_like(ids, -100)
    loss = model(ids, attention_mask=padding, labels=ignored, num_items_in_batch=8).loss
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("penalty", ["steps", "target", "prior"])
def test_a_share_that_underflows_to_zero_has_gradients(penalty, double):
    model, ids = make(double=double, thoughts=2, penalty=penalty, penalty_weight=0.5).train(), tokens(2, 5)
    shares = []
    model.depth.register_forward_hook(lambda module, args, out: shares.append(out.trace["shares"]))
    with torch.no_grad():
        model.depth.router.weight.zero_()
        model.depth.router.bias.copy_(torch.tensor([0.0, 0.0, -1000.0]))
    model(ids, labels=ids).loss.backward()
    assert not shares[0][..., 2].any()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert model.depth.router.bias.grad[:2].all()


@pytest.mark.parametrize("penalty", ["steps", "target", "prior"])
def test_gradients_with_a_penalty_equal_finite_differences(penalty):
    model, ids = make(thoughts=2, sweeps=2, penalty=penalty, penalty_weight=0.5).train(), tokens(2, 5)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.depth.named_parameters():
        direction = torch.randn(parameter.shape, dtype=torch.float64)
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.add_(step * direction)
                values.append(model(ids, labels=ids).loss.item())
                parameter.sub_(step * direction)
        slope, expected = (parameter.grad * direction).sum().item(), (values[0] - values[1]) / 2e-5
        assert abs(slope - expected) <= 1e-6 * max(abs(expected), 1e-2), name


def test_the_router_learns_from_the_language_model_alone():
    """Through the mixture, and through the mask: with the mixture's shares cut off a gradient is left."""
    model, ids = make(thoughts=2, sweeps=2).train(), tokens(2, 5)
    model(ids, labels=ids).loss.backward()
    assert model.depth.router.weight.grad.abs().max() > 1e-6
    model.zero_grad()
    shares, calls = model.depth.shares, []

    def detached(h, real):
        s, bias, run = shares(h, real)
        calls.append(1)
        return s.detach(), bias, run

    model.depth.shares = detached
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 2 + 2 + 1 and model.depth.router.weight.grad.abs().max() > 1e-8


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_only_the_last_passes_have_a_backward(passes):
    """As if states, shares and masks that the others leave were cut off by hand; K + J + 1 = 4 forwards."""
    ids, gradients = tokens(2, 6), []
    for wanted in (passes, None):
        model, seen = make(thoughts=1, sweeps=2, gradient_passes=wanted).train(), []
        shares = model.depth.shares

        def cut(value, wanted=wanted, seen=seen):
            return value.detach() if wanted is None and len(seen) <= 4 - passes else value

        def cut_states(module, args, output, cut=cut, seen=seen):
            seen.append(1)
            return cut(output)

        def cut_shares(h, real, cut=cut, shares=shares):
            return tuple(map(cut, shares(h, real)))

        model.model.norm.register_forward_hook(cut_states)
        model.depth.shares = cut_shares
        loss = model(ids, labels=ids).loss
        loss.backward()
        gradients.append([loss, *(p.grad for p in model.parameters())])
    for actual, expected in zip(*gradients):
        assert_close(actual, expected, 1e-12)


def test_the_channel_form_trains_as_the_dense_mask():
    ids, results = tokens(2, 6), []
    for backend in ("eager", "sdpa", CHANNEL):
        model = make(thoughts=2).train()
        model.set_attn_implementation(backend)
        model(ids, labels=ids).loss.backward()
        results.append([p.grad for p in model.parameters()])
    for others in results[1:]:
        for actual, expected in zip(others, results[0]):
            assert_close(actual, expected, 1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has a backward on a GPU only")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_gpu_kernels_train_as_the_dense_mask(compiled, packed):
    """The channel form where slots are plain causal, FlexAttention where documents are packed."""
    torch._dynamo.reset()  # sizes that differ from an earlier test's become symbols, which 2.11's FlexAttention refuses
    ids, results = tokens(2, 60).cuda(), []
    positions = torch.arange(30, device="cuda").repeat(2, 2) if packed else None
    for backend in ("eager", "sdpa") if packed else ("eager", CHANNEL):
        model = make("qwen3", double=False, thoughts=2).cuda().train()  # kernels want 16 channels a head
        model.set_attn_implementation(backend)
        step = torch.compile(model) if compiled and backend != "eager" else model
        step(input_ids=ids, labels=ids, position_ids=positions).loss.backward()
        results.append([p.grad for p in model.parameters()])
    for others in results[1:]:
        for actual, expected in zip(others, results[0]):
            assert_close(actual, expected, 1e-3)


@pytest.mark.parametrize("options", [{"prefill": "sequential"}, {"sweeps": 40}], ids=str)
@torch.no_grad()
def test_decoding_under_the_causal_kernel(options):
    """Both prefills and decoding on the cache, pruned, left-padded, against the dense mask without a cache."""
    ids, mask = left_padded((3, 8, 1, 5))
    expected = make(thoughts=3, threshold=0.3, prefill="sequential")(ids, attention_mask=mask, use_cache=False).logits
    model, cache = make(thoughts=3, threshold=0.3, **options), DynamicCache()
    model.set_attn_implementation(CHANNEL)
    pieces = [model(ids[:, :4], attention_mask=mask[:, :4], past_key_values=cache).logits]
    for n in range(5, 9):
        pieces.append(model(ids[:, n - 1 : n], attention_mask=mask[:, :n], past_key_values=cache).logits)
    real = mask.bool()
    assert_close(torch.cat(pieces, dim=1)[real], expected[real], 1e-9)


# ---------------------------------------------------------------- decoding with rows of different depths

PRUNED = {"thoughts": 3, "threshold": 0.3}


def left_padded(lengths):
    ids = tokens(len(lengths), max(lengths))
    mask = torch.tensor([[0] * (max(lengths) - n) + [1] * n for n in lengths])
    return ids.masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize("options", [{"prefill": "sequential"}, {"sweeps": 40}], ids=str)
@torch.no_grad()
def test_mixed_batches_equal_the_rows_alone(options):
    model = make(**PRUNED, **options)
    ids, mask = left_padded((3, 8, 1, 5))
    padded = model(ids, attention_mask=mask).logits
    together = model.generate(ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    ran = set()
    for row, n in enumerate((3, 8, 1, 5)):
        alone = ids[row : row + 1, -n:]
        assert_close(padded[row, -n:], model(alone).logits[0], 1e-9)
        generated = model.generate(alone, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert together[row, 8:].tolist() == generated[0, n:].tolist()
        ran.update(slots_run(model, generated)[0])
    assert len(ran) > 2


@torch.no_grad()
def test_beams_and_several_sequences_on_the_cache():
    model = make(prefill="sequential", **PRUNED)
    ids, mask = left_padded((5, 3))
    options = {
        "num_beams": 3, "num_return_sequences": 2, "attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6,
        "do_sample": False,
    }  # fmt: skip
    assert model.generate(ids, **options).tolist() == model.generate(ids, use_cache=False, **options).tolist()


@pytest.mark.parametrize("options", [{"prefill": "sequential"}, {"sweeps": 40}], ids=str)
@torch.no_grad()
def test_assisted_decoding_and_crops_on_ragged_tokens(options):
    model, ids = make(**PRUNED, **options), tokens(1, 6)
    fixed = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **fixed).tolist()
    assert model.generate(ids, assistant_model=tiny_model(seed=7).double(), **fixed).tolist() == expected
    cache = DynamicCache()
    ids = tokens(2, 9)
    model(ids, past_key_values=cache)
    cache.crop(-4)
    assert cache.get_seq_length() == 5
    expected = model(torch.cat((ids[:, :5], ids[:, :3]), dim=1)).logits[:, -3:]
    assert_close(model(ids[:, :3], past_key_values=cache).logits, expected, 1e-9)


@pytest.mark.parametrize("prefill", ["jacobi", "sequential"])
@torch.no_grad()
def test_the_cache_holds_the_slots_that_ran_and_one_bias_each(prefill):
    model = make(prefill=prefill, sweeps=40, **PRUNED)
    for seed in range(4, 40):  # rows of which neither thinks the longer everywhere
        ids = tokens(2, 7, seed=seed)
        ran = slots_run(model, ids)
        held = [max(rows) for rows in zip(*ran)]
        if held not in ran and sum(held) < 4 * 7:
            break
    assert held not in ran and sum(held) < 4 * 7
    cache = DynamicCache()
    model(ids[:, :6], past_key_values=cache)
    model(ids[:, 6:], past_key_values=cache)
    assert {layer.keys.shape[-2] for layer in cache.layers} == {sum(held)}
    assert cache.get_seq_length() == 7
    assert cache.layers[0].steps.tolist() == [k for n in held for k in range(n)]
    bias = cache.layers[0].bias
    assert [layer.bias for layer in cache.layers[1:]] == [None]
    for row in range(2):
        shares = oracle_row(model, ids[row])[2]
        slot = 0
        for t, n in enumerate(held):
            for k in range(n):
                if k < ran[row][t]:
                    assert bias[row, slot].item() == pytest.approx(shares[t, k:].sum().log().item(), abs=1e-9)
                else:
                    assert bias[row, slot] == -4000
                slot += 1


@torch.no_grad()
def test_pruned_decoding_costs_by_the_measured_slots():
    """Linear maps and keys read are enumerated; K + 1 slots of every token is what nothing pruned costs."""
    model, ids = make(prefill="sequential", **PRUNED), tokens(1, 12)
    [slots] = slots_run(model, ids)
    ran = [sum(n > step for n in slots) / len(slots) for step in range(4)]
    total, vanilla = sum(slots), forward_flops_per_token(tiny_model().config, 12)
    terms = forward_flops_per_token(model.config, 12, ran=ran)
    assert total < 4 * 12 and terms.linear * 12 == pytest.approx(total * vanilla.linear)
    assert terms.attention / vanilla.attention == pytest.approx(total * (total + 1) / (12 * 13))
    assert forward_flops_per_token(model.config, 12, ran=(1, 1, 1, 1)) == forward_flops_per_token(model.config, 12)
    assert training_flops_per_token(model.config, 12, ran=ran) == training_flops_per_token(model.config, 12)
    cache = DynamicCache()
    model(ids, past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) + cache.layers[0].bias.nbytes
    assert held == pytest.approx(12 * kv_bytes_per_token(model.config, torch.float64, ran))


@torch.no_grad()
def test_jacobi_prefill_runs_its_last_pass_on_the_slots_that_are_left():
    model, ids = make(sweeps=5, **PRUNED), tokens(1, 8)
    calls = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: calls.append(args[0].shape[1]))
    cache = DynamicCache()
    model(ids, past_key_values=cache)
    assert calls[:-1] == [8, 16, 24] + [32] * 5
    assert calls[-1] == cache.layers[0].keys.shape[-2] < 32


@torch.no_grad()
def test_tolerance_stops_early_and_warns_where_it_is_not_met():
    ids = tokens(2, 12)
    expected = make(prefill="sequential")(ids).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(make(sweeps=33, tolerance=1e-6)(ids).logits, expected, 1e-3)
    with pytest.warns(
        UserWarning, match=r"ponderlm3: after sweeps=2 a thought still changes by .* above tolerance=1e-09"
    ):
        make(sweeps=2, tolerance=1e-9)(ids)


# ---------------------------------------------------------------- options and refusals


def test_random_sweeps_are_drawn_in_training_only(monkeypatch):
    monkeypatch.setattr(ponderlm2, "draw_for_all_ranks", lambda low, high, device: low)
    model, calls = make(thoughts=1, random_sweeps=True, sweeps=4), []
    model.model.layers[0].register_forward_hook(lambda module, args, output: calls.append(args[0].shape[1]))
    with torch.no_grad():
        model(tokens(1, 8))
        model.train()(tokens(1, 8))
    assert len(calls) == (1 + 4 + 1) + (1 + 2 + 1)


def test_the_router_starts_undecided():
    config = FathomConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, depth="ponderlm3")
    model = FathomForCausalLM(config).train()
    seen = []
    model.depth.register_forward_hook(lambda module, args, out: seen.append(out.trace["shares"]))
    ids = tokens(1, 5)
    model(ids, labels=ids).loss.backward()
    assert torch.equal(seen[0], torch.full((1, 5, 4), 0.25))
    assert model.depth.router.weight.grad.abs().max() > 0


@pytest.mark.parametrize("router", ["linear", "mlp"])
@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_the_router_scores_in_fp32_whatever_runs_around_it(router, autocast):
    """For bf16 states, scores are those of the same numbers in float64."""
    model = make(double=False, router=router)
    if not autocast:
        model.bfloat16()
    given = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    seen = []
    if router == "mlp":
        model.depth.router.hidden.register_forward_hook(lambda module, args, out: seen.append(F.gelu(out)))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores = model.depth.router(given)
    h = seen[0] if seen else given
    expected = h.double() @ model.depth.router.weight.double().T + model.depth.router.bias.double()
    assert scores.dtype == torch.float32 and h.dtype == torch.bfloat16
    assert_close(scores.double(), expected, 1e-6)


@pytest.mark.parametrize("options", [{"penalty": "target"}, {"penalty": "target", "target": 2.0}], ids=str)
def test_without_thoughts_a_target_is_no_matter(options):
    assert FathomConfig(depth={"name": "ponderlm3", "thoughts": 0, **options}).depth["thoughts"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thoughts": -1}, r"thoughts=-1: must be an integer of at least 0"),
        ({"sweeps": -1}, r"sweeps=-1"),
        ({"threshold": 1.5}, r"threshold=1.5: must be finite and at least 0 and at most 1"),
        ({"prior": [0.5, 0.5]}, r"prior=\[0.5, 0.5\]: must be 4 positive shares"),
        ({"prior": [0.5, 0.5, 0.5, 0.5]}, "with sum 1"),
        ({"penalty": "target", "target": 4.0}, r"target=4.0: must be .* at most 3"),
        ({"tolerance": 0.0}, r"tolerance=0.0: must be positive"),
        ({"tolerance": 0.1, "sweeps": 0}, r"tolerance=0.1: sweeps=0 measures none; allow more"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FathomConfig(depth={"name": "ponderlm3", **options})


@torch.no_grad()
def test_other_caches_are_refused():
    cache = make(thoughts=2)(tokens(1, 3), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"holds 3 slots a token.*'ponderlm3' keeps 2.*empty DynamicCache"):
        make(thoughts=1)(tokens(1, 1), past_key_values=cache)
    fixed = tiny_model(depth={"name": "ponderlm2", "thoughts": 2}).double()
    with pytest.raises(ValueError, match="holds 3 slots a token, but with another method's layout"):
        fixed(tokens(1, 1), past_key_values=cache)


def test_reentrant_checkpointing_is_refused():
    with pytest.raises(ValueError, match=r"use_reentrant=True loses gradients .* depth='ponderlm3'"):
        make().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})

"""Steps whose tokens of all rows are laid end to end, against the form by row and against each row alone, token by
token: both forms of `StepStack` under a dense mask in float64."""

from __future__ import annotations

import functools
import shutil
import weakref

import pytest
import torch
from transformers import DynamicCache

from fathom.models.registry import REGISTRIES
from fathom.models.steps import stack as steps
from fathom.models.steps.graphs import Foresight, StepGraphs
from fathom.models.steps.stack import LEAST, StepStack
from fathom.models.steps.tokens import Chosen, Flat, ahead, going_on
from fathom.ops.token_blocks import BLOCK, NOWHERE, places_seen
from fathom.train.trainer import compile_layers
from tiny import assert_close, tiny_model, tokens

COT = {"name": "adaptive_latent_cot", "steps": 3, "threshold": 0.25, "router_bias": 0.0, "penalty": 0.7}
ADA = {"name": "adaponderlm", "steps": 3, "threshold": 0.45}
LENGTH = 37

OPTIONS = (
    COT,
    {**COT, "correctness_from": "mixture", "router_per_step": True},
    {**COT, "penalty_on": "gate", "detach_between_steps": True, "detach_router": True},
    {**COT, "explore": 0.5, "threshold": 0.6},
    {**COT, "halting": "act", "router_bias": -0.7},
    {**COT, "halting": "exit_gate", "threshold": 0.5},
    {**COT, "halting": "fixed"},
    {**COT, "halting": "random", "mean_passes": 2.2},
    {**COT, "halting": "uniform", "mean_passes": 2.7},
    ADA,
    {**ADA, "accumulate": False, "premultiply_steps": True, "top_k": 5},
    {**ADA, "freeze_readout": False},
    {**ADA, "halting": "random", "mean_passes": 2.2},
)
options = pytest.mark.parametrize("depth", OPTIONS, ids=lambda depth: " ".join(map(str, depth.values())))
both = pytest.mark.parametrize("depth", [COT, ADA], ids=lambda depth: depth["name"])


def lay_flat(monkeypatch, wanted: bool, ranged: bool = False) -> None:
    monkeypatch.setattr(StepStack, "flat_pays", lambda stack: wanted)
    monkeypatch.setattr(StepStack, "ranges_served", lambda stack: ranged)


def make(depth, **fields):
    return tiny_model(depth=depth, max_position_embeddings=128, **fields).double()


def traced(model, *args, **kwargs):
    """The result, the passes and the stack."""
    found = []
    hook = model.depth.register_forward_hook(lambda module, given, out: found.append((out.trace["passes"], given[0])))
    result = model(*args, **kwargs)
    hook.remove()
    return result, *found[0]


def layouts() -> dict[str, dict[str, torch.Tensor]]:
    """Four rows: whole, padded on either side, and packed documents, some of a single token."""
    lengths, index = (LENGTH, 20, 1, 36), torch.arange(LENGTH)
    right = torch.stack([index < n for n in lengths]).long()
    documents = torch.stack([index % n for n in (LENGTH, 5, 1, 16)])
    return {
        "whole": {},
        "padded right": {"attention_mask": right},
        "padded left": {"attention_mask": right.flip(1)},
        "documents": {"position_ids": documents},
    }


def test_tokens_of_all_rows_are_taken_and_put_back_in_place():
    x, mask = torch.randn(3, 5, 4), torch.tensor([[0, 1, 0, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
    index = torch.tensor([1, 3, 4, 5, 14, 0, 2])
    flat = Flat(index, index, torch.arange(7) < 5, torch.tensor([3, 1, 1]))
    taken = flat.take(x)
    assert torch.equal(taken[0], x.view(15, 4)[index])
    new = torch.arange(28.0).view(1, 7, 4)
    put = flat.put(x, new)
    assert torch.equal(put[mask], new[0, :5]) and torch.equal(put[~mask], x[~mask])


@pytest.mark.parametrize(
    "compiled",
    [
        False,
        pytest.param(
            True, marks=[pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
        ),
    ],
)
def test_who_goes_on_and_where(compiled):
    """Against lists of Python, for numbers that differ from call to call: compiled, one graph each serves all."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    functions = [torch.compile(f, dynamic=True) if compiled else f for f in (going_on, ahead)]
    generator = torch.Generator().manual_seed(0)
    for rows, length, entries, size in ((3, 7, 11, 8), (2, 40, 60, 30), (5, 9, 45, 45), (4, 6, 12, 5)):
        index = torch.randperm(rows * length, generator=generator)[:entries]
        live, goes_on = torch.arange(entries) < entries - 2, torch.rand(1, entries, generator=generator) < 0.4
        on = [n for n in range(entries) if goes_on[0, n] and n < entries - 2]
        some, runs, by_row = functions[0](goes_on, index, live, rows, length)
        assert some.nonzero()[:, 0].tolist() == on
        assert sorted(runs.nonzero()[:, 0].tolist()) == sorted(index[on].tolist())
        assert by_row.tolist() == [sum(index[n] // length == row for n in on) for row in range(rows)]
        places = (on + [n for n in range(entries) if n not in on])[:size]
        taken, before, alive = functions[1](some, index, size)
        assert before.tolist() == places and torch.equal(taken, index[before])
        assert alive.tolist() == [n < len(on) for n in range(size)]
        first = torch.arange(rows * length) // length * length
        seen = places_seen(runs, first.int(), 100).tolist()
        begins = [100 + int(runs[:begin].sum()) for begin in first.tolist()]
        assert seen == [begins, [100 + int(runs[: n + 1].sum()) for n in range(rows * length)]]
    if compiled:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@both
@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_what_a_projection_gave_stays_as_it_was(depth, compiled, monkeypatch):
    """Later steps write where the first one's keys and values are, which a hook must not see."""
    model, given = make(depth, positions="learned"), []  # without rotations attention reads projections themselves
    for layer in model.model.layers:
        for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            part.register_forward_hook(lambda module, inputs, output: given.append((output, output.clone())))
    if compiled:
        compile_layers(model, "eager")
    lay_flat(monkeypatch, True)
    *_, stack = traced(model, tokens(4, LENGTH), use_cache=True)
    torch._dynamo.reset()
    assert any(isinstance(chosen, Flat) for chosen in stack.ran)
    assert len(given) == 2 * len(stack.ran) * len(model.model.layers)
    assert all(torch.equal(now, then) for now, then in given)


before_213 = pytest.mark.skipif(torch.__version__ < "2.13", reason="compiled layers lose what this test's hooks note")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=before_213)])
@torch.no_grad()
def test_layers_that_share_their_values_keep_their_own_slots(compiled, monkeypatch):
    """Every layer attends with the first one's values, as a mixer may have it: the cached slots are as row by row."""
    caches = []
    for flat in (False, True):
        model, first = make(ADA), []
        for number, layer in enumerate(model.model.layers):

            def share(module, inputs, output, number=number, first=first):
                if number == 0:
                    first[:] = [output]
                return first[0]

            layer.self_attn.v_proj.register_forward_hook(share)
        if compiled:
            torch._dynamo.reset()  # no guard sees hooks: graphs of other tests' layers would run without these
            compile_layers(model, "eager")
        lay_flat(monkeypatch, flat)
        result, _, stack = traced(model, tokens(4, LENGTH), use_cache=True)
        torch._dynamo.reset()
        assert any(isinstance(chosen, Flat) for chosen in stack.ran) == flat
        caches.append(result.past_key_values)
    for row_by_row, laid_flat in zip(*(cache.layers for cache in caches), strict=True):
        same_slots(row_by_row, laid_flat)


@both
@torch.no_grad()
def test_a_step_computes_what_its_tokens_cost(depth, monkeypatch):
    """Dead entries fill up the last block; in rows, each row is as long as the longest."""
    model, ids = make(depth), tokens(4, 100)
    lay_flat(monkeypatch, True)
    _, passes, stack = traced(model, ids, use_cache=False)
    for step, chosen in enumerate(stack.ran[1:], start=1):
        live = int((passes > step).sum())
        size = min(len(stack.ran[step - 1].index) if step > 1 else 400, max(LEAST, -(-live // BLOCK) * BLOCK))
        assert live > 0 and len(chosen.index) == size and len(chosen.index.unique()) == size
        assert torch.equal(chosen.index[:live], (passes > step).flatten().nonzero()[:, 0])
        assert chosen.live is None if live == size else torch.equal(chosen.live, torch.arange(size) < live)
    assert stack.computed == 400 + sum(len(chosen.index) for chosen in stack.ran[1:])


@pytest.mark.parametrize("layout", layouts())
@options
def test_losses_and_gradients_are_those_of_the_form_by_row(depth, layout, monkeypatch):
    """Evaluation, and a training step with all its gradients."""
    # which slots explore does not depend on how they are laid
    monkeypatch.setattr(torch, "rand_like", lambda x: (x.detach() * 1e6) % 1)
    ids, given, found = tokens(4, LENGTH), layouts()[layout], []
    real = given.get("attention_mask", torch.ones_like(ids)).bool()
    labels = ids.masked_fill(~real, -100)
    for flat, ranged in ((False, False), (True, False), (True, True)):
        lay_flat(monkeypatch, flat, ranged)
        model = make(depth)
        with torch.no_grad():
            result, passes, stack = traced(model, ids, use_cache=False, **given)
        assert any(isinstance(chosen, Flat) for chosen in stack.ran) == (flat and depth.get("freeze_readout", True))
        assert stack.ranged == (ranged and "attention_mask" not in given)
        model.train().depth.progress = 1.0
        loss = model(ids, labels=labels, use_cache=False, **given).loss
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((result.logits[real], passes[real], loss.detach(), gradients))
    logits, passes, loss, gradients = found[0]
    assert (depth.get("halting") == "fixed" or len(passes.unique()) > 1) and len(gradients) > 20
    for flat_logits, flat_passes, flat_loss, flat_gradients in found[1:]:
        assert torch.equal(flat_passes, passes)
        assert_close(flat_logits, logits, 1e-10)
        assert_close(flat_loss, loss, 1e-12)
        assert gradients.keys() == flat_gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(flat_gradients[name], gradient, rtol=1e-8, atol=1e-12, msg=name)


@pytest.mark.parametrize("side", ["padded right", "padded left"])
@both
@torch.no_grad()
def test_a_batch_is_its_rows_alone_token_by_token(depth, side, monkeypatch):
    """Logits of a prefill, and of tokens decoded after it, whose cache it has filled."""
    lay_flat(monkeypatch, True)
    model, ids, new = make(depth), tokens(4, LENGTH), tokens(4, 3, seed=5)
    mask = layouts()[side]["attention_mask"]
    prefill, passes, stack = traced(model, ids, attention_mask=mask, past_key_values=(cache := DynamicCache()))
    assert isinstance(stack.ran[1], Flat)
    after = []
    for t in range(3 if side == "padded left" else 0):
        longer = torch.cat((mask, torch.ones(4, t + 1).long()), dim=1)
        after.append(model(new[:, t : t + 1], attention_mask=longer, past_key_values=cache).logits)
    for row in range(4):
        real, alone, logits, ran = mask[row].bool(), DynamicCache(), [], []
        text = torch.cat((ids[row, real], new[row]))[None]
        for t in range(text.shape[1]):
            result, steps, _ = traced(model, text[:, t : t + 1], past_key_values=alone)
            logits.append(result.logits)
            ran.append(steps)
        expected, count = torch.cat(logits, dim=1)[0], int(real.sum())
        assert torch.equal(passes[row, real], torch.cat(ran, dim=1)[0, :count])
        assert_close(prefill.logits[row, real], expected[:count], 1e-9)
        if after:
            assert_close(torch.cat(after, dim=1)[row], expected[count:], 1e-9)


@both
@torch.no_grad()
def test_rows_that_stop_at_once_beside_rows_that_never_do(depth, monkeypatch):
    schedule = {**depth, "halting": "random", "mean_passes": 2.0}
    plan = torch.tensor([1, 4, 2, 1])[:, None].repeat(1, LENGTH)
    plan[2, ::3] = 4
    model, ids, found = make(schedule), tokens(4, LENGTH), []
    for rows in ([0, 1, 2, 3], [1, 0], [0, 3]):
        model.depth.planned = lambda stack, rows=rows: plan[rows]
        results = []
        for flat in (False, True):
            lay_flat(monkeypatch, flat)
            cache = DynamicCache()
            logits, passes, stack = traced(model, ids[rows], past_key_values=cache)
            assert torch.equal(passes, plan[rows]) and stack.flat == flat
            results.append((logits.logits, cache))
        (expected, by_row), (actual, laid) = results
        assert_close(actual, expected, 1e-10)
        for old, new in zip(by_row.layers, laid.layers):
            same_slots(old, new)
        found.append(expected)
    assert_close(found[1], found[0][[1, 0]], 1e-10)


@pytest.mark.parametrize("steps", [1, 3])
@torch.no_grad()
def test_while_all_tokens_replace_their_slots_the_plain_kernel_serves(steps, monkeypatch):
    """The first `steps` passes of all tokens, then some stop."""
    plan = torch.full((3, LENGTH), steps)
    plan[0, ::2] = 4
    model, ids, masks = make({**ADA, "halting": "random", "mean_passes": 2.0}), tokens(3, LENGTH), []
    model.depth.planned = lambda stack: plan
    model.model.layers[0].register_forward_pre_hook(
        lambda module, arguments, given: masks.append(given["attention_mask"] is None), with_kwargs=True
    )
    lay_flat(monkeypatch, False)
    expected = model(ids, past_key_values=(by_row := DynamicCache())).logits
    masks.clear()
    lay_flat(monkeypatch, True)
    result, passes, stack = traced(model, ids, past_key_values=(laid := DynamicCache()))
    assert torch.equal(passes, plan) and masks == [True] * steps + [False] * (4 - steps)
    assert [isinstance(chosen, Flat) for chosen in stack.ran] == [False] * steps + [True] * (4 - steps)
    assert_close(result.logits, expected, 1e-10)
    for old, new in zip(by_row.layers, laid.layers):
        same_slots(old, new)


def same_slots(expected, actual) -> None:
    """Both cache layers hold the same slots of every row and segment, in the same order, dead columns aside."""
    assert actual.get_seq_length() == expected.get_seq_length() and len(actual.sizes) == len(expected.sizes)
    assert actual.keys.shape[2] == actual.token.shape[1] == sum(actual.sizes)
    parts = [(layer.token.split(layer.sizes, 1), layer.keys.split(layer.sizes, 2), layer.values.split(layer.sizes, 2))
             for layer in (expected, actual)]  # fmt: skip
    for segment in range(len(actual.sizes)):
        for row in range(len(actual.token)):
            (numbers, keys, values), (other, other_keys, other_values) = (
                (token[segment][row], key[segment][row], value[segment][row]) for token, key, value in parts
            )
            live, other_live = numbers != NOWHERE, other != NOWHERE
            assert torch.equal(numbers[live], other[other_live])
            torch.testing.assert_close(other_keys[:, other_live], keys[:, live], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(other_values[:, other_live], values[:, live], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ranged", [pytest.param(False, marks=pytest.mark.slow), True], ids=["mask", "ranges"])
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["layers", "model"])
@both
@torch.no_grad()
def test_prefills_of_other_sizes_compile_nothing_new(depth, whole, ranged, monkeypatch):
    """The first two forwards make the graphs of one row and of many."""
    lay_flat(monkeypatch, True, ranged)
    torch._dynamo.reset()
    graphs, after, sizes = [], [], set()

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch._dynamo.config.patch(recompile_limit=64, allow_unspec_int_on_nn_module=True):
        model, plain = make(depth, num_hidden_layers=3), make(depth, num_hidden_layers=3)
        for part in [model] if whole else model.model.layers:
            part.compile(backend=count)
        for seed, length in enumerate((120, 121, 90, 70, 128)):
            ids = tokens(4, length, seed=seed)
            result, _, stack = traced(model, ids, use_cache=False)
            assert_close(result.logits, plain(ids, use_cache=False).logits, 1e-9)
            after.append(len(graphs))
            sizes.add(tuple(stack.sizes))
    assert len(sizes) == 5 and after[-1] == after[1] <= (40 if whole else 12), (after, sizes)


@pytest.mark.parametrize("form", ["by row", "flat", "ranged"])
@both
def test_gradients_reach_cached_slots(depth, form, monkeypatch):
    """For the tokens of a prompt and two more calls, with the cache tidied in between, they are those of one call."""
    lay_flat(monkeypatch, form != "by row", form == "ranged")
    monkeypatch.setattr(steps, "PACK_EVERY", 1)
    model, ids, weights = make(depth), tokens(3, 40, seed=3), []
    cache = DynamicCache()
    cached = [model(part, past_key_values=cache).logits for part in ids.split((30, 6, 4), dim=1)]
    for logits in (torch.cat(cached, dim=1), model(ids, use_cache=False).logits):
        loss = (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)).sum()
        weights.append(torch.autograd.grad(loss, [layer.self_attn.v_proj.weight for layer in model.model.layers]))
    for one, other in zip(*weights, strict=True):
        assert_close(one, other, 1e-9)


def test_penalised_gradients_equal_finite_differences(monkeypatch):
    """Without a correctness, which has no gradient."""
    lay_flat(monkeypatch, True)
    model, ids = make({**COT, "beta": 0.0}).train(), tokens(3, 9)
    model(ids, labels=ids).loss.backward()
    for name in ("depth.routers.0.weight", "model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight"):
        parameter = model.get_parameter(name)
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-6 * direction)
                values.append(model(ids, labels=ids).loss.item())
                parameter.sub_(sign * 1e-6 * direction)
        slope = (parameter.grad * direction).sum().item()
        assert slope == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6, abs=1e-9)


@both
@torch.no_grad()
def test_a_single_row_and_a_cached_past(depth, monkeypatch):
    """One row is laid out alike; after a cached past tokens are gathered by row."""
    lay_flat(monkeypatch, True)
    model, ids, cache = make(depth), tokens(2, LENGTH), DynamicCache()
    expected, _, stack = traced(model, ids, use_cache=False)
    assert isinstance(stack.ran[1], Flat)
    for row in range(2):
        assert_close(model(ids[row : row + 1]).logits[0], expected.logits[row], 1e-9)
    pieces = []
    for number, part in enumerate(ids.split((20, 16, 1), dim=1)):
        result, _, stack = traced(model, part, past_key_values=cache)
        assert all(isinstance(chosen, Chosen if number or not step else Flat) for step, chosen in enumerate(stack.ran))
        pieces.append(result.logits)
    assert_close(torch.cat(pieces, dim=1), expected.logits, 1e-9)


@both
@torch.no_grad()
def test_rows_of_a_single_token_do_not_see_each_other(depth, monkeypatch):
    lay_flat(monkeypatch, True)
    model, ids = make(depth), tokens(6, 1)
    result, passes, stack = traced(model, ids)
    assert isinstance(stack.ran[1], Flat) and passes.max() > 1
    for row in range(6):
        assert_close(result.logits[row], model(ids[row : row + 1]).logits[0], 1e-9)


@both
@torch.no_grad()
def test_steps_that_are_foreseen_do_not_wait(depth, monkeypatch):
    """Numbers known from earlier calls; then a call in which more go on than ever before, which is made again."""
    lay_flat(monkeypatch, True, True)
    model, plain = make(depth), make(depth)
    model.foresight = Foresight(least=2)
    threshold = depth["threshold"]
    waited = []
    for seed, more in enumerate((False, False, False, False, True, False)):
        for one in (model, plain):
            object.__setattr__(one.depth.options, "threshold", 0.3 * threshold if more else threshold)
        ids, caches = tokens(4, 128, seed=seed % 2), [DynamicCache(), DynamicCache()]
        found, passes, stack = traced(model, ids, past_key_values=caches[0])
        wanted, expected, _ = traced(plain, ids, past_key_values=caches[1])
        assert torch.equal(passes, expected)
        assert_close(found.logits, wanted.logits, 1e-10)
        for one, other in zip(*(cache.layers for cache in caches), strict=True):
            same_slots(other, one)
        new = tokens(4, 2, seed=9)
        after = [one(new, past_key_values=cache).logits for one, cache in zip((model, plain), caches, strict=True)]
        assert_close(after[0], after[1], 1e-10)
        assert stack.went_on == [(passes > step).sum(1).tolist() for step in range(1, len(stack.went_on) + 1)]
        waited.append(stack.occasion in model.foresight.counts and len(model.foresight.counts[stack.occasion]))
    assert waited == [1, 2, 3, 4, 1, 2] and model.foresight.repeated == 1  # far more: observed anew


def test_training_with_foreseen_steps_is_the_same(monkeypatch):
    """Every second call has more tokens than foreseen; dropout and explored slots are drawn alike in its repetition."""
    lay_flat(monkeypatch, True, True)
    depth = {**COT, "explore": 0.3, "correctness_from": "mixture"}
    models = [make(depth, embedding_dropout=0.1).train() for _ in range(2)]
    ids = tokens(4, 128)
    for call in range(4):
        losses = []
        for model in models:
            torch.manual_seed(call)
            model.foresight = None  # foreseen steps have room to spare, for which numbers are drawn, too
            if model is models[0] and call % 2:
                model.foresight = foresight = Foresight(least=2)
                foresight.note((True, 4, 128), [200, 1, 1]), foresight.note((True, 4, 128), [200, 1, 1])
            losses.append(model(ids, labels=ids, use_cache=False).loss)
            losses[-1].backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
        if call % 2:
            assert foresight.repeated == 1 and len(foresight.counts[True, 4, 128]) == 1
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_a_forecast_is_above_what_was_seen():
    foresight = Foresight(least=3, remembered=4, occasions=2)
    for counts in ([10, 4], [12], [11, 5]):
        assert foresight.most("a", 0) is None
        foresight.note("a", counts)
    assert foresight.most("a", 0) == 14 and foresight.most("a", 1) == 11 and foresight.most("b", 0) is None
    foresight.note("a", [17, 0])  # more than foreseen, but not by six times √11
    assert len(foresight.counts["a"]) == 4 and foresight.most("a", 0) == 22
    for _ in range(4):
        foresight.note("a", [7, 0])
    assert foresight.most("a", 0) == 7 and foresight.most("a", 1) == 0
    foresight.note("a", [24, 0])
    assert list(foresight.counts["a"]) == [[24, 0]] and foresight.most("a", 0) is None
    assert [foresight.size("a", 1, *window) for window in ((64, 128), (128, 192), (64, 128), (32, 48), (0, 256))] == [
        64, 128, 64, 32, 32,
    ]  # fmt: skip
    foresight.note("b", [1]), foresight.note("c", [1])
    assert set(foresight.counts) == {"b", "c"} and not foresight.sizes


@pytest.mark.parametrize("layers, together", [(4, 4), (6, 3), (5, 1)])
@both
def test_groups_of_layers_are_the_layers(depth, layers, together, monkeypatch):
    """What `StepGraphs` compiles, not compiled."""
    lay_flat(monkeypatch, True, True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    ids = tokens(4, 64)
    found, calls = [], []
    for grouped in (False, True):
        model = make(depth, num_hidden_layers=layers)
        if grouped:
            model.step_graphs = StepGraphs(model.model)
            assert len(model.step_graphs.groups) == layers // together
            for group in model.step_graphs.groups:
                group.register_forward_hook(lambda *call: calls.append(call[0]))
        with torch.no_grad():
            logits = model(ids, past_key_values=(cache := DynamicCache())).logits
        model.train().depth.progress = 1.0
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append((logits, cache, loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert len(calls) >= 2 * layers // together
    (logits, cache, loss, gradients), (other, other_cache, other_loss, other_gradients) = found
    assert_close(other, logits, 1e-12)
    assert_close(other_loss, loss, 1e-12)
    for one, two in zip(cache.layers, other_cache.layers, strict=True):
        same_slots(one, two)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-10, atol=1e-14, msg=name)


STEPWISE = [
    pytest.param({"name": name, **options}, id=" ".join(map(str, (name, *options.values()))))
    for name, method in REGISTRIES["depth"].items()
    for options in method.variants
    if tiny_model(depth={"name": name, **options}).depth.segments
]


@pytest.mark.parametrize(
    "depth",  # in CI the first variant of every method
    [
        pytest.param(
            *case.values, id=case.id, marks=[] if n == names.index(case.values[0]["name"]) else pytest.mark.slow
        )
        for names in [[case.values[0]["name"] for case in STEPWISE]]
        for n, case in enumerate(STEPWISE)
    ],
)
def test_a_traced_training_step_of_every_variant_with_graphs(depth, monkeypatch):
    """As `training.compile: graphs` does it on a GPU, but for the graphs' code."""
    lay_flat(monkeypatch, True, True)
    traced_only = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda function, **_: traced_only(function))
    ids, found = tokens(4, 64), []
    for graphs in (False, True):
        model = make(depth, num_hidden_layers=1).train()
        model.depth.progress = 1.0
        torch._dynamo.reset()
        if graphs:
            compile_layers(model, "eager", graphs=True)
            assert model.step_graphs is not None
        torch.manual_seed(0)
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch._dynamo.reset()
    (loss, gradients), (other_loss, other_gradients) = found
    assert_close(other_loss, loss, 1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.parametrize("name", [name for name in REGISTRIES["depth"] if name != "vanilla"])
def test_graphs_are_for_what_runs_step_by_step(name):
    """Others, and those that a mixer connects, have their layers compiled one by one."""
    for mixer in ("none", "resformer"):
        model = tiny_model(depth=name, mixer=mixer)
        compile_layers(model, "eager", graphs=True)
        stepwise = bool(model.depth.segments) and mixer == "none"
        assert (model.step_graphs is not None) == stepwise
        assert all((layer._compiled_call_impl is None) == stepwise for layer in model.model.layers)


@pytest.mark.parametrize(
    "traced, frozen",
    [(False, ()), (False, ("q_proj",)), pytest.param(True, (), marks=pytest.mark.slow)],
    ids=["plain", "frozen", "traced"],
)
def test_under_autocast_all_steps_share_one_cast_of_the_weights(traced, frozen, monkeypatch):
    """And the gradients of all are summed in fp32: as without a cache of casts, and as in no step's own dtype."""
    lay_flat(monkeypatch, True, True)
    compiled = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled(function) if traced else function)
    torch._dynamo.reset()
    ids, found = tokens(4, 64), []
    for grouped in (False, True):
        model = make(COT, num_hidden_layers=4).float().train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        for layer in model.model.layers[:2]:
            layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight  # two names, one tensor
        graphs = model.step_graphs = StepGraphs(model.model, together=2) if grouped else None
        model.depth.progress = 1.0
        for _ in range(2):  # the second at the places of the first
            model.zero_grad()
            autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
            with autocast, torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
                loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
        found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    places = [place for name, place in graphs.places.items() if name[0] == "weight"]
    linear = [part for part in model.model.layers.modules() if isinstance(part, torch.nn.Linear)]
    assert len(places) == len(linear) - 2 and all(place.dtype == torch.bfloat16 for place in places)
    (loss, gradients), (other_loss, other_gradients) = found
    assert_close(other_loss, loss, 1e-6)
    for name, gradient in gradients.items():
        assert (gradient is None) == (other_gradients[name] is None) == any(part in name for part in frozen)
        if gradient is not None:
            tied = ".0.mlp.gate" in name or ".1.mlp.gate" in name  # used twice in a step: that sum is bf16's
            bound = 1e-2 if tied else 1e-5
            assert (other_gradients[name] - gradient).norm() <= bound * gradient.norm(), name


def test_what_is_cast_and_what_needs_a_gradient(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model = make(COT, num_hidden_layers=2)
    graphs = StepGraphs(model.model, together=1)
    assert graphs.weights(0, 2) == [[{}], [{}]]  # no autocast
    with torch.autocast("cpu", torch.bfloat16):
        assert graphs.weights(0, 2) == [[{}], [{}]]  # which leaves fp64 alone
        first, second = model.model.layers
        first.bfloat16(), second.float()
        second.mlp.requires_grad_(False)
        assert graphs.weights(0, 2) == [[{}], [{}]]
        cast = graphs.weights(1, 2)
    assert len(cast) == 2
    for [weights] in cast:
        assert {name: copy.requires_grad for name, copy in weights.items()} == {
            f"{name}.weight": "mlp" not in name
            for name, module in second.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        assert all(torch.equal(copy, second.get_parameter(name).bfloat16()) for name, copy in weights.items())


@both
@torch.no_grad()
def test_hidden_states_are_those_of_the_layers(depth, monkeypatch):
    """Asked for, layers run one by one and steps wait: no group hides them, no repeated loop adds its own."""
    lay_flat(monkeypatch, True, True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    ids, model = tokens(4, 128), make(depth)
    wanted = model(ids, output_hidden_states=True).hidden_states
    model.step_graphs, model.foresight = StepGraphs(model.model), Foresight(least=2)
    for _ in range(2):
        model.foresight.note((False, 4, 128), [1, 1, 1])
    found = model(ids, output_hidden_states=True).hidden_states
    assert len(found) == len(wanted) > 3 and model.foresight.repeated == 0
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 1e-12)


def test_a_repeated_loop_does_not_hold_what_the_first_computed(monkeypatch):
    lay_flat(monkeypatch, True, True)
    model, ids, outputs, alive = make(COT).train(), tokens(4, 128), [], []
    model.foresight = Foresight(least=2)
    for _ in range(2):
        model.foresight.note((True, 4, 128), [1, 1, 1])

    def look(layer, given, output):
        if len(given[0]) == 4:  # the first step of either run
            alive.append(sum(reference() is not None for reference in outputs))
        outputs.append(weakref.ref(output[0]))

    model.model.layers[1].register_forward_hook(look)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert model.foresight.repeated == 1 and alive == [0, 0] and len(outputs) > 5


@torch.no_grad()
def test_steps_that_nobody_ran_leave_no_trace(monkeypatch):
    lay_flat(monkeypatch, True, True)
    model, ids = make({**COT, "threshold": 0.97}), tokens(4, 128)
    model.foresight, exits = Foresight(least=2), []
    for _ in range(2):
        model.foresight.note((False, 4, 128), [300, 200, 100])
    model.depth.register_forward_hook(lambda module, given, out: exits.append((out.trace["exit"], given[0])))
    model(ids, use_cache=False)
    [(exit_mass, stack)] = exits
    assert len(stack.ran) == 4 and stack.reached == 1 and exit_mass.shape == (4, 128, 1) and (exit_mass == 1).all()

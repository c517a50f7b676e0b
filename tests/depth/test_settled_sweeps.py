"""Outside training, the Jacobi sweeps of PonderLM-2 and PonderLM-3 run until thoughts have settled: scoring and prefill
are then what decoding on a cache computes, token by token and without sweeps."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import DynamicCache

from fathom import FathomConfig
from fathom.cost import forward_flops_per_token
from fathom.depth.ponderlm2 import SETTLED
from fathom.ops.autocast import product_spacing
from tiny import assert_close, tiny_model, tokens

both = pytest.mark.parametrize("name", ["ponderlm2", "ponderlm3"])


def make(name, thoughts=1, family="llama", num_hidden_layers=2, **options):
    depth = {"name": name, "thoughts": thoughts, **options}
    model = tiny_model(family, depth=depth, num_hidden_layers=num_hidden_layers)
    if name == "ponderlm3":
        with torch.no_grad():
            model.depth.router.weight.mul_(6)  # tokens differ in how far they think
    return model.double()


def swept(model, ids, **given):
    """The output, how many sweeps the trace says, and how many forwards of the stack ran."""
    traces, calls = [], []
    hooks = [
        model.depth.register_forward_hook(lambda module, args, out: traces.append(out.trace["sweeps"])),
        model.model.layers[0].register_forward_hook(lambda *_: calls.append(1)),
    ]
    with torch.no_grad():
        out = model(ids, **given)
    for hook in hooks:
        hook.remove()
    assert traces[0].shape == ids.shape
    [sweeps] = traces[0].unique().tolist()
    return out, sweeps, len(calls)


@torch.no_grad()
def decoded(model, ids):
    cache = DynamicCache()
    return torch.cat([model(token, past_key_values=cache).logits for token in ids.split(1, dim=1)], dim=1)


def check(model, ids):
    thoughts, bound = model.depth.options.thoughts, model.depth.options.thoughts * (ids.shape[1] - 1)
    expected = decoded(model, ids)
    for use_cache in (False, True):
        out, sweeps, calls = swept(model, ids, use_cache=use_cache)
        assert 2 < sweeps < bound and calls == thoughts + sweeps + 1
        assert_close(out.logits, expected, SETTLED)
    model.depth.options = type(model.depth.options)(**{**vars(model.depth.options), "sweeps": 3})
    papers, sweeps, calls = swept(model, ids, use_cache=False)
    assert sweeps == 3 and calls == thoughts + 4
    return ((papers.logits - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("thoughts", [1, 3])
@both
def test_scoring_equals_decoding_on_random_models(name, thoughts, family):
    assert check(make(name, thoughts, family), tokens(2, 24)) > 5 * SETTLED  # what the papers' three sweeps leave


@both
def test_scoring_equals_decoding_on_a_briefly_trained_model(name):
    """Text in which every token follows from the two before, so that there is something to think about."""
    model = make(name, penalty_weight=0.0) if name == "ponderlm3" else make(name)
    ids = tokens(8, 16)
    for t in range(2, 16):
        ids[:, t] = 3 + (2 * ids[:, t - 1] + ids[:, t - 2]) % 11
    optimizer, losses = torch.optim.Adam(model.train().parameters(), lr=5e-3), []
    for _ in range(15):
        optimizer.zero_grad()
        losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    assert check(model.eval(), ids[:4]) > 1e-4


@both
@torch.no_grad()
def test_sweeps_end_where_they_are_exact(name):
    ids = tokens(2, 9)
    model = make(name, 2, tolerance=1e-300)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.float()
        out, sweeps, _ = swept(model, ids)
        assert sweeps <= 16  # fp32 resolves no more than 4.8e-7
        model.double()
        model.depth.options = type(model.depth.options)(
            **{**vars(model.depth.options), "tolerance": None, "sweeps": 16}
        )
        exact, sweeps, _ = swept(model, ids)
        assert sweeps == 16
    assert_close(exact.logits, decoded(model, ids), 1e-9)
    assert_close(out.logits.double(), exact.logits, 1e-4)
    assert swept(make(name, 2).train(), tokens(2, 1))[1] == 0


@both
@torch.no_grad()
def test_a_row_beside_padding_and_a_cached_prompt_settle_too(name):
    model, ids = make(name, 2), tokens(2, 16)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    padded, _, _ = swept(model, ids.masked_fill(mask == 0, 0), attention_mask=mask)
    assert_close(padded.logits[1:, 6:], decoded(model, ids[1:, 6:]), SETTLED)
    cache = DynamicCache()
    pieces = [swept(model, part, past_key_values=cache)[0].logits for part in ids.split((7, 9), dim=1)]
    assert_close(torch.cat(pieces, dim=1), decoded(model, ids), SETTLED)


@pytest.mark.parametrize("autocast", [False, True])
@both
@torch.no_grad()
def test_rounding_is_not_waited_for(name, autocast):
    """In bf16 thoughts go on changing by its spacing; sweeps would not end before they are exact."""
    model, ids = make(name), tokens(2, 48)
    exact = decoded(model, ids)
    model.float() if autocast else model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, sweeps, _ = swept(model, ids, use_cache=False)
    assert 1 < sweeps < 8
    assert_close(out.logits.double(), exact, 0.1)


def test_what_products_resolve():
    x = torch.zeros(2)
    spacings = [product_spacing(x.to(dtype)) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    assert spacings == [2**-52, 2**-23, 2**-7]
    with torch.autocast("cpu", torch.bfloat16):
        assert [product_spacing(x), product_spacing(x.double())] == [2**-7, 2**-52]
    try:
        for precision, spacing in (("high", 2**-10), ("medium", 2**-7)):
            torch.set_float32_matmul_precision(precision)
            assert [product_spacing(x), product_spacing(x.double())] == [spacing, 2**-52]
    finally:
        torch.set_float32_matmul_precision("highest")


@both
@torch.no_grad()
def test_a_broken_model_is_not_swept_to_the_end(name):
    model = make(name)
    model.model.norm.weight.fill_(torch.nan)
    assert swept(model, tokens(1, 40))[1] == 1


@both
def test_training_draws_two_or_three(name):
    model = make(name).train()
    assert {swept(model, tokens(1, 9), labels=tokens(1, 9))[1] for _ in range(12)} == {2, 3}
    assert FathomConfig(depth=name).depth["sweeps"] is None


@pytest.mark.slow  # half a minute in the compiler
def test_compiled_scoring_settles_as_eager():
    model, ids = make("ponderlm2", num_hidden_layers=1), tokens(2, 8)
    expected, sweeps, _ = swept(model, ids, use_cache=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    traces = []
    model.depth.register_forward_hook(lambda module, args, out: traces.append(out.trace["sweeps"].max().item()))
    with torch.no_grad():
        assert_close(compiled(ids, use_cache=False).logits, expected.logits, 1e-9)
    assert traces == [sweeps]
    model.train()
    losses = []
    for run in (model, compiled):  # training is traced as if nothing had been scored before
        torch.manual_seed(0)
        losses.append(run(ids, labels=ids).loss.item())
    torch._dynamo.reset()
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@both
@torch.no_grad()
def test_a_settled_prefill_costs_what_as_many_sweeps_do(name):
    """`fathom.cost` cannot know how many a text takes; of the number in the trace it gives the FLOPs."""
    options = {"threshold": 0.0} if name == "ponderlm3" else {}
    model, ids = make(name, 2, **options), tokens(2, 16)
    model.set_attn_implementation("eager")
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        _, sweeps, _ = swept(model, ids, use_cache=False)
    depth = {**model.config.depth, "sweeps": sweeps, "random_sweeps": False}
    config = FathomConfig(**{**model.config.to_dict(), "depth": depth})
    terms = forward_flops_per_token(config, 16, causal=False, parallel=True)
    assert sweeps > 3 and counter.get_total_flops() == ids.numel() * terms.matmul

"""PonderLM-2 against a token-by-token oracle written from the definition, which shares nothing with slots or caches."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import DynamicCache

from fathom import FathomConfig, FathomForCausalLM
from fathom.depth import ponderlm2
from tiny import assert_close, tiny_model, tokens

FAMILIES = ("llama", "qwen3", "gpt_neox", "gpt2")


def make(family="llama", double=True, fields=None, **options):
    depth = {"name": "ponderlm2", "random_sweeps": False, **options}
    model = tiny_model(family, depth=depth, **(fields or {}))
    return model.double() if double else model


def oracle(model, ids, shift=0):
    """z = F(everything so far)[last slot], K times a token: the whole prefix runs again for every slot."""
    decoder, options = model.model, model.depth.options
    table = model.config.embed_scale * decoder.embed_tokens.weight

    def last_state(slots, positions):
        x, positions = torch.stack(slots, dim=1), torch.tensor([positions]) + shift
        rotary = decoder.rotary_emb(x, positions) if decoder.rotary_emb else None
        if rotary is None:
            x = x + decoder.embed_positions(positions)
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        for layer in decoder.layers:
            x = layer(x, decoder.residual, position_embeddings=rotary, attention_mask=mask)[0]
        return decoder.norm(x)[:, -1]

    slots, positions, logits = [], [], []
    for t in range(ids.shape[1]):
        slots.append(table[ids[:, t]])
        positions.append(t)
        h = last_state(slots, positions)
        for _ in range(options.thoughts):
            thought = (h @ model.lm_head.weight.T).softmax(-1) @ table if options.interpolation else h
            slots.append(model.depth.scale * thought if options.learned_scale else thought)
            positions.append(t)
            h = last_state(slots, positions)
        logits.append(model.lm_head(h))
    return torch.stack(logits, dim=1)


@pytest.mark.parametrize(
    "options",
    [{"thoughts": 1}, {"thoughts": 3}, {"thoughts": 2, "interpolation": True}, {"thoughts": 2, "learned_scale": True}],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_both_modes_equal_the_definition(family, options):
    ids = tokens(2, 6)
    model = make(family, sweeps=5 * options["thoughts"], **options)
    expected = oracle(model, ids)
    assert_close(model(ids).logits, expected, 1e-9)
    exact = make(family, prefill="sequential", **options)
    assert_close(exact(ids).logits, expected, 1e-9)
    assert_close(exact(ids, use_cache=False).logits, expected, 1e-9)


@torch.no_grad()
def test_sweeps_shrink_the_error_and_the_bound_is_tight():
    ids, errors = tokens(2, 6), []
    expected = oracle(make(), ids)
    for sweeps in range(6):
        errors.append((make(sweeps=sweeps)(ids).logits - expected).abs().max().item())
    assert errors[5] < 1e-12 < 1e-9 < errors[4]
    assert errors[4] < errors[0]


@pytest.mark.parametrize("thoughts", [1, 2])
@torch.no_grad()
def test_the_first_unknowns_are_exact_after_as_many_sweeps(thoughts):
    """After n sweeps n + K unknown thoughts are; a token's logits read its own and all earlier ones."""
    ids = tokens(1, 6)
    expected = oracle(make(thoughts=thoughts), ids)
    for sweeps in range(4):
        exact = 1 + sweeps // thoughts
        assert_close(make(thoughts=thoughts, sweeps=sweeps)(ids).logits[:, :exact], expected[:, :exact], 1e-9)


@torch.no_grad()
def test_one_token_needs_no_sweep():
    for thoughts in (1, 3):
        model = make(thoughts=thoughts, sweeps=0)
        expected = oracle(model, tokens(2, 1))
        assert_close(model(tokens(2, 1)).logits, expected, 1e-9)
        assert_close(model.train()(tokens(2, 1)).logits, expected, 1e-9)


@torch.no_grad()
def test_shifting_all_positions_changes_nothing():
    model, ids = make(thoughts=2), tokens(1, 5)
    moved = model(ids, position_ids=torch.arange(7, 12)[None], attention_mask=torch.ones_like(ids)).logits
    assert_close(moved, model(ids).logits, 1e-9)


@torch.no_grad()
def test_jacobi_prefill_then_exact_decoding():
    """The prompt's thoughts are the parallel forward's; later tokens are exact given these."""
    model, ids = make(thoughts=2, sweeps=1), tokens(2, 9)
    cache = DynamicCache()
    prompt = model(ids[:, :6], past_key_values=cache).logits
    assert_close(prompt, model(ids[:, :6], use_cache=False).logits, 1e-9)
    copy = DynamicCache()
    model(ids[:, :6], past_key_values=copy)
    step_by_step = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(6, 9)]
    enough = make(thoughts=2, sweeps=4)  # 2·(3 − 1): exact on three tokens
    assert_close(enough(ids[:, 6:], past_key_values=copy).logits, torch.cat(step_by_step, dim=1), 1e-9)


def count_calls(model):
    calls = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: calls.append(args[0].shape[1]))
    return calls


@pytest.mark.parametrize("thoughts", [1, 2, 3])
@torch.no_grad()
def test_forwards_and_slots(thoughts):
    sweeps, length, n = 2, 5, thoughts + 1
    model = make(thoughts=thoughts, sweeps=sweeps)
    calls = count_calls(model)
    cache = DynamicCache()
    model(tokens(1, length), past_key_values=cache)
    assert calls == [length * m for m in range(1, n)] + [length * n] * (sweeps + 1)
    assert {layer.keys.shape[-2] for layer in cache.layers} == {n * length}
    calls.clear()
    model(tokens(1, 1), past_key_values=cache)
    assert calls == [1] * n
    assert {layer.keys.shape[-2] for layer in cache.layers} == {n * (length + 1)}


@torch.no_grad()
def test_tolerance_stops_early_and_warns_where_it_is_not_met():
    ids = tokens(2, 12)
    expected = make(prefill="sequential")(ids).logits
    model = make(sweeps=11, tolerance=1e-2)
    calls = count_calls(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = model(ids).logits
    assert 3 < len(calls) < 13
    assert_close(actual, expected, 0.1)
    with pytest.warns(UserWarning, match=r"sweeps=2 a thought still changes by .* above tolerance=1e-09"):
        make(sweeps=2, tolerance=1e-9)(ids)
    with warnings.catch_warnings():  # exact, whatever the last change was
        warnings.simplefilter("error")
        make(sweeps=11, tolerance=1e-300)(ids)


@torch.no_grad()
def test_thoughts_of_zero_have_converged_and_nan_has_not():
    """0/0 once made the change NaN, which no comparison stops or warns of."""
    ids = tokens(2, 12)
    model = make(sweeps=6, tolerance=1e-3, learned_scale=True)
    calls = count_calls(model)
    model.depth.scale.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids)
    assert len(calls) == 1 + 1 + 1  # one sweep, of zeros again
    model.depth.scale.fill_(torch.nan)
    calls.clear()
    with pytest.warns(UserWarning, match="sweeps=1 a thought still changes by nan"):
        model(ids)
    assert len(calls) == 1 + 1 + 1  # more sweeps would not help


@torch.no_grad()
def test_padding_does_not_count_in_the_tolerance():
    model = make(sweeps=11, tolerance=1e-3)
    ids, mask = tokens(1, 8), torch.tensor([[0] * 4 + [1] * 4])
    calls = count_calls(model)
    padded = model(ids, attention_mask=mask).logits[:, 4:]
    together = len(calls)
    calls.clear()
    assert_close(padded, model(ids[:, 4:]).logits, 1e-2)
    assert together >= len(calls) > 3


def test_gradients_reach_the_inputs_through_every_sweep():
    ids = tokens(2, 6)
    model = make(sweeps=2).train()
    model(ids, labels=ids).loss.backward()
    through = model.model.embed_tokens.weight.grad.clone()
    for cut in range(4):  # growing pass, two sweeps; after the last, only the head is left
        model.zero_grad()
        seen = []

        def detach(module, args, output, cut=cut, seen=seen):
            seen.append(1)
            return output.detach() if len(seen) == cut + 1 else None

        hook = model.model.norm.register_forward_hook(detach)
        model(ids, labels=ids).loss.backward()
        hook.remove()
        assert len(seen) == 4
        grad = model.model.embed_tokens.weight.grad
        assert grad is None or (grad - through).abs().max() > 1e-8


@pytest.mark.parametrize("passes", [1, 2, 3, 4, 9])
def test_only_the_last_passes_have_a_backward(passes):
    """As if the states that the others leave were cut off by hand; the loss is the same."""
    ids, gradients = tokens(2, 6), []
    for wanted in (passes, None):
        model = make(sweeps=2, gradient_passes=wanted).train()
        seen = []

        def cut(module, args, output, wanted=wanted, seen=seen):
            seen.append(1)
            return output.detach() if wanted is None and len(seen) <= 4 - passes else None

        model.model.norm.register_forward_hook(cut)
        loss = model(ids, labels=ids).loss
        loss.backward()
        gradients.append([loss, *(p.grad for p in model.parameters())])
    for actual, expected in zip(*gradients):
        assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize("name", ["ponderlm2", "ponderlm3"])
def test_checkpointed_passes_change_nothing_and_run_twice(name):
    ids, gradients, forwards = tokens(2, 6), [], []
    for checkpointed in (False, True):
        depth = {"name": name, "thoughts": 2, "sweeps": 2, "random_sweeps": False, "checkpoint_passes": checkpointed}
        model = tiny_model(depth=depth).double().train()
        calls = count_calls(model)
        loss = model(ids, labels=ids).loss
        loss.backward()
        gradients.append([loss, *(p.grad for p in model.parameters())])
        forwards.append(len(calls))
    assert forwards == [5, 10]
    for actual, expected in zip(*gradients):
        assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("name", ["ponderlm2", "ponderlm3"])
def test_checkpointed_passes_may_write_a_cache(name, past):
    """The pass that writes it runs once; those before it read the past alone when they run again."""
    ids, results = tokens(2, 9), []
    for checkpointed in (False, True):
        depth = {"name": name, "thoughts": 2, "sweeps": 2, "random_sweeps": False, "checkpoint_passes": checkpointed}
        model, cache = tiny_model(depth=depth).double().train(), DynamicCache()
        if past:
            with torch.no_grad():
                model(ids[:, :past], past_key_values=cache, use_cache=True)
        calls = count_calls(model)
        loss = model(ids[:, past:], labels=ids[:, past:], past_key_values=cache, use_cache=True).loss
        loss.backward()
        assert len(calls) == (9 if checkpointed else 5)
        held = [part for layer in cache.layers for part in (layer.keys, layer.values)]
        assert cache.get_seq_length() == 9 and {part.shape[-2] for part in held} == {27}
        results.append([loss, *held, *(p.grad for p in model.parameters())])
    for actual, expected in zip(*results):
        assert_close(actual, expected, 1e-12)


def test_the_loss_has_one_target_fewer_than_tokens_and_reads_the_last_thought():
    ids = tokens(2, 6)
    model = make(sweeps=5).train()
    logits = oracle(model, ids)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert_close(model(ids, labels=ids).loss, expected, 1e-9)


def test_random_sweeps_are_drawn_in_training_only(monkeypatch):
    model = make(sweeps=4, random_sweeps=True).train()
    cpu = torch.device("cpu")
    assert {ponderlm2.draw_sweeps(model.depth, cpu) for _ in range(60)} == {2, 3, 4}
    assert ponderlm2.draw_sweeps(make(sweeps=1, random_sweeps=True).train().depth, cpu) == 1
    assert FathomConfig(depth="ponderlm2").depth["random_sweeps"] is True
    monkeypatch.setattr(ponderlm2, "draw_for_all_ranks", lambda low, high, device: low)
    model.eval()
    calls, ids = count_calls(model), tokens(1, 8)
    with torch.no_grad():
        model(ids)
        assert len(calls) == 1 + 4 + 1
        model.train()(ids)
    assert len(calls) == 6 + 1 + 2 + 1


@pytest.mark.parametrize(("options", "scale"), [({}, 80**0.5), ({"interpolation": True}, 32**0.5)], ids=str)
def test_embedding_scale_rules(options, scale):
    fields = {"hidden_size": 32, "num_attention_heads": 4}
    wanted = FathomConfig(**fields, depth={"name": "ponderlm2", "scale_embeds": True, **options})
    assert wanted.embed_scale == pytest.approx(scale)
    assert FathomConfig(**fields, depth={"name": "ponderlm2", "scale_embeds": False, **options}).embed_scale == 1.0
    with pytest.raises(ValueError, match=r"scale_embeds=True means embed_scale=.*but embed_scale=3"):
        FathomConfig(**fields, embed_scale=3.0, depth={"name": "ponderlm2", "scale_embeds": True, **options})


def reopened(path, depth, stock=False):
    """With another depth section."""
    if stock:
        return FathomForCausalLM.from_pretrained(path, depth=depth).eval()
    config = FathomConfig(**{**FathomConfig.get_config_dict(path)[0], "depth": depth})
    return FathomForCausalLM.from_pretrained(path, config=config).eval()


def test_a_stock_checkpoint_takes_thoughts(tmp_path):
    tiny_model(embed_scale=1.0).save_stock_pretrained(tmp_path)
    model = FathomForCausalLM.from_pretrained(tmp_path, depth={"name": "ponderlm2", "sweeps": 5}).eval().double()
    assert model.config.embed_scale == 1.0
    ids = tokens(2, 6)
    with torch.no_grad():
        assert_close(model(ids).logits, oracle(model, ids), 1e-9)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stock", [True, False])
def test_thoughts_of_a_checkpoint_start_as_large_as_its_embeddings(family, stock, tmp_path):
    depth = {"name": "ponderlm2", "learned_scale": True, "sweeps": 5}
    vanilla = tiny_model(family, embed_scale=1.0)
    (vanilla.save_stock_pretrained if stock else vanilla.save_pretrained)(tmp_path)
    model, thoughts = reopened(tmp_path, depth, stock), []
    hook = model.model.norm.register_forward_hook(lambda module, args, out: thoughts.append(model.depth.scale * out))
    ids = tokens(8, 12)
    with torch.no_grad():
        model(ids)
    hook.remove()
    ratio = torch.cat(thoughts, dim=1).square().mean() / model.model.embed_tokens.weight.square().mean()
    assert ratio.item() == pytest.approx(1, rel=0.15)  # the formula takes channels as equally large
    assert model.depth.scale.requires_grad and abs(model.depth.scale.item() - 1) > 0.1
    with torch.no_grad():
        model.depth.scale.fill_(0.625)
    model.save_pretrained(tmp_path / "own")
    assert FathomForCausalLM.from_pretrained(tmp_path / "own").depth.scale.item() == 0.625


@pytest.mark.parametrize("stock", [True, False])
def test_expected_embeddings_are_in_embedding_units_already(stock, tmp_path):
    vanilla = tiny_model(embed_scale=1.0)
    (vanilla.save_stock_pretrained if stock else vanilla.save_pretrained)(tmp_path)
    depth = {"name": "ponderlm2", "learned_scale": True, "interpolation": True}
    assert reopened(tmp_path, depth, stock).depth.scale.item() == 1


@pytest.mark.parametrize(
    "stored",
    [{"name": "ponderlm2"}, {"name": "ponderlm2", "thoughts": 2}, {"name": "ponderlm3", "thoughts": 1}],
    ids=str,
)
@torch.no_grad()
def test_a_learned_scale_starts_at_the_one_that_thoughts_were_trained_with(stored, tmp_path):
    model, ids = tiny_model(embed_scale=1.0, depth=stored), tokens(2, 6)
    if stored["name"] == "ponderlm3":  # all thoughts, as ponderlm2
        model.depth.router.weight.zero_()
        model.depth.router.bias.copy_(torch.tensor([-200.0, 200.0]))
    model.save_pretrained(tmp_path)
    depth = {"name": "ponderlm2", "thoughts": stored.get("thoughts", 1), "learned_scale": True}
    assert_close(reopened(tmp_path, depth)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("stored", [{"thoughts": 0}, {"interpolation": True}], ids=str)
def test_a_learned_scale_adapts_where_no_state_has_been_a_thought(stored, tmp_path):
    tiny_model(embed_scale=1.0, depth={"name": "ponderlm2", **stored}).save_pretrained(tmp_path)
    scale = reopened(tmp_path, {"name": "ponderlm2", "learned_scale": True}).depth.scale.item()
    tiny_model(embed_scale=1.0).save_pretrained(tmp_path)
    assert scale == reopened(tmp_path, {"name": "ponderlm2", "learned_scale": True}).depth.scale.item() != 1


def test_a_scale_that_would_not_train_is_refused():
    depth = {"name": "ponderlm2", "learned_scale": True, "gradient_passes": 1}
    with pytest.raises(ValueError, match=r"learned_scale=True and gradient_passes=1: .* gradient_passes=2 or more"):
        FathomConfig(depth=depth)
    FathomConfig(depth={**depth, "thoughts": 0})
    for options in ({}, {"thoughts": 3}, {"sweeps": 0}, {"interpolation": True}):
        model, ids = make(**{"sweeps": 2, **options}, learned_scale=True, gradient_passes=2).train(), tokens(2, 6)
        model(ids, labels=ids).loss.backward()
        assert model.depth.scale.grad.abs().item() > 0


@pytest.mark.slow
def test_a_random_number_of_sweeps_compiles():
    """One graph a number; the draw itself stays outside."""
    model, ids = make(double=False, sweeps=3, random_sweeps=True).train(), tokens(2, 7)
    calls = count_calls(model)
    losses, lengths = {}, set()
    for seed in range(6):
        torch.manual_seed(seed)
        calls.clear()
        losses[seed] = model(ids, labels=ids).loss.item()
        lengths.add(len(calls))
    assert lengths == {1 + 2 + 1, 1 + 3 + 1}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for seed, loss in losses.items():
        torch.manual_seed(seed)
        assert compiled(ids, labels=ids).loss.item() == pytest.approx(loss, rel=1e-5)


@torch.no_grad()
def test_a_cache_of_another_number_of_thoughts_is_refused():
    cache = make(thoughts=2)(tokens(1, 3), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"holds 3 slots a token.*'ponderlm2' keeps 2.*empty DynamicCache"):
        make(thoughts=1)(tokens(1, 1), past_key_values=cache)

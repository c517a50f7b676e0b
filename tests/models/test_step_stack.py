"""Steps over all tokens: choosing, gathering, the cache's segments, backends, compilation and what is refused."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from transformers import DynamicCache, StaticCache

from fathom.models.steps.cache import StepLayer, appended_segments, replaced_segments
from fathom.models.steps.tokens import BUCKET, Chosen, choose
from fathom.ops.token_blocks import NOWHERE
from tiny import assert_close, tiny_model, tokens

COT = {"name": "adaptive_latent_cot", "steps": 3, "threshold": 0.25, "router_bias": 0.0}
ADA = {"name": "adaponderlm", "steps": 3, "threshold": 0.45}
both = pytest.mark.parametrize("depth", [COT, ADA], ids=lambda depth: depth["name"])
# In the compiler both take the same road; CI goes it once.
first = pytest.mark.parametrize(
    "depth", [COT, pytest.param(ADA, marks=pytest.mark.slow)], ids=lambda depth: depth["name"]
)


def test_chosen_tokens_are_taken_and_put_back_in_place():
    mask = torch.tensor([[0, 1, 0, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    chosen = choose(mask)
    assert chosen.index.shape == (3, 3) and chosen.index[0].tolist() == [1, 3, 4] and chosen.index[1, 0] == 0
    assert chosen.live.tolist() == [[True] * 3, [True, False, False], [False] * 3]
    for dim, x in ((1, torch.randn(3, 5)), (1, torch.randn(3, 5, 4)), (2, torch.randn(3, 2, 5, 4))):
        taken = chosen.take(x, dim)
        assert torch.equal(taken.select(dim, 2)[0], x.select(dim, 4)[0])
        put = chosen.put(x, torch.full_like(taken, 7.0), dim)
        where = mask.view(3, *(1,) * (dim - 1), 5, *(1,) * (x.ndim - dim - 1)).expand_as(x)
        assert torch.equal(put, torch.where(where, 7.0, x))


def test_choosing_all_some_and_none():
    everyone, nobody = torch.ones(2, 4).bool(), torch.zeros(2, 4).bool()
    assert choose(everyone) == Chosen() and choose(nobody) is None
    one_row = choose(torch.tensor([[1, 1, 1, 1], [0, 1, 0, 0]]).bool())
    assert one_row.index is None and one_row.live.sum() == 5  # a row needs all: in place


def test_numbers_above_the_bucket_are_its_multiples():
    for wanted, size in ((BUCKET, BUCKET), (BUCKET + 1, 2 * BUCKET), (2 * BUCKET, 2 * BUCKET), (5 * BUCKET - 3, None)):
        mask = torch.zeros(1, 5 * BUCKET - 3).bool()
        mask[0, torch.randperm(mask.shape[1])[:wanted]] = True
        chosen = choose(mask)
        assert (None if chosen.index is None else chosen.index.shape[1]) == size
        live = torch.ones(1, size or mask.shape[1]).bool() if chosen.live is None else chosen.live
        assert live.sum() == wanted


def test_segments_show_what_each_rule_shows():
    appended, replaced = StepLayer(appended_segments(3)), StepLayer(replaced_segments(3))
    appended.sizes, replaced.sizes = [4, 3, 2], [1, 2, 3, 5, 4]
    assert [appended.visible(k) for k in range(3)] == [[slice(0, 4)], [slice(0, 7)], [slice(0, 9)]]
    # last slots of steps ≤ k, and at k the slots of tokens that went on
    assert [replaced.visible(k) for k in range(3)] == [
        [slice(0, 1), slice(6, 11)],
        [slice(0, 3), slice(11, 15)],
        [slice(0, 6)],
    ]


@pytest.mark.parametrize(
    "depth", [{**COT, "steps": 1, "threshold": 0.5}, {**ADA, "steps": 1, "threshold": 0.5}], ids=str
)
@torch.no_grad()
def test_what_a_crop_took_from_some_rows_only_is_not_seen(depth):
    """Rows that run equally many tokens a step have no gaps, but may lose different columns."""
    model, new = tiny_model(depth=depth).double(), tokens(2, 1, seed=9)
    left_gaps = 0
    for seed in range(40):
        ids = tokens(2, 6, seed=seed)
        for keep in range(1, 6):
            cache = DynamicCache()
            model(ids, past_key_values=cache)
            before = cache.layers[0].gaps
            cache.crop(keep - 6)
            left_gaps += cache.layers[0].gaps and not before
            expected = model(torch.cat((ids[:, :keep], new), 1)).logits[:, -1]
            assert_close(model(new, past_key_values=cache).logits[:, -1], expected, 1e-12)
    assert left_gaps


@pytest.mark.parametrize("depth", [{"name": "vanilla"}, COT, ADA, {**COT, "threshold": 0.0}], ids=str)
@torch.no_grad()
def test_with_a_cache_restarting_positions_are_positions_only(depth, form):
    """As in transformers, where they mean packed documents in a forward without a cache alone."""
    model, ids, positions = tiny_model(depth=depth).double(), tokens(1, 8), torch.tensor([[0, 1, 2, 3] * 2])
    cache = DynamicCache()
    pieces = [
        model(ids[:, i : i + 1], position_ids=positions[:, i : i + 1], past_key_values=cache).logits for i in range(8)
    ]
    assert_close(model(ids, position_ids=positions, use_cache=True).logits, torch.cat(pieces, dim=1), 1e-12)


@both
@torch.no_grad()
def test_cropping_to_any_length_leaves_what_was_there(depth, form):
    model, ids = tiny_model(depth=depth), tokens(3, 9)
    for keep in range(1, 9):
        cache, short = DynamicCache(), DynamicCache()
        model(ids, past_key_values=cache)
        cache.crop(keep - 9)
        model(ids[:, :keep], past_key_values=short)
        assert cache.get_seq_length() == short.get_seq_length() == keep
        new = tokens(3, 2, seed=4)
        assert_close(model(new, past_key_values=cache).logits, model(new, past_key_values=short).logits)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_close(model(ids, past_key_values=cache).logits, model(ids).logits)


@both
@torch.no_grad()
def test_packing_drops_columns_that_no_row_uses(depth, form):
    model, ids, cache = tiny_model(depth=depth), tokens(3, 9), DynamicCache()
    for t in range(9):
        model(ids[:, t : t + 1], past_key_values=cache)
    layer, new = cache.layers[0], tokens(3, 2, seed=4)
    expected = model(new, past_key_values=copy.deepcopy(cache)).logits
    before = layer.token.shape[1]
    used = (layer.token != NOWHERE).sum()
    packing = layer.packing()
    for each in cache.layers:
        each.pack(packing)
    assert layer.token.shape[1] == layer.keys.shape[2] == sum(layer.sizes) < before
    assert (layer.token != NOWHERE).sum() == used
    assert_close(model(new, past_key_values=cache).logits, expected)


@both
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_backends_agree_in_every_form(depth, backend, form):
    model, ids = tiny_model(depth=depth), tokens(2, 9)
    model.set_attn_implementation("eager")
    expected = model(ids, use_cache=False).logits
    model.set_attn_implementation(backend)
    assert_close(model(ids, use_cache=False).logits, expected)
    cache = DynamicCache()
    pieces = [model(part, past_key_values=cache).logits for part in ids.split((4, 1, 4), dim=1)]
    assert_close(torch.cat(pieces, dim=1), expected)


@both
@torch.no_grad()
def test_block_masks_serve_flex_attention(depth):
    """The form of a GPU, uncompiled: forward only on a CPU. The first step's mask is transformers' own."""
    model, ids = tiny_model(depth=depth), tokens(2, 9)
    expected = model(ids, use_cache=False).logits
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    padded = model(ids, attention_mask=mask, use_cache=False).logits
    model.config._attn_implementation = "sdpa_flash"  # a name with "flash": FlexAttention serves what it cannot
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("sdpa_flash", sdpa_attention_forward)
    AttentionMaskInterface.register("sdpa_flash", sdpa_mask)
    assert_close(model(ids, use_cache=False).logits, expected)
    actual = model(ids, attention_mask=mask, use_cache=False).logits
    assert_close(actual[mask.bool()], padded[mask.bool()])


@both
@torch.no_grad()
def test_documents_of_a_packed_row_do_not_see_each_other(depth, form):
    model, ids = tiny_model(depth=depth), tokens(2, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 0, 1]])
    packed = model(ids, position_ids=positions, use_cache=False).logits
    for row, part in ((0, slice(0, 4)), (0, slice(4, 9)), (1, slice(0, 2)), (1, slice(2, 7)), (1, slice(7, 9))):
        assert_close(packed[row, part], model(ids[row : row + 1, part]).logits[0])


@both
@torch.no_grad()
def test_mixers_work_between_the_layers_of_a_step(depth, form):
    model, ids, cache = tiny_model(depth=depth, mixer={"name": "depth_attention"}), tokens(2, 9), DynamicCache()
    pieces = [model(chunk, past_key_values=cache).logits for chunk in ids.split((4, 1, 4), dim=1)]
    assert_close(torch.cat(pieces, dim=1), model(ids, use_cache=False).logits)


@first
def test_compiled_shapes_are_bounded(depth, form):
    """Forwards of many halting patterns compile few graphs: the numbers of gathered tokens are dynamic."""
    model = tiny_model(depth=depth)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count)
    with torch.no_grad():
        after = []
        for seed in range(8):
            ids = tokens(2, 20 + seed, seed=seed)
            assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
            after.append(len(graphs))
    assert after[-1] == after[3], after  # the first patterns compile what all others reuse


@first
@torch._dynamo.config.patch(recompile_limit=64, allow_unspec_int_on_nn_module=True)  # a layer's number is no constant
def test_layers_compiled_by_themselves_share_their_graphs(depth, form):
    """One graph for all layers, for a model with its router or gates and one without, whatever runs."""
    graphs, after = [], []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for options in ({"name": depth["name"], "steps": 3, "halting": "fixed"}, depth):
        model = tiny_model(depth=options, num_hidden_layers=5)
        expected = [model(tokens(2, 70 + n, seed=n)).logits for n in range(6)]
        for layer in model.model.layers:
            layer.compile(backend=count)
        for n, logits in enumerate(expected):
            assert_close(model(tokens(2, 70 + n, seed=n)).logits, logits)
        after.append(len(graphs))
    assert 2 <= after[0] <= after[1] <= 12, after


@both
@torch.no_grad()
def test_all_layers_close_their_gaps_alike_and_only_then(depth, form):
    """A prefill leaves its gaps to the next forward, which looks at them once for all layers."""
    model, ids, cache, looks = tiny_model(depth=depth), tokens(3, 80), DynamicCache(), []
    model(ids[:, :79], past_key_values=cache)
    layer, packing = cache.layers[0], StepLayer.packing
    assert layer.gaps and layer.unpacked >= BUCKET

    def look(held):
        looks.append(held)
        return packing(held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepLayer, "packing", look)
        last = model(ids[:, 79:], past_key_values=cache).logits
    assert len(looks) == 1
    assert_close(last, model(ids, use_cache=False).logits[:, 79:])
    for each in cache.layers:
        assert each.sizes == layer.sizes and each.keys.shape[2] == sum(layer.sizes) and each.token is layer.token


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has a backward on a GPU only")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("lengths", [(300,), (300, 421)], ids=str)
@both
def test_gpu_kernels_train_and_run_as_the_dense_mask(depth, lengths, compiled):
    """Block masks of steps laid end to end against dense masks by row on a GPU: logits, losses and all gradients, and
    a token after a padded prefill."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}  # kernels want 16 channels a head
    results = []
    for backend in ("eager", "sdpa"):
        torch._dynamo.reset()
        model = tiny_model(depth=depth, **sizes).float().cuda()
        model.set_attn_implementation(backend)
        if compiled and backend == "sdpa":
            for layer in model.model.layers:
                layer.compile()
        found = []
        for length in lengths:
            ids = tokens(3, length).cuda()
            with torch.no_grad():
                found.append(model.eval()(ids, use_cache=False).logits)
                if not compiled:
                    cache, mask = DynamicCache(), torch.ones_like(ids)
                    mask[1, :40] = 0
                    padded = model(ids, attention_mask=mask, past_key_values=cache).logits
                    longer = torch.nn.functional.pad(mask, (0, 1), value=1)
                    after = model(ids[:, :1], attention_mask=longer, past_key_values=cache).logits
                    found.extend((padded[mask.bool()], after))
            loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            found.append(loss.detach())
        results.append([*found, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for actual, expected in zip(results[1], results[0]):
        assert_close(actual, expected, 1e-3)


@both
@torch.no_grad()
def test_caches_of_other_methods_are_refused(depth):
    model = tiny_model(depth=depth)
    other = tiny_model(depth={"name": "pause", "pauses": 1})(tokens(1, 3), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=rf"another method's slots.*{depth['name']}.*empty DynamicCache"):
        model(tokens(1, 2), past_key_values=other)
    fewer = tiny_model(depth={**depth, "steps": 2})(tokens(1, 3), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="those of other options"):
        model(tokens(1, 2), past_key_values=fewer)
    with pytest.raises(ValueError, match=r"StaticLayer.*pass a DynamicCache"):
        model(tokens(1, 2), past_key_values=StaticCache(config=model.config, max_cache_len=8))
    with pytest.raises(ValueError, match=r"attention_mask.*\[batch, tokens\]"):
        model(tokens(1, 2), attention_mask=torch.zeros(1, 1, 2, 2))


def test_reentrant_checkpointing_is_refused():
    model = tiny_model(depth=COT).train()
    with pytest.raises(ValueError, match="use_reentrant=True loses gradients"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


@both
def test_a_prefill_that_breaks_off_leaves_the_cache_empty(depth, monkeypatch):
    def interrupted(stack):
        raise KeyboardInterrupt

    model, cache, ids = tiny_model(depth=depth), DynamicCache(), tokens(2, 20)
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr("fathom.models.steps.stack.StepStack.settled", interrupted)
        model(ids, past_key_values=cache)
    if depth is ADA:  # the other's cache is filled as soon as its steps have run
        cache.crop(-3)
        assert cache.get_seq_length() == 0
        assert_close(model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits)

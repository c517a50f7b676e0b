"""Slot layouts: the three transformers-5 traps, documents, padding, and what a cache of slots counts and refuses."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import warnings

import pytest
import torch
from transformers import Cache, DataCollatorWithFlattening, DynamicCache, StaticCache, modeling_flash_attention_utils
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_flash_attention_utils import _is_packed_sequence

from fathom.models import hf_versions
from fathom.models.slots import CHANNEL, RaggedSlotLayer, SlotLayer, interleave
from fathom.ops.biased_attention import MASKED, ChannelBias, FlexBias, KeyBias, RangeBias
from fathom.ops.visibility import Visibility
from tiny import assert_close, tiny_model, tokens

PAUSE = {"name": "pause", "pauses": 2}
several_slots = pytest.mark.parametrize(
    "depth",
    [PAUSE, {"name": "ponderlm2"}, {"name": "ponderlm3"}, {"name": "adaptive_latent_cot"}, {"name": "adaponderlm"}],
    ids=lambda depth: depth["name"],
)


def layout_of(length, stages, batch=1, mask=None):
    model = tiny_model(depth=PAUSE)
    embeddings = torch.zeros(batch, length, 32)
    return model, model.bind_stack(embeddings, mask, None, None, {}).layout(stages)


def test_interleaving_and_taking_apart():
    stages = [torch.randn(2, 5, 3) for _ in range(3)]
    slots = interleave(stages)
    assert slots.shape == (2, 15, 3)
    assert all(torch.equal(slots[:, i::3], stage) for i, stage in enumerate(stages))
    assert interleave(stages[:1]) is stages[0]


def test_trap_1_the_mask_builder_never_sees_repeated_positions():
    _, layout = layout_of(5, 3)
    assert layout.position_ids.tolist() == [[t for t in range(5) for _ in range(3)]]
    assert find_packed_sequence_indices(layout.position_ids).unique().numel() > 1  # read as documents
    assert layout.slot_ids.tolist() == [list(range(15))]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@torch.no_grad()
def test_trap_1_no_mask_no_cache_equals_an_explicit_mask(backend):
    model = tiny_model(depth=PAUSE)
    model.set_attn_implementation(backend)
    for batch in (1, 2):
        ids = tokens(batch, 6)
        plain = model(ids, use_cache=False).logits
        assert_close(model(ids, use_cache=False, attention_mask=torch.ones_like(ids)).logits, plain)
        assert_close(model(ids, use_cache=False, position_ids=torch.arange(6).expand(batch, 6)).logits, plain)


@torch.no_grad()
def test_trap_2_layers_are_told_ids_that_flash_attention_does_not_take_for_packed():
    model = tiny_model(depth=PAUSE)
    seen = []
    hook = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    cache = DynamicCache()
    model(tokens(1, 6), past_key_values=cache)
    model(tokens(1, 1), past_key_values=cache)
    hook.remove()
    assert len(seen) == 2
    assert not any(_is_packed_sequence(ids, batch_size=1) for ids in seen)


@torch.no_grad()
def test_trap_3_the_cache_counts_tokens():
    model = tiny_model(depth=PAUSE)
    cache = DynamicCache()
    model(tokens(2, 6), past_key_values=cache)
    assert cache.get_seq_length() == 6
    assert {layer.keys.shape[-2] for layer in cache.layers} == {18}
    cache.crop(-2)
    assert cache.get_seq_length() == 4
    assert {layer.keys.shape[-2] for layer in cache.layers} == {12}
    assert len(cache.layers) == model.config.num_hidden_layers


@torch.no_grad()
def test_traps_1_and_2_where_slots_are_left_out():
    """The last pass of a pruned prefill: ids with gaps would be read as packed documents."""
    model = tiny_model(depth={"name": "ponderlm3", "thoughts": 2, "threshold": 0.3, "sweeps": 20})
    model.depth.router.weight.mul_(6)
    ids, seen = tokens(1, 8), []
    expected = model(ids, use_cache=False).logits
    for shift in (0, 7):
        model.model.layers[0].self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
        )
        positions = shift + torch.arange(8)[None]
        assert_close(model(ids, position_ids=positions, use_cache=False).logits, expected)
        assert 8 < seen[-1].shape[1] < 24 and not any(_is_packed_sequence(each, batch_size=1) for each in seen)


def test_unpadded_layouts_build_no_mask():
    for mask in (None, torch.ones(1, 5, dtype=torch.long)):
        model, layout = layout_of(5, 3, mask=mask)
        assert layout.mask(model.config, torch.zeros(1, 15, 32), None, packed=False) is None


def test_padded_slots_are_masked_with_their_token():
    model, layout = layout_of(4, 3, batch=2, mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    mask = layout.mask(model.config, torch.zeros(2, 12, 32), None, packed=False)
    for row, padded in enumerate((2, 0)):
        for query in range(3 * padded, 12):
            allowed = [key for key in range(12) if 3 * padded <= key <= query]
            assert mask[row, 0, query].nonzero().flatten().tolist() == allowed
    assert layout.position_ids[0, 6:].tolist() == [0, 0, 0, 1, 1, 1]


@torch.no_grad()
def test_packed_documents_do_not_see_each_other():
    model = tiny_model(depth=PAUSE)
    ids = tokens(1, 7)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    packed = model(ids, position_ids=positions, use_cache=False).logits
    for part in (slice(0, 4), slice(4, 7)):
        assert_close(packed[:, part], model(ids[:, part]).logits)


@torch.no_grad()
def test_caches_of_another_number_of_slots_are_refused():
    model, other = tiny_model(depth=PAUSE), tiny_model(depth={"name": "pause", "pauses": 1})
    cache = other(tokens(1, 3), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"holds 2 slots a token.*'pause' keeps 3.*empty DynamicCache"):
        model(tokens(1, 2), past_key_values=cache)
    plain = tiny_model()(tokens(1, 3), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="holds 1 slots a token"):
        model(tokens(1, 2), past_key_values=plain)


@several_slots
@pytest.mark.parametrize("one", [{"name": "vanilla"}, {"name": "ponderlm2", "thoughts": 0}], ids=str)
@torch.no_grad()
def test_a_method_with_one_slot_a_token_refuses_the_slots_of_others(depth, one):
    """The method would take the cache's tokens for its slots; an emptied cache is accepted."""
    ids, cache, model = tokens(1, 3), DynamicCache(), tiny_model(depth=one)
    tiny_model(depth=depth)(ids, past_key_values=cache)
    with pytest.raises(ValueError, match=r"several slots a token, but depth=.* keeps 1 .* pass an empty DynamicCache"):
        model(ids, past_key_values=cache)
    cache.reset()
    assert_close(model(ids, past_key_values=cache).logits, model(ids).logits)
    assert cache.get_seq_length() == cache.layers[0].keys.shape[-2] == 3


@torch.no_grad()
def test_a_static_cache_is_refused():
    model = tiny_model(depth=PAUSE)
    with pytest.raises(ValueError, match=r"StaticLayer.*pass a DynamicCache"):
        model(tokens(1, 2), past_key_values=StaticCache(config=model.config, max_cache_len=8))


def test_a_four_dimensional_mask_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask.*'pause'.*\[batch, tokens\]"):
        tiny_model(depth=PAUSE)(tokens(1, 2), attention_mask=torch.zeros(1, 1, 2, 2))


@several_slots
@pytest.mark.parametrize("shape", [(2, 2), (2, 6), (2, 9), (1, 8), (3, 8)], ids=str)
@torch.no_grad()
def test_a_mask_of_other_tokens_is_refused(depth, shape):
    """Neither of the new tokens alone nor of more than there are."""
    model, ids, cache = tiny_model(depth=depth), tokens(2, 8), DynamicCache()
    model(ids[:, :6], past_key_values=cache)
    with pytest.raises(ValueError, match=rf"\[{shape[0]}, {shape[1]}\] .*: \[2, 8\] for 6 cached and 2 new"):
        model(ids[:, 6:], past_key_values=cache, attention_mask=torch.ones(shape, dtype=torch.long))


@several_slots
@torch.no_grad()
def test_crops_beyond_either_end_and_resets(depth):
    model, ids, cache = tiny_model(depth=depth), tokens(1, 8), DynamicCache()
    expected = model(ids, past_key_values=cache).logits
    lengths = []
    for change in (100, 0, -3, 5, -9, -1, -4, 3):
        cache.crop(change)
        lengths.append(cache.get_seq_length())
    assert lengths == [8, 8, 5, 5, 0, 0, 0, 0]
    assert_close(model(ids, past_key_values=cache).logits, expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_close(model(ids, past_key_values=cache).logits, expected)


def test_caches_made_by_the_library_become_slot_caches():
    model = tiny_model(depth=PAUSE)
    cache = hf_versions.new_cache(model.config, 1)
    with torch.no_grad():
        model(tokens(1, 2), past_key_values=cache)
    assert all(isinstance(layer, SlotLayer) for layer in cache.layers)


@pytest.mark.parametrize("depth", [PAUSE, {"name": "ponderlm2", "sweeps": 12}], ids=lambda depth: depth["name"])
@torch.no_grad()
def test_mixers_work_between_the_slots_of_a_pass(depth):
    model, ids, cache = tiny_model(depth=depth, mixer={"name": "depth_attention"}), tokens(2, 9), DynamicCache()
    pieces = [model(chunk, past_key_values=cache).logits for chunk in ids.split((4, 1, 4), dim=1)]
    assert_close(torch.cat(pieces, dim=1), model(ids, use_cache=False).logits)


def biased_layout(padded=False):
    """Three slots a token, a bias on each, and a dense additive mask written out by hand."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]) if padded else None
    bias = -torch.rand(2, 15, generator=torch.Generator().manual_seed(0)) * 4
    model = tiny_model(depth=PAUSE)
    stack = model.bind_stack(torch.zeros(2, 5, 32), mask, None, None, {})
    by_hand = torch.full((2, 1, 15, 15), float("-inf"))
    for row in range(2):
        first = 6 if padded and row == 0 else 0
        for query in range(15):
            by_hand[row, 0, query, first : query + 1] = bias[row, first : query + 1]
        by_hand[row, 0, :first, 0] = 0.0  # padding reads something
    return model, stack, stack.layout(3, key_bias=bias), by_hand


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention", CHANNEL])
@torch.no_grad()
def test_backends_add_the_key_bias(backend, padded):
    model, stack, layout, by_hand = biased_layout(padded)
    model.set_attn_implementation(backend)
    slots = torch.randn(2, 15, 32, generator=torch.Generator().manual_seed(1))
    bound = stack.bind(slots, layout)
    assert isinstance(bound.attention_mask, KeyBias) == (backend in ("flex_attention", CHANNEL))
    actual = bound(slots)
    model.set_attn_implementation("eager")
    bound.attention_mask = by_hand
    expected = bound(slots)
    first = 6 if padded else 0
    for row, start in enumerate((first, 0)):
        assert_close(actual[row, start:], expected[row, start:])


@dataclasses.dataclass(frozen=True)
class OwnStage(Visibility):
    stages: int

    def __call__(self, query, key):
        return (key <= query) & (key % self.stages == query % self.stages)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention", CHANNEL])
@torch.no_grad()
def test_a_visibility_by_slot_indices(backend):
    """Stages that see only themselves are sequences of their own."""
    model, stack, layout, _ = biased_layout()
    model.set_attn_implementation(backend)
    slots = torch.randn(2, 15, 32, generator=torch.Generator().manual_seed(1))
    layout = dataclasses.replace(layout, key_bias=None, visibility=OwnStage(3))
    actual = stack.bind(slots, layout)(slots)
    model.set_attn_implementation("eager")
    for stage in range(3):
        alone = slots[:, stage::3]
        assert_close(actual[:, stage::3], stack.bind(alone, stack.layout(1))(alone))


@torch.no_grad()
def test_packed_documents_with_a_key_bias():
    for backend in ("sdpa", "flex_attention"):
        model, _, layout, _ = biased_layout()
        model.set_attn_implementation(backend)
        positions = torch.tensor([[0, 1, 2, 0, 1]]).expand(2, -1)
        slots = torch.randn(2, 15, 32, generator=torch.Generator().manual_seed(1))
        packed = model.bind_stack(torch.zeros(2, 5, 32), None, positions, None, {})
        together = packed.bind(slots, packed.layout(3, key_bias=layout.key_bias))(slots)
        for a, b in ((0, 9), (9, 15)):
            alone = model.bind_stack(torch.zeros(2, (b - a) // 3, 32), None, None, None, {})
            part = slots[:, a:b]
            assert_close(together[:, a:b], alone.bind(part, alone.layout(3, key_bias=layout.key_bias[:, a:b]))(part))


def test_flash_serves_what_it_can_express_and_says_who_serves_the_rest():
    _, stack, layout, _ = biased_layout(padded=True)
    config, slots = copy.copy(stack.decoder.config), torch.zeros(2, 15, 32)
    config._attn_implementation = "flash_attention_2"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mask = layout.mask(config, slots, None, packed=False)
    assert isinstance(mask, ChannelBias) and mask.bias[0, :6].eq(MASKED).all()  # padding hidden by it
    own = dataclasses.replace(layout, visibility=OwnStage(3))
    with pytest.warns(UserWarning, match="flash_attention_2 has no kernel .* FlexAttention serves"):
        assert isinstance(own.mask(config, slots, None, packed=False), FlexBias)


def test_ranges_where_they_are_chosen(monkeypatch):
    """For plain causal slots; not with a visibility of their own, packed documents or few slots."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    model, layout = layout_of(60, 3)
    slots, bias = torch.zeros(2, 180, 32), torch.zeros(2, 180)
    layout = dataclasses.replace(layout, key_bias=bias, valid=torch.arange(180).expand(2, -1) > 2)
    mask = layout.mask(model.config, slots, None, packed=False)
    assert isinstance(mask, RangeBias) and mask.bias[:, :3].eq(MASKED).all() and mask.bias[:, 3:].eq(0).all()
    assert mask.ranges.start.tolist() == [[0] * 180 + [180] * 180] and mask.ranges.stop.tolist() == [[*range(1, 361)]]
    assert isinstance(
        dataclasses.replace(layout, visibility=OwnStage(3)).mask(model.config, slots, None, False), FlexBias
    )
    assert isinstance(dataclasses.replace(layout, valid=None).mask(model.config, slots, None, packed=True), FlexBias)
    model, few = layout_of(40, 3)
    few = dataclasses.replace(few, key_bias=bias[:, :120])
    assert isinstance(few.mask(model.config, slots[:, :120], None, packed=False), torch.Tensor)


def test_some_slots_of_a_layout():
    _, _, layout, _ = biased_layout(padded=True)
    chosen = torch.tensor([0, 3, 4, 13])
    some = layout.take(chosen)
    assert some.step.tolist() == [0, 0, 1, 1] and some.position_ids.tolist() == [[0, 0, 0, 2], [0, 1, 1, 4]]
    assert torch.equal(some.key_bias, layout.key_bias[:, chosen]) and torch.equal(some.valid, layout.valid[:, chosen])


def ragged_cache():
    """Two layers and tokens of 3, 1, 2, 1 slots; two rows."""
    layers = [RaggedSlotLayer(3) for _ in range(2)]
    for layer in layers:
        layer.update(torch.arange(14.0).view(2, 1, 7, 1), torch.arange(14.0).view(2, 1, 7, 1))
        layer.append(4, torch.tensor([0, 1, 2, 0, 0, 1, 0]))
    layers[0].bias = torch.arange(14.0).view(2, 7)
    return Cache(layers=layers)


@pytest.mark.parametrize(("tokens_left", "slots"), [(4, 7), (3, 6), (2, 4), (1, 3), (0, 0)])
def test_a_ragged_cache_counts_and_crops_tokens(tokens_left, slots):
    cache = ragged_cache()
    assert cache.get_seq_length() == 4
    cache.crop(tokens_left - 4)
    assert cache.get_seq_length() == tokens_left
    assert all(layer.keys.shape == (2, 1, slots, 1) == layer.values.shape for layer in cache.layers)
    assert cache.layers[0].bias.shape == (2, slots)


def test_the_bias_of_a_ragged_cache_follows_its_rows():
    for change, rows in (
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    ):
        cache = ragged_cache()
        change(cache)
        assert torch.equal(cache.layers[0].bias, cache.layers[0].keys[:, 0, :, 0])
        assert cache.layers[0].bias[:, 0].tolist() == [7.0 * row for row in rows]
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.layers[0].bias is None


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("prefill", ["sequential", "jacobi"])
@pytest.mark.parametrize("name", ["ponderlm2", "ponderlm3"])
def test_documents_packed_by_position_ids_are_apart(name, prefill, rows):
    """Without a cache, position ids that restart start a document: its logits are those of the document alone."""
    model = tiny_model(depth={"name": name, "thoughts": 2, "prefill": prefill, "sweeps": 20})
    if name == "ponderlm3":  # tokens that differ in how far they think
        model = tiny_model(depth={**model.config.depth, "threshold": 0.3})
        with torch.no_grad():
            model.depth.router.weight.mul_(6)
    ids, positions = tokens(2, 9), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(rows, -1)
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        assert_close(packed[:, :4], model(ids[:, :4]).logits)
        assert_close(packed[:, 4:], model(ids[:, 4:]).logits)


@pytest.mark.parametrize("prefill", ["sequential", "jacobi"])
@pytest.mark.parametrize("name", ["ponderlm2", "ponderlm3"])
@torch.no_grad()
def test_with_a_cache_restarting_positions_are_positions_only(name, prefill):
    """As in transformers: a prompt read with a cache is what its tokens are one by one."""
    model = tiny_model(depth={"name": name, "thoughts": 1, "prefill": prefill, "sweeps": 20}).double()
    ids, positions, cache = tokens(1, 8), torch.tensor([[0, 1, 2, 3] * 2]), DynamicCache()
    pieces = [
        model(ids[:, i : i + 1], position_ids=positions[:, i : i + 1], past_key_values=cache).logits for i in range(8)
    ]
    assert_close(model(ids, position_ids=positions, use_cache=True).logits, torch.cat(pieces, dim=1), 1e-12)


@pytest.fixture
def flash(monkeypatch):
    """Flash attention's two kernels in plain PyTorch, behind transformers' own preparation of their arguments."""

    def attend(query, key, value, scale):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        hidden = ~torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
        scores = (torch.einsum("qhd,khd->hqk", query, key) * scale).masked_fill(hidden, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)

    def varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, scale):
        out = torch.zeros_like(query)
        for (a, b), (c, d) in zip(itertools.pairwise(cu_seqlens_q), itertools.pairwise(cu_seqlens_k)):
            out[a:b] = attend(query[a:b], key[c:d], value[c:d], scale)
        return out

    def dense(query, key, value, scale):
        return torch.stack([attend(*row, scale) for row in zip(query, key, value)])

    class Arguments:
        """Stand-in for kernel arguments: transformers 5.24 asks for plain and paged kernels, 5.17 for one kind."""

        def __call__(self, softmax_scale=None, **rest):
            return {"scale": softmax_scale}

        def __iter__(self):
            return iter((self, self))

    utils = modeling_flash_attention_utils
    kernels = (dense, varlen, None, utils._pad_input, utils._unpad_input)
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda *_: (kernels, Arguments()))


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("boundaries", [False, True])
@pytest.mark.parametrize(
    "depth",
    [
        PAUSE,
        {"name": "ponderlm2", "thoughts": 2, "sweeps": 20},
        {"name": "ponderlm2", "thoughts": 2, "prefill": "sequential"},
        {"name": "ponderlm3", "thoughts": 2, "sweeps": 20},
        {"name": "ponderlm3", "thoughts": 2, "prefill": "sequential"},
        {"name": "adaptive_latent_cot", "steps": 2, "threshold": 0.0, "router_bias": 2.0},
        {"name": "adaptive_latent_cot", "steps": 2, "threshold": 0.5, "router_bias": 0.0},
        {"name": "adaponderlm", "steps": 2, "threshold": 0.5},
    ],
    ids=str,
)
@torch.no_grad()
def test_collated_documents_are_apart_under_flash_attention(depth, boundaries, use_cache, flash):
    """The collator's cu_seq_lens count tokens; the kernel runs over slots."""
    model, documents = tiny_model(depth=depth).double(), [[5, 6, 7, 8], [9, 10, 11]]
    alone = torch.cat([model(torch.tensor([ids]), use_cache=False).logits for ids in documents], dim=1)
    model.config._attn_implementation_internal = "flash_attention_2"
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=boundaries, return_seq_idx=boundaries)
    batch = collate([{"input_ids": ids} for ids in documents])
    batch.pop("labels")
    assert ("cu_seq_lens_q" in batch) is boundaries
    assert_close(model(**batch, use_cache=use_cache).logits, alone, 1e-9)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "depth",
    [
        {"name": "vanilla"},
        {"name": "pondering"},
        PAUSE,
        {"name": "ponderlm2", "sweeps": 20},
        {"name": "ponderlm2", "prefill": "sequential"},
        {"name": "ponderlm3", "thoughts": 2, "sweeps": 20},
        {"name": "adaptive_latent_cot", "steps": 2, "threshold": 0.5, "router_bias": 0.0},
        {"name": "adaponderlm", "steps": 2, "threshold": 0.5},
    ],
    ids=str,
)
@torch.no_grad()
def test_a_mask_of_ones_is_one_document_under_flash_attention_too(depth, rows, use_cache, flash):
    """Its kernels read restarting ids of a single row as documents; ids that only say positions must not reach them."""
    model, ids = tiny_model(depth=depth).double(), tokens(rows, 8)
    given = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 7]]).expand(rows, -1),
    }
    expected = model(ids, **given, use_cache=False).logits
    model.config._attn_implementation_internal = "flash_attention_2"
    assert_close(model(ids, **given, use_cache=use_cache).logits, expected, 1e-9)


@several_slots
def test_boundaries_in_tokens_that_slots_cannot_follow_are_refused(depth):
    model, ids = tiny_model(depth=depth), tokens(2, 6)
    boundaries = {"cu_seq_lens_q": torch.tensor([0, 4, 12]), "cu_seq_lens_k": torch.tensor([0, 4, 12])}
    message = rf"cu_seq_lens_q with depth='{depth['name']}': a token has \d slots, and packed documents need "
    with pytest.raises(ValueError, match=message + "position_ids"):
        model(ids, **boundaries)
    given = {"position_ids": torch.arange(6).expand(2, -1), "attention_mask": torch.ones_like(ids)}
    with pytest.raises(ValueError, match=message + "no attention_mask, .*: leave it out"):
        model(ids, **given, **boundaries)
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=message + "one row of all documents, not 2 rows"):
        model(ids, position_ids=torch.arange(6).expand(2, -1), **boundaries)

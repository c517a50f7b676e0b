"""Fovea on LongT5: the sheet's invariants, T5's own attention, and a float64 re-implementation token by token."""

from __future__ import annotations

import math

import pytest
import torch
from seq2seq_models import batch, stock_longt5
from transformers import AutoModelForSeq2SeqLM, LongT5ForConditionalGeneration, T5Config, T5EncoderModel

from fathom import FathomLongT5Config, FathomLongT5ForConditionalGeneration
from fathom.ops.fovea_attention import fovea_attention, grow, levels_of, mean_nodes, reads
from fathom.ops.fovea_attention.nodes import addresses, chosen
from tiny import assert_close

KINDS = ["transient-global", "local"]


def model(kind="transient-global", **options):
    encoder = {"name": "fovea", "block_len": 4, **options}
    folder, _ = stock_longt5(kind)
    return FathomLongT5ForConditionalGeneration.from_pretrained(folder, encoder=encoder).eval()


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ nodes


def test_kept_lists_serve_training_after_inference():
    """Lists of these options are made nowhere else: none is kept yet."""
    with torch.inference_mode():
        made = reads(
            None, 44, torch.device("cpu"), block_len=4, wing_size=3, stop_level=7, boundary="fill", steps="two"
        )
        lain = addresses(made, 11, 4, levels_of(11, 7))
    assert addresses(made, 11, 4, levels_of(11, 7)) is lain
    assert not any(x.is_inference() for x in (made.level, made.start, made.own, *lain))


def test_the_sheets_example():
    lists = chosen(16, 1, 20, "drop")
    assert lists[5] == ((2, 1), (4, 0), (5, 0), (6, 0), (7, 1), (9, 2))
    assert lists[0] == ((0, 0), (1, 0), (2, 1), (4, 2), (8, 3))
    assert mean_nodes(128, 1, 20, "drop") * 128 == 1426 and max(map(len, chosen(128, 1, 20, "drop"))) == 13


def test_two_steps_jump_to_the_last_level():
    assert chosen(16, 1, 3, "drop", "two")[5] == ((0, 2), (4, 0), (5, 0), (6, 0), (7, 2), (11, 2))
    assert chosen(16, 2, 20, "drop", "two")[0] == ((0, 0), (1, 0), (2, 0), (3, 3))
    assert chosen(3, 1, 1, "drop", "two") == chosen(3, 1, 1, "drop") and mean_nodes(64, 1, 4, "drop", "two") == 9.75


def by_rule(block, blocks, wing, stop):
    """Section 3.2 as it is written."""
    found = {(block, 0)}
    p = 0
    while 2**p < blocks:
        size, i = 2**p, 0
        endless = p >= stop - 1
        while i < wing or (endless and i < blocks):
            start = block + wing * (size - 1) + 1 + i * size
            if start <= blocks - size:
                found.add((start, p))
            start = block - (wing * (size - 1) + 1 + i * size) - size + 1
            if start >= 0:
                found.add((start, p))
            i += 1
        if endless:
            break
        p += 1
    return tuple(sorted(found))


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8, 13, 16, 33])
def test_nodes_are_the_rules_disjoint_and_partition_when_filled(blocks):
    for wing in (1, 2, 3):
        for stop in (1, 2, 3, 20):
            dropped, filled = (chosen(blocks, wing, stop, boundary) for boundary in ("drop", "fill"))
            for block in range(blocks):
                assert dropped[block] == by_rule(block, blocks, wing, stop)
                assert set(dropped[block]) <= set(filled[block])
                covered = [j for start, level in filled[block] for j in range(start, start + 2**level)]
                assert covered == list(range(blocks))
                bound = 1 + 2 * wing * math.ceil(math.log2(max(blocks, wing) / wing) + 1)
                assert stop < 20 or len(dropped[block]) <= bound
                mirrored = sorted((blocks - start - 2**level, level) for start, level in dropped[block])
                assert tuple(mirrored) == dropped[blocks - 1 - block]


@pytest.mark.parametrize(
    ("blocks", "wing", "stop", "unseen"),
    [(8, 1, 20, 0.22), (128, 1, 20, 0.33), (64, 2, 20, 0.15), (128, 3, 20, 0.12), (128, 1, 3, 0.02)],
)
def test_coverage_is_the_sheets(blocks, wing, stop, unseen):
    seen = sum(2**level for row in chosen(blocks, wing, stop, "drop") for _, level in row) / blocks**2
    assert round(1 - seen, 2) == unseen


@pytest.mark.parametrize("pool", ["count", "pairwise"])
def test_a_node_is_the_mean_of_its_tokens(pool):
    length, block_len, blocks = 4, 4, 9
    value = numbers(2, blocks * block_len, 3, 5)
    real = torch.ones(2, blocks * block_len, dtype=torch.bool)
    tree = grow(value, 2 * value, real, block_len, 20, pool)
    assert len(tree.offsets) == levels_of(blocks, 20) == 4
    for level, offset in enumerate(tree.offsets):
        for j in range(blocks - 2**level + 1):
            tokens = value[:, j * length : (j + 2**level) * length].unflatten(1, (block_len, 2**level)).mean(2)
            torch.testing.assert_close(tree.key[:, offset + j], tokens)
            torch.testing.assert_close(tree.value[:, offset + j], 2 * tokens)
    assert tree.key.shape[1] == sum(blocks - 2**p + 1 for p in range(4))


# ------------------------------------------------------------------ attention


def one_by_one(query, key, value, real, bias, block_len, wing, stop, boundary, preserve_mass):
    """Sections 3.1–3.3 for one row: every query over vectors averaged from real tokens by their definition."""
    length, heads, _ = query.shape
    blocks = -(-length // block_len)
    lists = chosen(blocks, wing, stop, boundary)
    out = torch.zeros_like(query)
    farthest = bias.shape[1] // 2
    for t in range(length):
        keys, values, places, counts = [], [], [], []
        own = lists[t // block_len].index((t // block_len, 0))
        for slot, (start, level) in enumerate(lists[t // block_len]):
            for r in range(block_len):
                begin = start * block_len + r * 2**level
                members = [m for m in range(begin, begin + 2**level) if m < length and real[m]]
                if members:
                    keys.append(key[members].mean(0))
                    values.append(value[members].mean(0))
                    places.append((slot - own) * block_len + r - t % block_len)
                    counts.append(len(members))
        for head in range(heads):
            rows = torch.tensor(places).clamp(-farthest, farthest) + farthest
            scores = torch.stack(keys)[:, head] @ query[t, head] + bias[head, rows]
            if preserve_mass:
                scores = scores + torch.tensor(counts, dtype=scores.dtype).log()
            out[t, head] = scores.softmax(0) @ torch.stack(values)[:, head]
    return out


@pytest.mark.parametrize("wing", [1, 2])
@pytest.mark.parametrize(("boundary", "preserve_mass"), [("drop", False), ("fill", True)])
def test_attention_is_the_sheets(wing, boundary, preserve_mass):
    query, key, value = (numbers(1, 27, 2, 3, seed=seed) for seed in range(3))
    bias = numbers(2, 2 * 6 + 1, seed=3)
    real = torch.ones(1, 27, dtype=torch.bool)
    real[0, [5, 6]] = False
    out = fovea_attention(
        query, key, value, real, bias, block_len=4, wing_size=wing, boundary=boundary, preserve_mass=preserve_mass
    )
    wanted = one_by_one(query[0], key[0], value[0], real[0], bias, 4, wing, 20, boundary, preserve_mass)
    assert_close(out[0], wanted, 1e-12)


def test_constant_values_stay_and_mass_is_full_attentions():
    """Keys alike within groups: with `preserve_mass` and no bias a pooled key weighs as its copies do."""
    groups = numbers(1, 16, 1, 3)
    key, value = (x.repeat_interleave(8, dim=1) for x in (groups, numbers(1, 16, 1, 3, seed=1)))
    query, bias = numbers(1, 128, 1, 3, seed=2), torch.zeros(1, 3, dtype=torch.float64)
    full = ((query[:, :, 0] @ key[:, :, 0].mT).softmax(-1) @ value[:, :, 0])[:, :, None]
    out = {
        mass: fovea_attention(query, key, value, None, bias, block_len=8, boundary="fill", preserve_mass=mass)
        for mass in (True, False)
    }
    assert_close(out[True], full, 1e-12)
    assert (out[False] - full).abs().max() > 1e-2
    constant = torch.full_like(value, 1.5)
    assert_close(fovea_attention(query, key, constant, None, bias, block_len=8), constant, 1e-12)


def test_reversed_text_with_a_symmetric_bias_gives_reversed_output():
    query, key, value = (numbers(1, 28, 2, 3, seed=seed) for seed in range(3))
    bias = numbers(2, 13, seed=3)
    bias = bias + bias.flip(1)
    there = fovea_attention(query, key, value, None, bias, block_len=4)
    back = fovea_attention(query.flip(1), key.flip(1), value.flip(1), None, bias, block_len=4)
    assert_close(back.flip(1), there, 1e-12)


def test_the_bias_has_its_exact_gradient():
    query, key, value = (numbers(1, 14, 2, 2, seed=seed) for seed in range(3))
    bias = numbers(2, 7, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda b: fovea_attention(query, key, value, None, b, block_len=2), bias)


def test_half_precision():
    query, key, value = (numbers(1, 30, 2, 8, seed=seed) for seed in range(3))
    bias = numbers(2, 13, seed=3)
    wide = fovea_attention(query, key, value, None, bias, block_len=4)
    half = fovea_attention(*(x.bfloat16() for x in (query, key, value)), None, bias.bfloat16(), block_len=4)
    assert half.dtype == torch.bfloat16
    assert_close(half.double(), wide, 3e-2)


# ------------------------------------------------------------------ the model


def t5_with_the_weights_of(kind):
    _, stock = stock_longt5(kind)
    fields = {
        key: value
        for key, value in stock.config.to_dict().items()
        if key in ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "relative_attention_num_buckets",
                   "relative_attention_max_distance", "layer_norm_epsilon", "feed_forward_proj")
    }  # fmt: skip
    t5 = T5EncoderModel(T5Config(**fields, dropout_rate=0.0)).eval()
    names = ("TransientGlobalSelfAttention", "LocalSelfAttention")
    state = {}
    for name, value in stock.state_dict().items():
        if name.startswith(("encoder.", "shared.")) and "global_" not in name:
            for own in names:
                name = name.replace(own, "SelfAttention")
            state[name] = value
    t5.load_state_dict(state)
    return t5


@pytest.mark.parametrize(("kind", "options", "length"), [
    ("transient-global", {"stop_level": 1}, 27), ("local", {"stop_level": 1}, 27),
    ("transient-global", {"wing_size": 3}, 16), ("transient-global", {}, 8),
])  # fmt: skip
def test_it_is_t5s_full_attention_where_level_0_covers_all(kind, options, length):
    ours, t5 = model(kind, **options), t5_with_the_weights_of(kind)
    given = batch(length, length - 3)
    mask = given["attention_mask"]
    gradients = []
    for encoder in (ours.encoder, t5.encoder):
        out = encoder(input_ids=given["input_ids"], attention_mask=mask).last_hidden_state[mask.bool()]
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        weights = dict(encoder.named_parameters())
        found = {n.split("SelfAttention.")[-1]: p.grad for n, p in weights.items() if "block.0.layer.0" in n}
        gradients.append((out, found))
    (out, found), (wanted, expected) = gradients
    assert_close(out, wanted)
    assert "relative_attention_bias.weight" in found
    for name, gradient in expected.items():
        key = next(k for k in found if k.split("layer_norm")[-1] == name.split("layer_norm")[-1])
        assert_close(found[key], gradient, 1e-4)


def test_for_more_blocks_it_is_not():
    ours, t5 = model(), t5_with_the_weights_of("transient-global")
    ids = batch(40)["input_ids"]
    assert (ours.encoder(ids).last_hidden_state - t5.encoder(ids).last_hidden_state).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_full_is_the_stock_model_and_saves_as_it(kind, tmp_path):
    folder, stock = stock_longt5(kind)
    ours = FathomLongT5ForConditionalGeneration.from_pretrained(folder).eval()
    given = batch(37, 20)
    assert torch.equal(ours(**given).logits, stock(**given).logits)
    ours.save_stock_pretrained(tmp_path)
    again = LongT5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert again.config.model_type == "longt5" and torch.equal(again(**given).logits, stock(**given).logits)


def test_a_new_model_may_begin_with_small_embeddings():
    fields = {key: value for key, value in stock_longt5()[1].config.to_dict().items() if key != "model_type"}
    for given, wanted in ((None, 1.0), (0.1, 0.1)):
        new = FathomLongT5ForConditionalGeneration(FathomLongT5Config(**fields, encoder="fovea", embedding_std=given))
        assert new.shared.weight.std().item() == pytest.approx(wanted, rel=0.1)


def test_parameters_are_longt5s_without_the_global_ones():
    for kind, more in (("transient-global", 8 * 3 + 2 * 24), ("local", 0)):
        counts = [sum(p.numel() for p in m.parameters()) for m in (stock_longt5(kind)[1], model(kind))]
        assert counts[0] - counts[1] == more


@pytest.mark.parametrize("options", [{}, {"boundary": "fill", "wing_size": 2, "preserve_mass": True}])
def test_a_row_in_a_padded_batch_is_the_row_alone(options):
    ours = model(**options)
    lengths = (37, 21, 6)
    together = batch(*lengths)
    out = ours(**together).logits
    for row, length in enumerate(lengths):
        alone = {name: together[name][row : row + 1] for name in ("input_ids", "labels")}
        alone["input_ids"] = alone["input_ids"][:, :length]
        assert_close(out[row], ours(**alone).logits[0])


def test_the_official_pooling_lets_padding_in():
    ours = model(pool="pairwise")
    together = batch(37, 25)
    alone = {"input_ids": together["input_ids"][1:, :25], "labels": together["labels"][1:]}
    out = ours(**together).logits[1]
    assert out.isfinite().all() and (out - ours(**alone).logits[0]).abs().max() > 1e-4


def test_generation_with_a_cache_is_generation_without_and_the_auto_class_loads_it(tmp_path):
    ours = model()
    given = batch(37, 20)
    given.pop("labels")
    said = [ours.generate(**given, max_new_tokens=6, num_beams=2, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*said)
    ours.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert type(again) is FathomLongT5ForConditionalGeneration and again.config.encoder == ours.config.encoder
    assert torch.equal(again.generate(**given, max_new_tokens=6, num_beams=2), said[0])


def test_recomputed_layers_have_the_same_gradients():
    found = []
    for checkpointing in (False, True):
        ours = model().train()
        if checkpointing:
            ours.gradient_checkpointing_enable()
        ours(**batch(37, 20)).loss.backward()
        found.append({name: parameter.grad for name, parameter in ours.encoder.named_parameters()})
    assert any("relative_attention_bias" in name for name in found[0])
    for name, gradient in found[0].items():
        assert gradient.abs().sum() > 0
        torch.testing.assert_close(found[1][name], gradient)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_len": 7}, "block_len=7: must be even"),
        ({"wing_size": 0}, "wing_size=0: must be an integer of at least 1"),
        ({"stop_level": 0}, "stop_level=0: must be an integer of at least 1"),
        ({"boundary": "mirror"}, "boundary='mirror'"),
        ({"pool": "max"}, "pool='max'"),
        ({"steps": "three"}, "steps='three'"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        FathomLongT5Config(encoder={"name": "fovea", **options})
    with pytest.raises(ValueError, match="encoder='fourier' runs on decoder or bart, and this is longt5"):
        FathomLongT5Config(encoder="fourier")
    with pytest.raises(ValueError, match="relative_attention_max_distance=16: must exceed half of"):
        FathomLongT5Config(relative_attention_max_distance=16)
    with pytest.raises(ValueError, match="output_attentions=True with encoder='fovea'"):
        model()(**batch(9), output_attentions=True)

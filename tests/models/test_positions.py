"""The baselines of the `positions` section against their equations, and rotary models that a recipe extends."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DynamicCache

from fathom import FathomConfig, FathomForCausalLM
from fathom.caches import TOVA, compress
from fathom.cost import kv_bytes_per_token
from fathom.models.configuration import FAMILIES
from fathom.models.registry import REGISTRIES
from fathom.positions.alibi import slopes
from fathom.positions.fope import FoPE
from tiny import SIZES, assert_close, tiny_model, tokens

# ---------------------------------------------------------------- ALiBi


def test_slopes_are_those_of_the_release():
    """Two tables by hand: a power of two, and twelve heads, eight and then every other one of sixteen's."""
    assert slopes(8, torch.float64, torch.device("cpu")).tolist() == [2.0**-n for n in range(1, 9)]
    twelve = [2.0**-n for n in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert slopes(12, torch.float64, torch.device("cpu")).tolist() == pytest.approx(twelve, rel=1e-15)


def biased(attention, x, positions):
    """softmax(q kᵀ/√D − s_h (n − m)) v W_o, causal."""
    heads, groups, width = 4, 2, attention.head_dim
    q = attention.q_proj(x).view(*x.shape[:2], heads, width).transpose(1, 2)
    k, v = (
        projection(x).view(*x.shape[:2], groups, width).transpose(1, 2).repeat_interleave(2, 1)
        for projection in (attention.k_proj, attention.v_proj)
    )
    slope = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=x.dtype)[:, None, None]
    scores = q @ k.transpose(-1, -2) / math.sqrt(width) - slope * (positions[:, None] - positions)
    scores = scores.masked_fill(torch.ones(len(positions), len(positions)).triu(1).bool(), float("-inf"))
    return attention.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("dtype", "shift", "tolerance"),
    # of scores near 1.6 million, single precision leaves a part in ten of the largest slope's unit
    [(torch.float64, 0, 1e-12), (torch.float64, 100_000, 1e-9), (torch.float32, 0, 1e-5), (torch.float32, 5000, 2e-3)],
)
@torch.no_grad()
def test_alibi_adds_its_bias_to_every_score(dtype, shift, tolerance):
    model = tiny_model(positions="alibi").to(dtype)
    attention, x = model.model.layers[0].self_attn, torch.randn(2, 7, 32, dtype=dtype)
    positions = torch.tensor([0, 1, 2, 5, 6, 300, 301]) + shift
    for backend in ("sdpa", "eager"):
        model.set_attn_implementation(backend)
        mask = torch.full((7, 7), torch.finfo(dtype).min, dtype=dtype).triu(1).expand(2, 1, 7, 7)
        tables = model.model.positions.tables(x, positions[None])
        actual = attention(hidden_states=x, position_embeddings=tables, attention_mask=mask)[0]
        assert_close(actual, biased(attention, x, positions.to(dtype)), tolerance)


@torch.no_grad()
def test_alibi_in_sixteen_bits_reads_distances_far_out():
    """Scores of bf16 keys and queries, added up in fp32 as kernels do, at positions past 65,536."""
    model = tiny_model(positions="alibi", head_dim=64)
    positions = torch.tensor([[70_000, 70_001, 70_255, 70_256, 131_072]])
    query, key = model.model.positions.tables(torch.zeros(1, dtype=torch.bfloat16), positions)
    scores = torch.einsum("bqhc,bkc->bhqk", query.float(), key[:, :, 0].float()) / 8
    distance = (positions[0][:, None] - positions[0]).float()
    slope = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None, None]
    torch.testing.assert_close(scores[0], -slope * distance, rtol=1e-4, atol=0.02)


@pytest.mark.parametrize("positions", ["alibi", "fope"])
@pytest.mark.parametrize("depth", [name for name in REGISTRIES["depth"] if name != "vanilla"])
@torch.no_grad()
def test_every_depth_method_decodes_what_it_scores(positions, depth):
    model, ids = tiny_model(positions=positions, depth={"name": depth}), tokens(2, 6)
    cache = DynamicCache()
    pieces = [model(ids[:, n : n + 1], past_key_values=cache).logits for n in range(6)]
    assert_close(torch.cat(pieces, dim=1), model(ids, use_cache=False).logits)


@pytest.mark.parametrize("positions", [name for name in REGISTRIES["positions"] if name != "rotary"])
@torch.no_grad()
def test_every_mixer_and_topology_decodes_what_it_scores(positions):
    for section, plain in (("mixer", "none"), ("residual", "standard")):
        for name in REGISTRIES[section]:
            if name == plain:
                continue
            model, ids = tiny_model(positions=positions, **{section: {"name": name}}), tokens(2, 6)
            cache = DynamicCache()
            pieces = [model(chunk, past_key_values=cache).logits for chunk in ids.split((3, 1, 2), dim=1)]
            assert_close(torch.cat(pieces, dim=1), model(ids, use_cache=False).logits)
            mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
            padded = model(ids, attention_mask=mask, use_cache=False).logits
            assert_close(padded[0, 2:], model(ids[:1, 2:], use_cache=False).logits[0])


@torch.no_grad()
def test_alibi_keys_have_their_positions_in_the_cache():
    model, ids = tiny_model(positions="alibi"), tokens(1, 6)
    cache = model(ids).past_key_values
    held = sum(x.numel() * x.itemsize for layer in cache.layers for x in (layer.keys, layer.values))
    assert held == 6 * kv_bytes_per_token(model.config, torch.float32)
    with pytest.raises(ValueError, match=r"positions='alibi'.*use the full cache"), compress(model, TOVA(budget=8)):
        pass


# ---------------------------------------------------------------- FoPE


@pytest.mark.parametrize("zeroed", ["drop", "fill"])
@torch.no_grad()
def test_fope_turns_by_its_series(zeroed, tmp_path):
    """One head's queries and keys by the equation, number by number; and the matrices come back from a checkpoint."""
    model = tiny_model(positions={"name": "fope", "zeroed": zeroed}, head_dim=16).double()
    method, positions = model.model.positions, torch.tensor([[3, 11]])
    frequencies = [1e4 ** (-2 * n / 16) for n in range(8)]
    kept = [w for w in frequencies if w * 64 >= 2 * math.pi]  # a period within the 64 positions of training
    assert method.cosines.shape == (2, len(kept), len(kept)) and 0 < len(kept) < 8
    assert 0.05 < (method.cosines - torch.eye(len(kept))).std() < 0.6  # near the identity, and drawn
    query = torch.randn(1, 4, 2, 16, dtype=torch.float64)
    (turned,) = FoPE.rotate(method.options, method.tables(query, positions), torch.float64, query)
    for head in range(4):
        for at, position in enumerate((3, 11)):
            for pair in range(8):
                cos, sin = 1.0, float(zeroed == "fill")
                if pair < len(kept):
                    c, s = method.cosines[head // 2, :, pair].tolist(), method.sines[head // 2, :, pair].tolist()
                    cos = sum(a * math.cos(position * w) for a, w in zip(c, kept, strict=True))
                    sin = sum(a * math.sin(position * w) for a, w in zip(s, kept, strict=True))
                a, b = query[0, head, at, pair].item(), query[0, head, at, pair + 8].item()
                assert turned[0, head, at, pair].item() == pytest.approx(a * cos - b * sin, rel=1e-12, abs=1e-12)
                assert turned[0, head, at, pair + 8].item() == pytest.approx(b * cos + a * sin, rel=1e-12, abs=1e-12)
    model.save_pretrained(tmp_path)
    again = FathomForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(again.model.positions.sines, method.sines)
    assert_close(again(tokens(1, 5)).logits, model(tokens(1, 5)).logits, 1e-14)


def test_fope_is_refused_where_it_means_nothing():
    with pytest.raises(ValueError, match=r"no frequency completes a period in train_length=4 positions"):
        FathomConfig(**SIZES, positions={"name": "fope", "train_length": 4})
    with pytest.raises(ValueError, match=r"rope_type='dynamic' changes its frequencies"):
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        FathomConfig(**SIZES, rope_parameters=rope, positions="fope")
    with pytest.raises(ValueError, match=r"stores unrotated keys.*has no rotary positions"):
        model = tiny_model(positions="fope")
        with compress(model, TOVA(budget=8, positions="slot")):
            pass


# ---------------------------------------------------------------- YaRN, the authors' way


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_yarn_by_turns_is_linear_in_turns(dtype):
    rope = {"rope_type": "yarn_by_turns", "factor": 32.0, "rope_theta": 1e4, "original_max_position_embeddings": 4096}
    sizes = {**SIZES, "head_dim": 128, "max_position_embeddings": 32768}
    model = FathomForCausalLM(FathomConfig(**sizes, rope_parameters=rope)).to(dtype)
    expected, blended = [], 0
    for pair in range(64):
        frequency = 1e4 ** (-2 * pair / 128)
        share = min(max((4096 * frequency / (2 * math.pi) - 1) / 31, 0.0), 1.0)
        blended += 0 < share < 1
        expected.append((1 - share) * frequency / 32 + share * frequency)
    assert blended > 5
    rotary = model.model.positions
    torch.testing.assert_close(
        rotary.inv_freq, torch.tensor(expected, dtype=dtype), rtol=1e-14 if dtype == torch.float64 else 2e-6, atol=0
    )
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(32) + 1)
    theirs = FathomForCausalLM(FathomConfig(**sizes, rope_parameters={**rope, "rope_type": "yarn"})).model.positions
    assert (theirs.inv_freq.to(dtype) / rotary.inv_freq - 1).abs().max() > 0.1


def test_yarn_by_turns_refuses_a_factor_below_one():
    with pytest.raises(ValueError, match=r"'yarn_by_turns'.*needs a factor of at least 1, and beta_fast above"):
        FathomConfig(**SIZES, rope_parameters={"rope_type": "yarn_by_turns", "factor": 0.5, "rope_theta": 1e4})


# ---------------------------------------------------------------- longer texts on a checkpoint


def test_a_recipe_extends_a_checkpoint(tmp_path):
    from fathom.train.recipe import load_recipe, model_config

    tiny_model().save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""
name: extended
model: {{checkpoint: {tmp_path / "model"}, max_position_embeddings: 512}}
methods:
  - {{name: rotary, rope_parameters: {{rope_type: default, rope_theta: 5.0e+5}}}}
  - {{name: rope_pp, rope_parameters: {{rope_type: linear, factor: 8.0, rope_theta: 10000.0}}}}
data: {{train: embedded, validation: embedded}}
training: {{tokens: 1024, sequences: 1}}
"""
    )
    loaded = load_recipe(recipe)
    rotary, rope_pp = (model_config(loaded, method) for method in loaded.methods)
    assert rotary.rope_parameters["rope_theta"] == 5e5 and rope_pp.rope_parameters["factor"] == 8.0
    assert rope_pp.heads_seen == 2 * rotary.heads_seen and rotary.max_position_embeddings == 512
    model = FathomForCausalLM.from_pretrained(tmp_path / "model", config=rope_pp)
    assert model.model.layers[0].self_attn.o_proj.weight.shape == (32, 64)


@pytest.mark.parametrize("form", ["stock", "fathom"])
def test_checkpoints_of_every_family_take_every_method_or_say_why_not(form, tmp_path):
    """Learned vectors are not lost, and other methods keep all tensors; vectors that a user asks for are new."""
    for family in FAMILIES:
        model = tiny_model(family, init="hf", embed_scale=1.0, num_hidden_layers=1)
        folder, own = tmp_path / family, FAMILIES[family]["positions"]
        (model.save_stock_pretrained if form == "stock" else model.save_pretrained)(folder)
        for name in REGISTRIES["positions"]:
            if name == own or own != "learned":
                loaded = FathomForCausalLM.from_pretrained(folder, positions=name)
                assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)
                assert loaded.config.positions["name"] == name
                same = name == own or name == "rope_pp"
                assert same == torch.allclose(loaded(tokens(1, 9)).logits, model(tokens(1, 9)).logits, atol=1e-5)
            else:
                with pytest.raises(ValueError, match=rf"positions='{name}'.*(lost|has learned)"):
                    FathomForCausalLM.from_pretrained(folder, positions=name)


@pytest.mark.parametrize("fields", [{"positions": "alibi"}, {"backbone": "gpt2"}])
def test_stretched_frequencies_are_refused_where_nothing_turns(fields):
    rope = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match=r"rope_parameters=.*'linear'.*nothing turns by its frequencies; leave it out"):
        FathomConfig(**SIZES, **fields, rope_parameters=rope)

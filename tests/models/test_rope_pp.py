"""RoPE++ against its equations: complex sums, function classes, counts, the cache, checkpoints."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from stock import random_stock, stock_model
from transformers import DynamicCache, GPT2Config, LlamaConfig, StaticCache

from fathom import FathomConfig, FathomForCausalLM
from fathom.cost import forward_flops_per_token, kv_bytes_per_token, parameter_counts
from fathom.models.registry import REGISTRIES
from fathom.ops.rotary import quarter_turn, rotate
from fathom.positions.rope_pp import RopePP, equal_heads
from fathom.train.recipe import load_recipe, model_config
from tiny import SIZES, assert_close, tiny_model, tokens

THETA, WIDTH = 1e4, 16
FREQUENCIES = THETA ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
POSITIONS = torch.tensor([0, 1, 2, 7, 300])


def tables(positions, dtype=torch.float64):
    angles = positions[:, None].double() * FREQUENCIES
    angles = torch.cat((angles, angles), dim=-1)[None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def states(heads, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, len(POSITIONS), WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def half_turned(x):
    return torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), dim=-1)


def in_planes(x):
    return torch.complex(x[..., : WIDTH // 2], x[..., WIDTH // 2 :])


def complex_scores(query, key, positions):
    """Σ_n q_n conj(k_n) e^{iω_n(t−s)}, for every pair of tokens."""
    turn = torch.polar(torch.ones((), dtype=torch.float64), positions[:, None].double() * FREQUENCIES)
    q, k = in_planes(query) * turn, in_planes(key) * turn
    return torch.einsum("bhtn,bhsn->bhts", q, k.conj())


def expanded(query, mode="imag", width=WIDTH, passthrough="keep"):
    options = RopePP.Options(mode=mode, imag_passthrough=passthrough)
    return RopePP.expand(options, (torch.zeros(1, len(POSITIONS), width),), query, query)[0]


# ---------------------------------------------------------------- 1, 2, 3, 6, 11: the equations


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_the_forms_of_the_imaginary_query_agree(dtype, tolerance):
    query, (cos, sin) = states(3, dtype), tables(POSITIONS, dtype)
    ours = expanded(rotate(query, cos, sin))[:, 1::2]
    assert_close(ours, -half_turned(rotate(query, cos, sin)), tolerance)
    assert_close(ours, rotate(-half_turned(query), cos, sin), tolerance)
    assert_close(ours, query * sin[:, None] - half_turned(query) * cos[:, None], tolerance)


def test_scores_are_the_real_and_the_imaginary_part_of_the_complex_sum():
    query, key, (cos, sin) = states(2), states(2, seed=1), tables(POSITIONS)
    turned = expanded(rotate(query, cos, sin))
    expected = complex_scores(query, key, POSITIONS)
    scores = turned.unflatten(1, (2, 2)) @ rotate(key, cos, sin)[:, :, None].transpose(-1, -2)
    assert_close(scores[:, :, 0], expected.real, 1e-12)
    assert_close(scores[:, :, 1], expected.imag, 1e-12)
    one = query[:, :, :1].expand_as(query)  # equal q and k: positive a little behind the token, 0 at it
    alike = complex_scores(one, one, POSITIONS).imag
    assert alike.diagonal(dim1=-2, dim2=-1).abs().max() < 1e-12 and (alike[:, :, 1, 0] > 0).all()


@pytest.mark.parametrize("offset", [13, 100_003])
def test_scores_read_distances_only(offset):
    query, key = states(2, torch.float32), states(2, torch.float32, seed=1)
    scores = []
    for positions in (POSITIONS, POSITIONS + offset):
        cos, sin = tables(positions, torch.float32)
        q, k = expanded(rotate(query, cos, sin)), rotate(key, cos, sin).repeat_interleave(2, 1)
        scores.append(q @ k.transpose(-1, -2))
    assert_close(scores[1], scores[0], 1e-4)


def test_two_quarter_turns_negate_and_four_are_nothing():
    query = states(2)
    twice = quarter_turn(quarter_turn(query, WIDTH), WIDTH)
    assert torch.equal(twice, -query)
    assert torch.equal(quarter_turn(quarter_turn(twice, WIDTH), WIDTH), query)


def test_partial_rotary_turns_its_channels_alone():
    query, width = states(2), 4
    for passthrough, rest in (("keep", query[..., width:]), ("zero", torch.zeros_like(query[..., width:]))):
        imaginary = expanded(query, width=width, passthrough=passthrough)[:, 1::2]
        expected = torch.stack((query[..., 2], query[..., 3], -query[..., 0], -query[..., 1]), dim=-1)
        assert torch.equal(imaginary, torch.cat((expected, rest), dim=-1))


def sine_integral(x, steps=200_000):
    """Si(x) by the trapezium rule."""
    points = torch.linspace(0, x, steps, dtype=torch.float64)
    return torch.trapezoid(torch.sinc(points / math.pi), points).item()


def test_the_characteristic_curve_is_the_sine_integral():
    """c_im(Δ) = (2/d) Σ sin(ω_n Δ), the mean score of equal q and k, → (Si(Δ) − Si(Δ/1e4)) / ln 1e4."""
    width = 4096
    frequencies = THETA ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    ones = torch.cat((torch.ones(width // 2), torch.zeros(width // 2))).double()[None, None, None]
    for distance in (0.0, 0.5, 3.0, 40.0, 900.0):
        angles = torch.cat(2 * [distance * frequencies])[None, None]
        query = quarter_turn(rotate(ones, angles.cos(), angles.sin()), width)
        curve = 2 / width * (query * ones).sum().item()
        expected = (sine_integral(distance) - sine_integral(distance / THETA)) / math.log(THETA)
        assert curve == pytest.approx(expected, abs=2e-3)
        assert (curve > 0.01) == (distance > 0)


# ---------------------------------------------------------------- 4: warm start


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "llama-biases-tied-odd-heads"])
@torch.no_grad()
def test_equal_cache_from_a_stock_checkpoint_keeps_its_logits(name, tmp_path):
    stock, ids = stock_model(name), tokens(2, 9)
    stock.save_pretrained(tmp_path)
    ours = FathomForCausalLM.from_pretrained(tmp_path, positions="rope_pp")
    assert_close(ours(ids).logits, stock(ids).logits)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert ours.generate(ids, **options).tolist() == stock.generate(ids, **options).tolist()
    ours.save_pretrained(tmp_path / "again")
    assert torch.equal(FathomForCausalLM.from_pretrained(tmp_path / "again")(ids).logits, ours(ids).logits)


@pytest.mark.parametrize("given", ["fields", "config"])
@torch.no_grad()
def test_equal_cache_from_a_rotary_model_of_ours(given, tmp_path):
    """With another method put on it at once, and another base."""
    model, ids = tiny_model(mixer={"name": "resformer"}), tokens(2, 9)
    model.save_pretrained(tmp_path)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    fields = {"positions": "rope_pp", "rope_parameters": rope, "depth": {"name": "loop", "passes": 2}}
    config = FathomConfig.from_dict(FathomConfig.get_config_dict(tmp_path)[0], **copy.deepcopy(fields))
    ours = FathomForCausalLM.from_pretrained(tmp_path, **({"config": config} if given == "config" else fields))
    fields.pop("positions")
    expected = FathomForCausalLM.from_pretrained(tmp_path, **fields)
    assert ours.config.positions["name"] == "rope_pp" and ours.config.passes == 2
    assert_close(ours(ids).logits, expected(ids).logits)
    assert (ours(ids).logits - model(ids).logits).abs().max() > 1e-3


def test_rope_pp_is_refused_where_positions_are_learned(tmp_path):
    """A family of learned positions has no rotary heads: in a new config, a halved one and a checkpoint's."""
    random_stock(GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4)).save_pretrained(tmp_path)
    gpt2 = FathomConfig(**SIZES, backbone="gpt2")
    for make in (
        lambda: FathomConfig(**SIZES, backbone="gpt2", positions="rope_pp"),
        lambda: FathomConfig.from_dict(gpt2.to_dict(), positions="rope_pp"),
        lambda: equal_heads(gpt2),
        lambda: FathomForCausalLM.from_pretrained(tmp_path, positions="rope_pp"),
    ):
        with pytest.raises(ValueError, match=r"positions='rope_pp'.*backbone='gpt2' has learned.*use a rotary family"):
            make()


# ---------------------------------------------------------------- 5: the controls span what RoPE spans


@pytest.mark.parametrize("mode", ["imagh", "imagx", "imago"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@torch.no_grad()
def test_a_control_is_a_rotary_model_with_other_queries(mode, family):
    """Its imaginary heads are real ones whose rows of W_q (and biases) are turned."""
    control, ids = tiny_model(family, positions={"name": "rope_pp", "mode": mode}), tokens(2, 9)
    plain = tiny_model(family)
    plain.load_state_dict(control.state_dict())
    width = int(plain.config.head_dim * plain.config.partial_rotary_factor)
    imaginary = {"imagh": (2, 3), "imagx": (1, 3), "imago": (0, 1, 2, 3)}[mode]
    for layer in plain.model.layers:
        for parameter in layer.self_attn.q_proj.parameters():
            rows = parameter.view(4, plain.config.head_dim, -1)
            for head in imaginary:
                rows[head] = quarter_turn(rows[head].T, width).T
    assert_close(plain(ids).logits, control(ids).logits)
    plain.load_state_dict(control.state_dict())
    assert (plain(ids).logits - control(ids).logits).abs().max() > 1e-3


# ---------------------------------------------------------------- 7, 10: caches, backends, order of heads


def variant(groups: int, form: str, **fields):
    """Four projected query heads, of a model that had eight under EH."""
    heads = 8 if form == "EH" else 4
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads // groups, "head_dim": 8}
    config = FathomConfig(**{**SIZES, **sizes, "positions": "rope_pp", **fields})
    torch.manual_seed(0)
    return FathomForCausalLM(equal_heads(config) if form == "EH" else config).eval()


@pytest.mark.parametrize("form", ["EC", "EH"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(groups, form):
    model, ids = variant(groups, form), tokens(2, 10)
    expected = model(ids, use_cache=False).logits
    for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=16)):
        pieces = [model(chunk, past_key_values=cache).logits for chunk in ids.split((5, 1, 3, 1), dim=1)]
        assert_close(torch.cat(pieces, dim=1), expected)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    padded = model(ids, attention_mask=mask).logits
    assert_close(padded[0, 3:], model(ids[:1, 3:]).logits[0])


@pytest.mark.parametrize("groups", [1, 2, 4])
@torch.no_grad()
def test_backends_agree_and_pair_heads_with_their_keys(groups):
    """Values that are constant by key/value head show which head reads which."""
    model, ids = variant(groups, "EC", num_hidden_layers=1), tokens(2, 7)
    logits = {}
    for backend in ("sdpa", "eager"):
        model.set_attn_implementation(backend)
        logits[backend] = model(ids, use_cache=False).logits
    assert_close(logits["eager"], logits["sdpa"])
    model.set_attn_implementation("sdpa")
    attention = model.model.layers[0].self_attn
    values = torch.arange(1.0, attention.config.num_key_value_heads + 1)
    attention.v_proj.register_forward_hook(lambda *_: values.repeat_interleave(8).expand(2, 7, -1))
    seen = []
    attention.o_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(ids)
    assert_close(seen[0].view(2, 7, 8, 8)[..., 0], values.repeat_interleave(2 * groups).expand(2, 7, -1), 1e-6)


@pytest.mark.slow  # it compiles its mask
@torch.no_grad()
def test_flex_attention_agrees():
    model, ids = variant(2, "EC", num_hidden_layers=1), tokens(2, 7)
    expected = model(ids, use_cache=False).logits
    model.set_attn_implementation("flex_attention")
    assert_close(model(ids, use_cache=False).logits, expected)


@torch.no_grad()
def test_one_token_sees_itself_in_both_heads():
    model = variant(2, "EC", num_hidden_layers=1)
    seen = []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(tokens(1, 1))
    heads = seen[0].view(8, 8)
    assert torch.equal(heads[::2], heads[1::2])


@pytest.mark.parametrize("depth", [name for name in REGISTRIES["depth"] if name != "vanilla"])
@torch.no_grad()
def test_every_depth_method_decodes_what_it_scores(depth):
    """And with a mixer: it sees the projected heads, keys and values that the rotary model has."""
    config = {"depth": {"name": depth}, "mixer": {"name": "depth_attention", "mix_target": "kv"}}
    model, plain, ids = tiny_model(positions="rope_pp", **config), tiny_model(**config), tokens(2, 6)
    cache = DynamicCache()
    pieces = [model(ids[:, n : n + 1], past_key_values=cache).logits for n in range(6)]
    assert_close(torch.cat(pieces, dim=1), model(ids, use_cache=False).logits)
    state = RopePP.read_stock(plain.state_dict(), plain.config, RopePP.Options())
    model.load_state_dict(state)
    assert_close(model(ids).logits, plain(ids).logits)


# ---------------------------------------------------------------- 8, 9: counts


PAPER = {
    "376M": ((1024, 8, 8, 4, 3584), (375.9, 367.5, 384.3), (16384, 8192)),
    "776M": ((1536, 12, 12, 6, 5376), (776.2, 747.9, 804.6), (36864, 18432)),
    "1.5B": ((2048, 16, 16, 4, 7168), (1397.8, 1347.5, 1464.9), (32768, 16384)),
}


@pytest.mark.parametrize("size", PAPER)
def test_parameters_cache_and_attention_of_the_papers_models(size):
    """The recipes hold these models."""
    recipe = load_recipe(Path(__file__).parents[2] / f"recipes/rope_pp_{size.lower()}.yaml")
    configs = {method.name: model_config(recipe, method) for method in recipe.methods}
    rope, ec, eh = (configs[name] for name in ("rotary", "rope_pp", "rope_pp-EH"))
    for config in (rope, ec, eh):
        config.dtype = torch.bfloat16
    assert eh.to_dict() == equal_heads(rope).to_dict()
    assert ec.to_dict() == FathomConfig.from_dict(rope.to_dict(), positions="rope_pp").to_dict()
    training = recipe.training
    assert training.tokens == 100_000 * training.sequences * recipe.data.block_size == 52_428_800_000
    assert (eh.head_dim, eh.heads_seen, ec.heads_seen) == (128, rope.num_attention_heads, 2 * rope.num_attention_heads)
    _, expected, cache = PAPER[size]
    totals = []
    for config in (rope, eh, ec):
        with torch.device("meta"):
            model = FathomForCausalLM(config)
        totals.append(sum(p.numel() for p in model.parameters()))
        assert totals[-1] == parameter_counts(config).total
    assert [round(total / 1e6, 1) for total in totals] == list(expected)
    hidden, layers, heads, groups, _ = PAPER[size][0]
    assert totals[2] - totals[0] == layers * heads * 128 * hidden
    assert totals[1] - totals[0] == -layers * (heads * 128 * hidden // 2 + groups * 128 * hidden)
    assert [kv_bytes_per_token(config) for config in (rope, ec, eh)] == [cache[0], cache[0], cache[1]]
    attention = [forward_flops_per_token(config, 4096).attention for config in (rope, ec, eh)]
    assert attention[1] == 2 * attention[0] and attention[2] == attention[0]


@pytest.mark.parametrize(("form", "share"), [("EC", 1), ("EH", 0.5)])
@torch.no_grad()
def test_the_cache_has_the_bytes_of_the_closed_form(form, share):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    plain = FathomConfig(**{**SIZES, **heads})
    config = equal_heads(plain) if form == "EH" else FathomConfig.from_dict(plain.to_dict(), positions="rope_pp")
    held = []
    for each in (plain, config):
        cache = FathomForCausalLM(each)(tokens(1, 6), use_cache=True).past_key_values
        held.append(sum(x.numel() * x.itemsize for layer in cache.layers for x in (layer.keys, layer.values)))
        assert held[-1] == 6 * kv_bytes_per_token(each, torch.float32)
    assert held[1] == share * held[0]


# ---------------------------------------------------------------- 12: saving, compiling; errors


@pytest.mark.parametrize("form", ["EC", "EH"])
@torch.no_grad()
def test_saved_models_come_back(form, tmp_path):
    model, ids = variant(2, form, num_hidden_layers=1), tokens(1, 5)
    model.save_pretrained(tmp_path)
    again = FathomForCausalLM.from_pretrained(tmp_path)
    for field in ("head_dim", "num_attention_heads", "num_key_value_heads", "positions"):
        assert getattr(again.config, field) == getattr(model.config, field)
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["EC", "EH"])
@torch.no_grad()
def test_compiled_models_generate(form):
    model, ids = variant(2, form, num_hidden_layers=1), tokens(1, 5)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **options).tolist()
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    assert model.generate(ids, cache_implementation="static", **options).tolist() == expected
    torch._dynamo.reset()


@pytest.mark.parametrize(("field", "counts"), [("num_key_value_heads", (4, 1)), ("num_attention_heads", (3, 3))])
def test_an_odd_number_of_heads_has_no_half(field, counts):
    config = FathomConfig(hidden_size=96, num_attention_heads=counts[0], num_key_value_heads=counts[1])
    with pytest.raises(ValueError, match=rf"{field}={getattr(config, field)}: equal heads project half"):
        equal_heads(config)


def test_other_errors_name_argument_value_and_remedy():
    with pytest.raises(ValueError, match=r"head_dim=9: rotary positions turn 9 of its channels; use an even number"):
        FathomConfig(hidden_size=36, num_attention_heads=4, head_dim=9, positions="rope_pp")
    with pytest.raises(ValueError, match=r"num_attention_heads=3 with mode='imagx'.*even number"):
        FathomConfig(hidden_size=96, num_attention_heads=3, positions={"name": "rope_pp", "mode": "imagx"})


@torch.no_grad()
def test_a_cache_of_other_head_counts_is_refused():
    whole, ids = tiny_model(num_key_value_heads=4), tokens(1, 4)
    cache = whole(ids, use_cache=True).past_key_values
    halved = FathomForCausalLM(equal_heads(whole.config))
    with pytest.raises(ValueError, match=r"holds 4 key/value heads a token, but the model projects 2.*empty"):
        halved(ids, past_key_values=cache)


# ---------------------------------------------------------------- the authors' layout


def official(folder, mode: str):
    """A folder as theirs: the base model's head counts in the config, tensors of the mode's shapes."""
    base = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
    config = FathomConfig(**base)
    config = equal_heads(config) if mode == "imag1" else FathomConfig.from_dict(config.to_dict(), positions="rope_pp")
    torch.manual_seed(0)
    model = FathomForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(config.embed_scale)  # their models scale nothing
    model.config.embed_scale = 1.0
    LlamaConfig(**base, rms_norm_eps=1e-5).save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("mode", ["imag1", "imag2"])
@torch.no_grad()
def test_an_official_checkpoint_is_read_with_its_mode(mode, tmp_path):
    model, ids = official(tmp_path, mode), tokens(2, 8)
    loaded = FathomForCausalLM.from_pretrained(tmp_path, rope_pp_mode=mode)
    assert loaded.config.num_attention_heads == {"imag1": 2, "imag2": 4}[mode]
    assert_close(loaded(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match=r"RoPE\+\+ checkpoint of the authors.*rope_pp_mode='imag1'"):
        FathomForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"rope_pp_mode='imag3': use 'imag1'"):
        FathomForCausalLM.from_pretrained(tmp_path, rope_pp_mode="imag3")
    other = "imag2" if mode == "imag1" else "imag1"
    with pytest.raises(ValueError, match=rf"rope_pp_mode='{other}' means shapes.*try the other mode"):
        FathomForCausalLM.from_pretrained(tmp_path, rope_pp_mode=other)

"""Depth-Attention: the invariants of its specification, against a per-token oracle written from the equations."""

import math
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from fathom import FathomConfig
from fathom.cost import kv_bytes_per_token, mixing_per_token, parameter_counts
from fathom.mixers.depth_attention import DepthAttention
from fathom.ops.depth_mix import depth_mix, depth_weights
from fathom.train.recipe import load_recipe, model_config
from reference import ReferenceDecoder, depth_attention, schedule
from tiny import assert_close, tiny_model, tokens

RECIPES = Path(__file__).parents[2] / "recipes"
LOOP, PONDERING = {"name": "loop", "passes": 3}, {"name": "pondering", "steps": 1}


def mixing_model(family: str = "llama", layers: int = 4, depth=None, **options):
    mixer = {"name": "depth_attention", **options}
    return tiny_model(family, num_hidden_layers=layers, mixer=mixer, depth=depth)


# ---------------------------------------------------------------- the function

FORMS = [
    {},
    {"stride": 1},
    {"stride": 3},
    {"stride": 3, "recent_window": 2},
    {"source_schedule": "relative_stride", "stride": 2},
    {"source_schedule": "first_only"},
    {"source_schedule": "all"},
    {"source_schedule": "explicit", "sources": [[], [], [0, 1], [1]]},
    {"mix_rule": "uniform"},
    {"mix_target": "k"},
    {"mix_target": "kv", "source_schedule": "all"},
    {"score_dtype": "float32"},
]


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_logits_equal_the_equations(options):
    model = mixing_model(**options).double()
    ids = tokens(1, 5)
    with torch.no_grad():
        expected = ReferenceDecoder(model, depth_attention(model)).logits(ids[0].tolist())
        assert_close(model(ids).logits[0], expected, 1e-8)  # fp32 RoPE frequencies


@pytest.mark.parametrize("heads", [1, 2, 4])  # multi-query, grouped and plain heads
@pytest.mark.parametrize("k_norm_position", ["pre_rope", "post_rope"])
def test_qk_norm_and_head_groups_equal_the_equations(k_norm_position, heads):
    mixer = {"name": "depth_attention", "k_norm_position": k_norm_position}
    model = tiny_model("qwen3", num_hidden_layers=3, num_key_value_heads=heads, mixer=mixer).double()
    ids = tokens(1, 5)
    with torch.no_grad():
        expected = ReferenceDecoder(model, depth_attention(model)).logits(ids[0].tolist())
        assert_close(model(ids).logits[0], expected, 1e-8)


@pytest.mark.parametrize("depth", [LOOP, PONDERING], ids=lambda depth: depth["name"])
@pytest.mark.parametrize("loop_sources", ["same_layer+stride", "same_layer", "unrolled_stride"])
@pytest.mark.parametrize("stride", [None, 1])
def test_loops_and_pondering_equal_the_equations(depth, loop_sources, stride):
    model = mixing_model(layers=3, depth=depth, loop_sources=loop_sources, stride=stride).double()
    ids = tokens(1, 4)
    with torch.no_grad():
        reference = ReferenceDecoder(model, depth_attention(model))
        expected = reference.logits(ids[0].tolist())
        cache = DynamicCache()
        parts = [model(part, past_key_values=cache, use_cache=True).logits[0] for part in ids.split((2, 1, 1), dim=1)]
        assert_close(model(ids).logits[0], expected, 1e-8)
        assert_close(torch.cat(parts), expected, 1e-8)
    for index, values in reference.values.items():
        assert_close(cache.layers[index].values[0].transpose(0, 1), torch.stack(values), 1e-8)


def test_one_layer_is_vanilla_bit_by_bit():
    ids = tokens(2, 9)
    vanilla, model = tiny_model(num_hidden_layers=1), mixing_model(layers=1)
    model.load_state_dict(vanilla.state_dict())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, vanilla(ids).logits)


def test_a_vanilla_checkpoint_loads_and_the_cache_has_its_shapes():
    vanilla, model = tiny_model(num_hidden_layers=4), mixing_model(source_schedule="all")
    assert model.state_dict().keys() == vanilla.state_dict().keys()
    model.load_state_dict(vanilla.state_dict(), strict=True)
    with torch.no_grad():
        ours, theirs = (m(tokens(2, 6), use_cache=True).past_key_values for m in (model, vanilla))
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert (a.keys.shape, a.values.shape, a.keys.dtype) == (b.keys.shape, b.values.shape, b.keys.dtype)
        assert torch.equal(ours.layers[0].values, theirs.layers[0].values)  # layer 0 has no sources
    assert (ours.layers[3].values - theirs.layers[3].values).abs().max() > 1e-3


def raw_values(model, ids):
    """v of every layer before the mix, [L][B, G, T, D]: what v_proj gives."""
    values: list = []
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(
            lambda module, inputs, out: values.append(out.unflatten(-1, (-1, model.config.head_dim)).transpose(1, 2))
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    for hook in hooks:
        hook.remove()
    return values, [layer.values for layer in cache.layers]


@pytest.mark.parametrize("options", [{}, {"source_schedule": "all"}, {"mix_rule": "uniform"}], ids=str)
def test_mixed_values_lie_in_the_hull_of_their_ancestors(options):
    model = mixing_model(**options)
    raw, mixed = raw_values(model, tokens(2, 8))
    assert torch.equal(mixed[0], raw[0])
    for layer in range(1, 4):
        ancestors, waiting = {layer}, [layer]
        while waiting:
            for j in schedule(model.model.mixer.options, waiting.pop(), 4) - ancestors:
                ancestors.add(j)
                waiting.append(j)
        candidates = torch.stack([raw[j] for j in ancestors])
        assert (mixed[layer] <= candidates.amax(0) + 1e-6).all()
        assert (mixed[layer] >= candidates.amin(0) - 1e-6).all()
        assert (mixed[layer] - raw[layer]).abs().max() > 1e-3


def test_equal_values_stay_and_an_infinite_own_score_means_no_mixing():
    generator = torch.Generator().manual_seed(0)
    query, key, other, value = (torch.randn(2, 4, 3, 8, generator=generator) for _ in range(4))
    weights = depth_weights(query, [key, other, key])
    assert_close(torch.cat(weights, -1).sum(-1), torch.ones(2, 4, 3))
    assert_close(depth_mix(weights, [value, value, value]), value, 1e-6)
    alone = depth_weights(query, [key, other, 1e6 * query])
    assert torch.equal(depth_mix(alone, [value, -value, key]), key)


def test_shifted_positions_leave_logits_as_they_are():
    ids, positions = tokens(2, 7), torch.arange(7).unsqueeze(0)
    for model in (mixing_model("qwen3"), tiny_model("qwen3")):
        with torch.no_grad():
            assert_close(model(ids, position_ids=positions + 20).logits, model(ids, position_ids=positions).logits)


def test_packed_documents_equal_separate_ones():
    model, ids = mixing_model(source_schedule="all"), tokens(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        together = model(ids, position_ids=positions, use_cache=False).logits
        assert_close(together[:, :4], model(ids[:, :4]).logits)
        assert_close(together[:, 4:], model(ids[:, 4:]).logits)


def test_duplicated_query_heads_leave_weights_as_they_are():
    generator = torch.Generator().manual_seed(0)
    query, *keys = (torch.randn(2, 3, 5, 8, generator=generator) for _ in range(4))
    expected = torch.cat(depth_weights(query, keys), -1)
    for group in (2, 4):
        actual = torch.cat(depth_weights(query.repeat_interleave(group, dim=1), keys), -1)
        assert_close(actual, expected, 1e-6)


def test_the_first_layers_values_reach_the_loss_through_the_last_layers_mix():
    """With every other output projection zero, layer 0's value can act through ṽ of the last layer alone."""
    ids = tokens(1, 6)
    for model, reached in ((mixing_model(), True), (tiny_model(num_hidden_layers=4), False)):
        with torch.no_grad():
            for layer in model.model.layers[:-1]:
                layer.self_attn.o_proj.weight.zero_()
        model(ids, labels=ids).loss.backward()
        gradient = model.model.layers[0].self_attn.v_proj.weight.grad
        assert (gradient.abs().max() > 1e-6) == reached


# ---------------------------------------------------------------- the operation


def stacked_form(query, keys, values):
    mean = query.unflatten(1, (keys[0].shape[1], -1)).mean(2)
    scores = torch.einsum("bhtd,nbhtd->nbht", mean, torch.stack(keys)) / math.sqrt(query.shape[-1])
    return torch.einsum("nbht,nbhtd->bhtd", scores.softmax(0), torch.stack(values))


def streaming_form(query, keys, values):
    """Online softmax: one running maximum, sum and output."""
    mean = query.unflatten(1, (keys[0].shape[1], -1)).mean(2)
    top, total, out = torch.full_like(mean[..., :1], -math.inf), 0.0, 0.0
    for key, value in zip(keys, values):
        score = (mean * key).sum(-1, keepdim=True) / math.sqrt(query.shape[-1])
        new = torch.maximum(top, score)
        shrink, mass = (top - new).exp(), (score - new).exp()
        top, total, out = new, total * shrink + mass, out * shrink + mass * value
    return out / total


def loop_form(query, keys, values):
    return depth_mix(depth_weights(query, keys), values)


def compiled_form(query, keys, values):
    """The softmax that only the compiler sees; the "eager" backend runs its graph as it is."""
    return torch.compile(loop_form, backend="eager", fullgraph=True)(query, keys, values)


def operands(dtype, group=2, count=3):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2 * group, 3, 4)] + [(2, 2, 3, 4)] * (2 * count)
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("ours", [loop_form, compiled_form])
@pytest.mark.parametrize("other", [stacked_form, streaming_form])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("count", [1, 3])
def test_the_forms_are_equal_forward_and_backward(ours, other, group, count):
    inputs = operands(torch.float32, group, count)
    results = []
    for form in (ours, other):
        out = form(inputs[0], inputs[1 : 1 + count], inputs[1 + count :])
        results.append((out, *torch.autograd.grad((out * out.detach().cos()).sum(), inputs)))
    for name, actual, expected in zip(["out", "query", *range(2 * count)], *results):
        if count == 1 and name in ("query", 0):  # a softmax over one candidate has no gradient
            assert actual.abs().max() <= 1e-6
        else:
            assert_close(actual, expected, 2e-6)


@pytest.mark.parametrize("form", [loop_form, compiled_form])
def test_gradients_of_the_operation_equal_finite_differences(form):
    assert torch.autograd.gradcheck(lambda q, *kv: form(q, list(kv[:3]), list(kv[3:])), operands(torch.float64))


# ---------------------------------------------------------------- sources and cost


@pytest.mark.parametrize("layers,stride,count", [(48, 24, 117), (24, 12, 57), (32, 16, 77)])
def test_source_counts_are_the_papers(layers, stride, count):
    options = DepthAttention.Options()
    table = [options.layer_sources(layer, layers) for layer in range(layers)]
    assert sum(len(sources) + 1 for sources in table if sources) == count
    assert table == [DepthAttention.Options(stride=stride).layer_sources(layer, layers) for layer in range(layers)]
    assert table[stride] == (0,) and table[stride + 1] == (0, stride)


def test_first_only_is_a_stride_beyond_the_last_layer():
    first, wide = DepthAttention.Options(source_schedule="first_only"), DepthAttention.Options(stride=7)
    every, one = DepthAttention.Options(source_schedule="all"), DepthAttention.Options(stride=1)
    for layer in range(8):
        assert first.layer_sources(layer, 8) == wide.layer_sources(layer, 8)
        assert every.layer_sources(layer, 8) == one.layer_sources(layer, 8)


def test_cost_at_3b_is_the_papers():
    """2.40e5 FLOPs and 282 KiB per token; no parameters, no state."""
    sizes = {
        "backbone": "qwen3", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 6912,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    }  # fmt: skip
    config, vanilla = FathomConfig(**sizes, mixer={"name": "depth_attention"}), FathomConfig(**sizes)
    cost = mixing_per_token(config, torch.bfloat16)
    assert (cost.flops, cost.bytes) == (239_616, 288_768)
    assert cost.bytes / 1024 == 282
    assert parameter_counts(config) == parameter_counts(vanilla)
    assert kv_bytes_per_token(config) == kv_bytes_per_token(vanilla)


@pytest.mark.parametrize(
    "size,parameters,candidates,key_width",
    [
        ("360m", 960 * (2 * 50304 + 1) + 24 * (960 * (4 * 960 + 3 * 2540 + 2) + 128), 57, 960),
        ("500m", 1152 * (2 * 50304 + 1) + 24 * (1152 * (4 * 1152 + 3 * 3072 + 2) + 128), 57, 1152),
        ("710m", 1280 * (2 * 50304 + 1) + 32 * (1280 * (4 * 1280 + 3 * 3072 + 2) + 128), 77, 1280),
        ("1.5b", 1536 * (2 * 50304 + 1) + 48 * (1536 * (2 * 1536 + 2 * 384 + 3 * 4096 + 2) + 128), 117, 384),
        ("3b", 2048 * (2 * 50304 + 1) + 48 * (2048 * (2 * 2048 + 2 * 512 + 3 * 6912 + 2) + 128), 117, 512),
    ],
)
def test_recipes_of_the_papers_rows_cost_what_their_sizes_say(size, parameters, candidates, key_width):
    recipe = load_recipe(RECIPES / f"depth_attention_{size}.yaml")
    config = model_config(recipe, recipe.method("depth_attention"))
    assert parameter_counts(config).total == parameters
    layers = config.num_hidden_layers
    assert mixing_per_token(config).flops == 4 * key_width * candidates
    assert mixing_per_token(config).bytes == 2 * key_width * (2 * candidates + layers)
    step = recipe.training.sequences * recipe.training.gradient_accumulation * recipe.data.block_size
    assert recipe.training.tokens == 15_625 * 1024 * 2048 == 15_625 * step


def test_the_small_recipe_compares_what_it_says():
    recipe = load_recipe(RECIPES / "depth_attention_small.yaml")
    configs = [model_config(recipe, method) for method in recipe.methods]
    sizes = [parameter_counts(config).non_embedding for config in configs]
    assert min(sizes) > 30e6 and max(sizes) < 60e6 and max(sizes) < 1.04 * min(sizes)
    assert recipe.training.tokens >= 90e6 and recipe.data.block_size == 1024


def test_uniform_weights_of_a_bf16_model_sum_to_one():
    """As the picture shows them: 1/3 rounded to bf16 would sum to 1.002."""
    mixer = tiny_model(num_hidden_layers=4, mixer={"name": "depth_attention", "mix_rule": "uniform"}).model.mixer
    key = torch.randn(1, 2, 3, 8).bfloat16()
    weights = mixer.weights(key, key, ((key,), (key,)))
    assert sum(weights).item() == pytest.approx(1, abs=1e-6)


def test_cost_counts_every_pass_once():
    """ΣM over all passes: with the layer itself in earlier passes as its sources, pass r has r + 1 candidates."""
    mixer = {"name": "depth_attention", "loop_sources": "same_layer"}
    config = FathomConfig(hidden_size=64, num_hidden_layers=5, num_attention_heads=4, depth=LOOP, mixer=mixer)
    assert mixing_per_token(config).flops == 4 * 64 * 5 * (2 + 3)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "options,message",
    [
        ({"stride": 0}, "stride=0"),
        ({"source_schedule": "relative_stride", "stride": 4}, "stride=4 leaves no source"),
        ({"source_schedule": "explicit", "sources": [[], [1], [0], [0]]}, r"sources\[1\] names layer 1"),
        ({"source_schedule": "explicit", "sources": [[], [0], [-1], [0]]}, r"sources\[2\] names layer -1"),
        ({"source_schedule": "explicit", "sources": [[], [0]]}, "sources lists 2 layers, the model has 4"),
        ({"source_schedule": "explicit"}, "sources=None"),
        (
            {"source_schedule": "explicit", "sources": [0, 0, 1, 2]},
            r"option sources=\[0, 0, 1, 2\]: give every layer a list",
        ),
        ({"source_schedule": "explicit", "sources": 5}, "option sources=5: give every layer a list"),
        ({"source_schedule": "explicit", "sources": [[], ["0"]]}, r"option sources=\[\[\], \['0'\]\]: give"),
        ({"source_schedule": "explicit", "sources": [[], [False]]}, r"option sources=\[\[\], \[False\]\]: give"),
        ({"source_schedule": "explicit", "sources": (), "loop_sources": "unrolled_stride"}, "use 'same_layer.stride'"),
        ({"sources": [[], [0], [0], [0]]}, "source_schedule='absolute_stride'"),
        ({"k_norm_position": "post_rope"}, "post_rope.*backbone='llama'"),
        ({"mix_target": "q"}, "mix_target='q'"),
    ],
    ids=str,
)
def test_errors_name_the_option(options, message):
    with pytest.raises(ValueError, match=message):
        FathomConfig(num_hidden_layers=4, mixer={"name": "depth_attention", **options})


def test_latent_attention_and_unequal_layers_are_refused():
    with pytest.raises(ValueError, match="kv_lora_rank"):
        FathomConfig(kv_lora_rank=64, mixer={"name": "depth_attention"})
    with pytest.raises(ValueError, match="per_layer_config"):
        FathomConfig(per_layer_config={"0": {"num_key_value_heads": 1}}, mixer={"name": "depth_attention"})

"""Closed-form FLOPs against torch's counter on the meta device, and an enumeration of every executed operation."""

import math

import pytest
import torch
from cost_cases import config_of, every_family, every_variant, steps_run, tiny_config
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, DynamicCache

from fathom import FathomConfig, FathomForCausalLM
from fathom.cost import FlopTerms, forward_flops_per_token, training_flops_per_token
from fathom.cost.sizes import MixingCost, mixing_per_token
from fathom.ops.eager_attention import eager_attention

BATCH, TOKENS = 2, 16


def on_meta(config):
    config._attn_implementation = "eager"  # fused attention counts as zero on the CPU
    with torch.device("meta"):
        return FathomForCausalLM(config)


def tokens_on_meta():
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long, device="meta")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@every_family
@every_variant
def test_forward_matmuls_equal_torchs_counter(family, sections):
    config = config_of(family, sections)
    model = on_meta(config).train()  # all tokens at once, whatever a method does at inference
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**tokens_on_meta())
    closed_form = forward_flops_per_token(config, TOKENS, causal=False, parallel=True).matmul  # it sees T keys
    assert counter.get_total_flops() == BATCH * TOKENS * closed_form


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")  # the name that every supported version has
@pytest.mark.parametrize(
    "family, checkpointing",
    [
        ("llama", False),  # a gated MLP and grouped heads
        ("gpt_neox", True),  # a parallel residual
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("gpt_neox", False, marks=pytest.mark.slow),
    ],
)
@every_variant
def test_training_matmuls_equal_torchs_counter(family, sections, checkpointing):
    config = config_of(family, sections)
    model = on_meta(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    inputs = tokens_on_meta()
    with FlopCounterMode(display=False) as counter:
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    closed_form = training_flops_per_token(config, TOKENS, gradient_checkpointing=checkpointing, causal=False)
    assert counter.get_total_flops() == BATCH * TOKENS * closed_form


@pytest.mark.parametrize("penalty", [0.0, 0.1])
@pytest.mark.parametrize("halting", ["exit_gate", "router"])
def test_training_counts_the_heads_that_the_penalty_needs(halting, penalty):
    """The exit gate trains on every step's head; a router without a penalty needs to know how right no step is."""
    depth = {"name": "adaptive_latent_cot", "steps": 3, "halting": halting, "threshold": 0.0, "penalty": penalty}
    config = tiny_config("llama", depth=depth)
    inputs = tokens_on_meta()
    model = on_meta(config).train()
    with FlopCounterMode(display=False) as counter:
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert counter.get_total_flops() == BATCH * TOKENS * training_flops_per_token(config, TOKENS, causal=False)


@pytest.mark.parametrize("depth", [{"name": "pause", "pauses": 2}, {"name": "ponderlm2", "sweeps": 2}], ids=str)
def test_a_mixer_works_in_every_slot(depth):
    config = tiny_config("llama", depth=depth, mixer={"name": "depth_attention"})
    inputs = tokens_on_meta()
    with FlopCounterMode(display=False) as counter:
        on_meta(config).train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert counter.get_total_flops() == BATCH * TOKENS * training_flops_per_token(config, TOKENS, causal=False)
    alone = mixing_per_token(tiny_config("llama", mixer={"name": "depth_attention"}))
    slots = 3 if depth["name"] == "pause" else 2
    assert mixing_per_token(config) == MixingCost(slots * alone.flops, slots * alone.bytes)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
@every_family
def test_checkpointed_layers_that_end_in_dropout_recompute_their_last_product(family):
    config = tiny_config(family, residual_dropout=0.1)
    model = on_meta(config).train()
    model.gradient_checkpointing_enable()
    inputs = tokens_on_meta()
    with FlopCounterMode(display=False) as counter:
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    closed_form = training_flops_per_token(config, TOKENS, gradient_checkpointing=True, causal=False)
    assert counter.get_total_flops() == BATCH * TOKENS * closed_form


# --- enumeration ------------------------------------------------------------------------------------------------------

aten = torch.ops.aten


def layer_norm(x, shape, gain, shift, eps):
    """By its definition; torch's own decomposition centres x twice."""
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    return centred * scale * gain + shift, x, x


TAKEN_APART = {
    aten.native_layer_norm.default: layer_norm,
    aten._softmax.default: decomposition_table[aten._softmax.default],
}
ONE_PER_OUTPUT = {
    "add", "sub", "mul", "div", "exp", "rsqrt", "pow", "silu", "gelu", "sigmoid", "log", "cumsum",
}  # fmt: skip
FREE = {
    "amax", "clamp", "maximum", "neg", "where",  # comparisons, sign changes
    "view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "transpose", "t", "slice", "split", "alias", "detach",
    "cat", "clone", "_to_copy", "to", "gather", "stack", "new_full", "select", "split_with_sizes", "flip", "scatter",
    "zeros_like", "ones_like", "roll",
    "constant_pad_nd", "topk", "sort", "index", "histc",  # routing: histc counts tokens
}  # fmt: skip


class OperationCounter(TorchDispatchMode):
    """Counts every executed operation that depends on the tensor `source`; fused ones are taken apart first."""

    def __init__(self, source: torch.Tensor):
        super().__init__()
        self.matmul = self.batched = self.elementwise = self.masked_pairs = 0
        self.dependent = {id(source): source}  # kept alive, so that ids stay unique

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in TAKEN_APART:
            with self:
                return TAKEN_APART[func](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        if any(id(x) in self.dependent for x in inputs):
            outputs = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]
            self.dependent.update((id(x), x) for x in outputs)
            if outputs and outputs[0].is_floating_point():  # integer arithmetic is not counted
                self.count(func.overloadpacket.__name__.removesuffix("_"), inputs, outputs)
        return out

    def count(self, name, inputs, outputs):
        size = outputs[0].numel()
        if name in ("mm", "bmm", "_grouped_mm"):
            self.matmul += 2 * size * inputs[0].shape[-1]
            self.batched += 2 * size * inputs[0].shape[-1] * (name == "bmm")
        elif name == "addmm":
            self.matmul += 2 * size * inputs[1].shape[-1]
            self.elementwise += size
        elif name == "sum":
            self.elementwise += inputs[0].numel()
        elif name == "mean":
            self.elementwise += inputs[0].numel() + size
        elif name == "_embedding_bag":  # Σ_k weight_k · row_k
            self.elementwise += 2 * inputs[1].numel() * outputs[0].shape[-1]
        elif name == "addcmul":
            self.elementwise += 2 * size
        elif name in ONE_PER_OUTPUT:
            self.elementwise += size
        else:
            assert name in FREE, (
                f"{name}: no rule counts it; add it to the tables at the head of this file, by cost/flops.py's rule"
            )


def count_decoding(model, tokens: int) -> OperationCounter:
    """Decode tokens one by one with a cache, so that query t reads t keys and nothing masked is executed."""
    embeddings = torch.randn(1, tokens, model.config.hidden_size)
    steps = [embeddings[:, t : t + 1].clone() for t in range(tokens)]
    cache = DynamicCache()
    with torch.no_grad(), OperationCounter(embeddings) as counter:

        def count_masked(module, arguments, output):  # slots of a token that run together: query i needs keys ≤ i only
            counter.masked_pairs += output.shape[1] * (output.shape[1] - 1) // 2

        hooks = [layer.mlp.register_forward_hook(count_masked) for layer in model.model.layers]
        for step in steps:
            counter.dependent[id(step)] = step
            model(inputs_embeds=step, past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    return counter


@every_family
@every_variant
def test_every_term_equals_the_operations_of_causal_decoding(family, sections):
    """The causal mean (T+1)/2 and the elementwise rule, on what the model really executes."""
    config = config_of(family, sections)
    if config.backbone == "gpt2":
        config.hidden_act = "gelu_pytorch_tanh"  # the same function as gelu_new, in one operation
    AttentionInterface.register("unmasked", eager_attention)  # a name without a mask function: no mask is made
    config._attn_implementation = "unmasked"
    tokens = 3
    model = FathomForCausalLM(config).eval()
    ran = steps_run(model)
    counted = count_decoding(model, tokens)
    terms = forward_flops_per_token(config, tokens, ran=ran())
    scores = config.num_attention_heads * counted.masked_pairs
    if ran() is not None:  # the closed form is a mean over which tokens run: take the scores of those that did
        scores = (counted.batched - tokens * terms.attention) / (4 * config.head_dim)
    assert counted.matmul == pytest.approx(tokens * terms.matmul + 4 * config.head_dim * scores, rel=1e-12)
    assert counted.elementwise == pytest.approx(tokens * terms.elementwise + 5 * scores, rel=1e-12)


def test_causal_mean_by_counting_pairs():
    config = tiny_config("llama")
    for tokens in (1, 2, 7):
        pairs = sum(1 for query in range(tokens) for key in range(tokens) if key <= query)
        per_pair = 2 * config.head_dim * 2 * config.num_attention_heads * config.num_hidden_layers
        assert forward_flops_per_token(config, tokens).attention == per_pair * pairs / tokens


def test_pondering_costs_what_the_paper_says():
    """(s+1)·(2N + attention) + (s+1)·2dV (head) + s·2dV (full mixture)."""
    vanilla = forward_flops_per_token(tiny_config("gpt_neox"), TOKENS)
    pondering = forward_flops_per_token(tiny_config("gpt_neox", depth={"name": "pondering", "steps": 3}), TOKENS)
    assert pondering.linear + pondering.attention == 4 * (vanilla.linear + vanilla.attention)
    assert pondering.head == 4 * 2 * 32 * 97
    assert pondering.method == 3 * 2 * 32 * 97


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "options", [{"gradient_passes": 2}, {"gradient_passes": 5}, {"checkpoint_passes": True}], ids=str
)
@pytest.mark.parametrize(
    "depth",
    [
        {"name": "ponderlm2", "thoughts": 2, "interpolation": True},
        {"name": "ponderlm2"},
        {"name": "ponderlm3", "thoughts": 2},
    ],
    ids=str,
)
def test_forwards_without_a_backward_and_run_again(depth, options, checkpointing):
    if checkpointing and "checkpoint_passes" in options:
        pytest.skip("regions within a region")
    depth = {**depth, **options, "sweeps": 2, "random_sweeps": False}
    mixer = {"name": "depth_attention"} if depth["name"] == "ponderlm3" else {"name": "none"}
    config = tiny_config("llama", depth=depth, mixer=mixer)
    model, inputs = on_meta(config).train(), tokens_on_meta()
    if checkpointing:
        model.gradient_checkpointing_enable()
    with FlopCounterMode(display=False) as counter:
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    closed_form = training_flops_per_token(config, TOKENS, gradient_checkpointing=checkpointing, causal=False)
    assert counter.get_total_flops() == BATCH * TOKENS * closed_form


@pytest.mark.parametrize("name", ["ponderlm2", "ponderlm3"])
@pytest.mark.parametrize("thoughts", [1, 3])
def test_random_sweeps_cost_their_mean(name, thoughts):
    """J of 2 … 4 costs what J = 3 does; (J+1)(K+1) + K(K+1)/2 forwards of T slots."""

    def cost(**options):
        config = tiny_config("llama", depth={"name": name, "thoughts": thoughts, **options})
        return training_flops_per_token(config, TOKENS)

    assert cost(sweeps=4, random_sweeps=True) == cost(sweeps=3, random_sweeps=False)
    assert (
        cost(sweeps=3, random_sweeps=True)
        == (cost(sweeps=2, random_sweeps=False) + cost(sweeps=3, random_sweeps=False)) / 2
    )
    config = tiny_config("llama", depth={"name": name, "thoughts": thoughts, "sweeps": 3})
    linear = forward_flops_per_token(config, TOKENS, parallel=True).linear
    passes = (2.5 + 1) * (thoughts + 1) + thoughts * (thoughts + 1) / 2
    assert linear == passes * forward_flops_per_token(tiny_config("llama"), TOKENS).linear


def test_terms_add_up():
    terms = FlopTerms(linear=1, attention=2, head=4, method=8, elementwise=16)
    assert (terms.matmul, terms.total) == (15, 31)


def test_any_size_costs_nothing():
    """A 405-billion-parameter config: Llama 3.1's 2N, and nothing is allocated."""
    config = FathomConfig(
        vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
        num_key_value_heads=8,
    )  # fmt: skip
    terms = forward_flops_per_token(config, 8192)
    assert math.isclose(terms.linear + terms.head, 2 * 405.85e9, rel_tol=6e-3)  # without the input table


@pytest.mark.parametrize("function", [forward_flops_per_token, training_flops_per_token])
def test_sequence_length_below_one_is_refused(function):
    with pytest.raises(ValueError, match="sequence_length=0: must be at least 1"):
        function(tiny_config("llama"), 0)

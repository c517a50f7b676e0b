"""`moe` against a mixture written from its equations in float64, transformers' own blocks, and closed forms."""

import copy
import math

import pytest
import torch
from transformers import DynamicCache, MixtralConfig, Qwen2MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock, load_balancing_loss_func

from fathom import FathomConfig, FathomForCausalLM
from fathom.cost import forward_flops_per_token, parameter_counts
from fathom.feed_forward.base import TokenFacts
from fathom.feed_forward.moe import Experts, MixtureOfExperts
from fathom.models.registry import REGISTRIES
from tiny import SIZES, assert_close, perturb, tiny_model, tokens

WIDTH, INNER = SIZES["hidden_size"], 16


def mixture(seed: int = 0, **options) -> MixtureOfExperts:
    """One layer, every parameter random."""
    torch.manual_seed(seed)
    config = FathomConfig(**SIZES, feed_forward={"name": "moe", "experts": 6, "active": 2, "width": INNER, **options})
    config._experts_implementation = "grouped_mm"
    layer = FathomForCausalLM(config).model.layers[0].mlp
    perturb(layer, seed)
    return layer.eval()


def states(rows: int = 3, length: int = 5, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def by_hand(layer: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """y of the module's equations, token by token, in float64."""
    options, weights = layer.options, {name: tensor.double() for name, tensor in layer.state_dict().items()}

    def swiglu(gate, up, down, token):
        hidden = gate @ token
        return down @ (hidden / (1 + (-hidden).exp()) * (up @ token))

    rows = []
    for token in x.double().flatten(0, 1):
        z = weights["gate.weight"] @ token
        p = 1 / (1 + (-z).exp()) if options.score == "sigmoid" else z.exp() / z.exp().sum()
        if options.selection == "group":
            size = options.slices
            totals = [(p[d * size : (d + 1) * size].sum().item(), d) for d in range(options.experts // size)]
            best = [d for _, d in sorted(totals, reverse=True)[: options.active // size]]
            chosen = [d * size + j for d in best for j in range(size)]
        else:
            chosen = sorted(range(options.experts), key=lambda e: -p[e].item())[: options.active]
        whole = sum(p[e] for e in chosen) if options.renormalised else 1.0
        y = torch.zeros(WIDTH, dtype=torch.float64)
        for e in chosen:
            gate, up = weights["experts.gate_up_proj"][e].split(INNER)
            y += options.scale * p[e] / whole * swiglu(gate, up, weights["experts.down_proj"][e], token)
        if options.shared != 0:
            a = options.shared_gate
            if a == "sigmoid":
                a = 1 / (1 + (-(weights["shared_expert_gate.weight"][0] @ token)).exp())
            y += a * swiglu(*(weights[f"shared_expert.{part}_proj.weight"] for part in ("gate", "up", "down")), token)
        rows.append(y)
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"active": 6, "norm_topk_prob": False},
        {"shared_gate": "sigmoid", "routed_scaling": "k"},
        {"shared": 0, "score": "sigmoid", "routed_scaling": 2.5},
        {"shared": 8, "score": "sigmoid", "norm_topk_prob": False},
        {"score": "topk_softmax", "norm_topk_prob": False},
        {"slices": 3, "active": 3, "selection": "group", "shared_gate": 0.75, "routed_scaling": "match"},
        {"slices": 2, "active": 4, "selection": "group", "norm_topk_prob": False, "routed_scaling": "G"},
    ],
    ids=str,
)
def test_the_layer_equals_its_equations(options):
    layer, x = mixture(**options), states()
    expected = by_hand(layer, x)
    assert_close(layer(x).double(), expected, 1e-5)
    assert_close(copy.deepcopy(layer).double()(x.double()), expected, 1e-12)


def test_routing_in_two_orders_is_one_function():
    layer, x = mixture(), states()
    z = layer.gate(x.flatten(0, 1))
    _, chosen, gates = layer.route(z)
    best, places = z.topk(2)
    torch.testing.assert_close(gates, best.softmax(-1))
    assert torch.equal(chosen, places)


@pytest.mark.parametrize("renormalised", [True, False])
def test_the_layer_equals_transformers_qwen2_moe(renormalised):
    layer = mixture(shared_gate="sigmoid", norm_topk_prob=renormalised, shared=24)
    config = Qwen2MoeConfig(
        hidden_size=WIDTH, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=INNER,
        shared_expert_intermediate_size=24, norm_topk_prob=renormalised, experts_implementation="eager",
    )  # fmt: skip
    stock = Qwen2MoeSparseMoeBlock(config)
    stock.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert_close(layer(states()), stock(states()), 1e-6)


def test_the_layer_equals_transformers_mixtral():
    layer = mixture(shared=0)
    config = MixtralConfig(
        hidden_size=WIDTH, num_local_experts=6, num_experts_per_tok=2, intermediate_size=INNER,
        experts_implementation="eager",
    )  # fmt: skip
    stock = MixtralSparseMoeBlock(config)
    stock.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert_close(layer(states()), stock(states()), 1e-6)


@pytest.mark.parametrize("network", [{}, {"gated_mlp": False, "mlp_bias": True}], ids=str)
def test_the_ways_to_run_experts_agree(network):
    """Experts one by one are the plain way; what the others make, and the gradients of all that goes in."""
    torch.manual_seed(0)
    experts = Experts(config := FathomConfig(**SIZES, **network), 6, INNER)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, gates = torch.randn(9, WIDTH), torch.rand(9, 3)
    chosen = torch.stack([torch.randperm(5)[:3] for _ in range(9)])  # nobody runs the last
    found = {}
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        config._experts_implementation = implementation
        inputs = x.clone().requires_grad_(), gates.clone().requires_grad_(), *experts.parameters()
        out = experts(inputs[0], chosen, inputs[1])
        found[implementation] = out, *torch.autograd.grad(out.square().sum(), inputs)
    for implementation in ("grouped_mm", "batched_mm"):
        for value, plain in zip(found[implementation], found["eager"], strict=True):
            assert_close(value, plain, 1e-5)


def test_experts_of_odd_width_run_one_by_one_and_say_so():
    with pytest.warns(UserWarning, match="experts of 7 × 32 run one by one"):
        layer = MixtureOfExperts(config := FathomConfig(**SIZES), MixtureOfExperts.Options(width=7))
    config._experts_implementation = "grouped_mm"
    torch.nn.init.normal_(layer.experts.gate_up_proj)
    assert layer.double()(states().double()).shape == (3, 5, WIDTH)


def test_autocast_computes_experts_in_its_dtype_and_the_router_in_fp32():
    layer, x = mixture(), states()
    seen = []
    layer.gate.register_forward_hook(lambda module, inputs, z: seen.append(z))
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        out.square().mean().backward()
    assert torch.equal(seen[0], seen[1]) and seen[1].dtype == torch.float32
    assert_close(out.float(), expected, 0.05)
    assert layer.experts.gate_up_proj.grad.dtype == torch.float32 and layer.gate.weight.grad.any()


@pytest.mark.parametrize("active", [2, 4])
def test_whole_groups_are_chosen_while_their_rows_are_equal(active):
    """k = m·G picks the m best groups, whole, whatever equal rows round to."""
    layer = mixture(slices=2, active=active, selection="group")
    with torch.no_grad():
        layer.gate.weight.copy_(layer.gate.weight[::2].repeat_interleave(2, 0))
    _, chosen, gates = layer.route(layer.gate(states(20, 20).flatten(0, 1)))
    first, second = chosen[:, ::2], chosen[:, 1::2]
    assert torch.equal(first + 1, second) and not (first % 2).any()
    assert_close(gates[:, ::2], gates[:, 1::2], 1e-6)
    if active == 2:
        assert_close(gates, torch.full_like(gates, 0.5), 1e-6)


# ---------------------------------------------------------------- losses and statistics


def said_in_training(layer: MixtureOfExperts, x: torch.Tensor, **facts) -> dict[str, torch.Tensor]:
    return layer.train()(x, TokenFacts(**facts))[1]


def test_losses_equal_their_equations():
    layer, x = mixture(slices=2, balance=0.5, z=0.25, discipline=0.125), states()
    domains = torch.tensor([[0] * 5, [2] * 5, [7] * 5])  # the last is none of the groups
    said = said_in_training(layer, x, domains=domains)
    z = (x.double() @ layer.gate.weight.double().T).flatten(0, 1)
    p = z.softmax(-1)
    chosen = z.topk(2)[1]
    balance = sum((chosen == e).double().sum() / (2 * len(z)) * p[:, e].mean() for e in range(6))
    own = [p[t, 2 * d : 2 * d + 2].sum().log() for t, d in enumerate(domains.flatten().tolist()) if d < 3]
    layers = SIZES["num_hidden_layers"]
    assert_close(said["balance_loss"].double(), 0.5 * 6 * balance / layers, 1e-6)
    assert_close(said["z_loss"].double(), 0.25 * z.logsumexp(-1).square().mean() / layers, 1e-6)
    assert_close(said["discipline_loss"].double(), -0.125 * torch.stack(own).mean() / layers, 1e-6)


def test_a_uniform_router_has_balance_1_where_transformers_has_k():
    layer = mixture(balance=1.0)
    torch.nn.init.zeros_(layer.gate.weight)
    said = said_in_training(layer, states())
    assert said["balance_loss"].item() * SIZES["num_hidden_layers"] == pytest.approx(1.0)
    # f need not be even: every share meets the same mean probability
    assert load_balancing_loss_func((torch.zeros(15, 6),), 6, 2).item() == pytest.approx(2.0)


def test_padding_and_order_of_rows_change_no_loss():
    layer, x = mixture(slices=2, balance=1.0, z=1.0, discipline=1.0), states()
    domains = torch.tensor([[0], [1], [2]]).expand(3, 5)
    alone = said_in_training(layer, x, domains=domains)
    padded = torch.cat((100 * torch.randn(3, 4, WIDTH), x), dim=1)
    real = torch.arange(9).ge(4).expand(3, 9)
    again = said_in_training(layer, padded, real=real, domains=domains[:, :1].expand(3, 9))
    order = torch.tensor([2, 0, 1])
    turned = said_in_training(layer, x[order], domains=domains[order])
    assert {"balance_loss", "z_loss", "discipline_loss", "expert_load", "domain_load"} <= set(alone)
    for name, value in alone.items():
        torch.testing.assert_close(again[name], value, msg=name)
        torch.testing.assert_close(turned[name], value, msg=name)
    nobody = said_in_training(layer, x, real=torch.zeros(3, 5, dtype=torch.bool), domains=domains)
    assert all(value.isfinite().all() for value in nobody.values())


def test_pads_of_a_model_change_no_loss():
    options = {"name": "moe", "experts": 4, "active": 2, "width": 16, "z": 0.1, "balance": 0.1}
    ids = tokens(2, 6)
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), ids), 1)
    mask = (padded > 0).long()
    for depth in ("vanilla", "pause"):
        model = tiny_model(feed_forward=options, depth={"name": depth}).train()
        losses = []
        for batch in ({"input_ids": ids}, {"input_ids": padded, "attention_mask": mask}):
            labels = batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100)
            losses.append(model(**batch, labels=labels, output_auxiliary=True).losses)
        assert_close(losses[1]["z_loss"], losses[0]["z_loss"], 1e-5)
        assert_close(losses[1]["balance_loss"], losses[0]["balance_loss"], 1e-5)


def test_the_discipline_loss_teaches_the_router_whose_token_it_is():
    torch.manual_seed(0)
    layer = mixture(slices=2, active=2, discipline=1.0, balance=0.0).train()
    centres = 2 * torch.randn(3, WIDTH)
    domains = torch.randint(3, (40, 1))
    x = centres[domains] + torch.randn(40, 1, WIDTH)
    optimizer = torch.optim.Adam([layer.gate.weight], 0.05)
    for _ in range(30):
        optimizer.zero_grad()
        layer(x, TokenFacts(None, domains))[1]["discipline_loss"].backward()
        optimizer.step()
    fresh = torch.randint(3, (200,))
    z = layer.gate(centres[fresh] + torch.randn(200, WIDTH))
    group = z.softmax(-1).view(-1, 3, 2).sum(-1).argmax(-1)
    assert (group == fresh).float().mean() > 0.95


def test_statistics_by_closed_forms():
    """Two domains, each with an expert of its own: log 2 nats of information, two experts dead."""
    layer = mixture(experts=4, active=1, balance=0.0).eval()
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[1, 0], layer.gate.weight[3, 0] = 50.0, -50.0
    x = torch.zeros(2, 6, WIDTH)
    x[0, :, 0], x[1, :, 0] = 1.0, -1.0
    out, said = layer(x, TokenFacts(None, torch.tensor([[0], [1]]).expand(2, 6)))
    assert "balance_loss" not in said and out.shape == x.shape
    found = MixtureOfExperts.describe({name: value[None] for name, value in said.items()})
    assert found["expert_load"] == [[0.0, 0.5, 0.0, 0.5]]
    assert found["load_max_over_mean"] == [2.0] and found["dead_experts"] == [2]
    assert found["load_entropy"][0] == pytest.approx(math.log(2))
    assert found["domain_information"][0] == pytest.approx(math.log(2), rel=1e-5)


# ---------------------------------------------------------------- with other methods


MOE = {"name": "moe", "experts": 4, "active": 2, "width": 16}
OTHERS = [
    (registry, name)
    for registry in ("depth", "mixer", "residual", "positions")
    for name in REGISTRIES[registry]
    if name not in ("vanilla", "none", "standard", "rotary")
]


@pytest.mark.parametrize(("registry", "name"), OTHERS)
def test_it_runs_with_every_other_method(registry, name):
    """Cached decoding equals the full forward, and a training step reaches every parameter."""
    section = {"name": name, **REGISTRIES[registry][name].variants[0]}
    model, ids = tiny_model(feed_forward=MOE, **{registry: section}), tokens(2, 7)
    with torch.no_grad():
        cache, expected = DynamicCache(), model(ids, use_cache=False).logits
        pieces = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split((4, 1, 2), 1)]
    assert_close(torch.cat(pieces, 1), expected)
    assert parameter_counts(model.config).total == sum(p.numel() for p in model.parameters())
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.model.layers.parameters())


# ---------------------------------------------------------------- sizes


def innovator_7b() -> FathomConfig:
    return FathomConfig(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, attention_bias=True, attention_output_bias=False,
        feed_forward={"name": "moe", "experts": 64, "active": 8, "slices": 8},
    )  # fmt: skip


def test_innovators_published_sizes():
    counts = parameter_counts(innovator_7b())
    assert (counts.total, counts.active) == (53_247_677_952, 13_325_243_904)
    with torch.device("meta"):
        model = FathomForCausalLM(innovator_7b())
    assert sum(p.numel() for p in model.parameters()) == counts.total


def test_flops_are_those_of_the_networks_that_run():
    """2·(3H(I + k·I_e) + E·H) a layer: twice the dense network's and the router's where k·I_e = I."""
    config = innovator_7b()
    dense = copy.deepcopy(config)
    dense.feed_forward = {"name": "dense"}
    more = forward_flops_per_token(config, 1).linear - forward_flops_per_token(dense, 1).linear
    assert more == 28 * 2 * 3584 * (3 * 18944 + 64)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slices": 3}, "slices=3: must divide experts=8"),
        ({"slices": 4, "active": 2, "selection": "group"}, "active=2: must be a multiple of slices=4"),
        ({"routed_scaling": "match"}, "'match': is 0 with shared_gate=1.0"),
        ({"routed_scaling": "match", "shared": 0, "norm_topk_prob": False}, "'match': needs norm_topk_prob=True"),
        ({"experts": 16, "slices": 16}, "intermediate_size=56 is not divisible by slices=16"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        FathomConfig(**SIZES, feed_forward={"name": "moe", **options})


@pytest.mark.parametrize("anneals", [True, False])
def test_the_discipline_loss_anneals_where_that_is_asked(anneals):
    layer, x = mixture(slices=2, discipline=1.0, discipline_anneals=anneals).train(), states()
    facts = TokenFacts(None, torch.zeros(x.shape[:2], dtype=torch.long))
    whole = layer(x, facts)[1]["discipline_loss"]
    for step, left in ((0, 1.0), (3, 0.25)):
        layer.on_step(step, 4)
        torch.testing.assert_close(layer(x, facts)[1]["discipline_loss"], whole * (left if anneals else 1.0))


def test_the_discipline_loss_needs_domains():
    model, ids = tiny_model(feed_forward={**MOE, "discipline": 0.1}).train(), tokens(2, 5)
    with pytest.raises(ValueError, match=r"discipline=0\.1: the batch does not say the domain"):
        model(ids, labels=ids)
    with pytest.raises(ValueError, match=r"domains of shape \[2, 5\]: give one a row, \[2\]"):
        model(ids, labels=ids, domains=ids)
    assert "discipline_loss" in model(ids, labels=ids, domains=torch.tensor([0, 3]), output_auxiliary=True).losses


@pytest.mark.parametrize(
    ("options", "learns"), [({}, False), ({"discipline": 0.1}, True), ({"norm_topk_prob": False}, True)], ids=str
)
def test_what_teaches_a_tied_router_which_group_to_pick(options, learns):
    """With k = G and gates that sum to 1, every gate is 1/G whichever group it is: the model's loss moves rows of a
    group against each other, not the group."""
    layer = mixture(slices=2, active=2, selection="group", balance=0.0, **options).train()
    with torch.no_grad():
        layer.gate.weight.copy_(layer.gate.weight[::2].repeat_interleave(2, 0))
    out, said = layer(states(), TokenFacts(None, torch.tensor([[0], [1], [2]]).expand(3, 5)))
    (out.square().sum() + said.get("discipline_loss", 0.0)).backward()
    gradient = layer.gate.weight.grad
    of_groups = gradient.view(3, 2, WIDTH).sum(1).abs().max()
    assert gradient.abs().max() > 1e-3
    assert (of_groups > 1e-4) if learns else (of_groups < 1e-5 * gradient.abs().max())

"""A mixture of experts: every token runs a shared expert, and those that a router chooses for it.

    z = W_r x                                  router, in fp32 or wider
    p = softmax(z)                             or sigmoid(z)
    g_e = p_e / Σ_{top k} p                    or p_e
    y = a · F_shared(x) + ρ · Σ_{e in top k} g_e F_e(x)

No token is dropped, whatever the load of an expert. With renormalised gates it makes no difference whether softmax or
top-k comes first: p_e / Σ_{top k} p = softmax of the k largest z. Tensors have the names and layouts of transformers'
Qwen2-MoE; products are torch's grouped ones, or those of transformers' `ExpertsInterface`.

Experts e = d·G + j, j < G, form group d: the slices of one network (Innovator, arXiv 2507.18671; virtual groups, arXiv
2410.07524). In training a layer returns, over the tokens that are not padding:

    balance      E · Σ_e f_e P_e       f_e: share of the token-expert pairs of e, in the batch of all processes;
                                       P_e: mean of p_e. 1 for a uniform router (transformers' function gives k)
    z            mean (log Σ_e exp z_e)²
    discipline   −mean log Σ_j p_{d(t)·G + j}      d(t): domain of the token's row

The losses are means over the layers of a pass, each times its weight.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fathom.feed_forward.base import Counts, FeedForward, NoOptions, TokenFacts
from fathom.feed_forward.dense import Dense
from fathom.models.initialization import fill_matrix
from fathom.models.method import check_choice, check_number, check_range
from fathom.models.registry import register
from fathom.ops.autocast import product_dtype, without_autocast
from fathom.ops.grouped_experts import grouped_experts

ALIGNMENT = 8  # grouped kernels read rows of multiples of 16 bytes


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """The experts' weights, in the products' dtype, as functions of transformers' `ExpertsInterface` read them."""

    num_experts: int
    act_fn: Any
    has_gate: bool
    has_bias: bool
    gate_up_proj: Tensor | None  # gated: [E, 2·width, d], rows of the gate first
    gate_up_proj_bias: Tensor | None
    up_proj: Tensor | None  # not gated: [E, width, d]
    up_proj_bias: Tensor | None
    down_proj: Tensor  # [E, d, width]
    down_proj_bias: Tensor | None
    is_transposed: bool = False
    is_concatenated: bool = True
    has_post_expert_norm: bool = False
    _is_expert_parallel: bool = False

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def one_by_one(
    experts: ExpertWeights, x: Float[Tensor, "N d"], chosen: Int[Tensor, "N k"], gates: Float[Tensor, "N k"]
) -> Float[Tensor, "N d"]:
    """Σ_e g_e F_e(x), expert after expert, for dtypes without a grouped product, such as float64."""
    out = torch.zeros_like(x)
    first, bias = (experts.gate_up_proj, experts.gate_up_proj_bias) if experts.has_gate else (
        experts.up_proj, experts.up_proj_bias
    )  # fmt: skip
    act = experts._apply_gate if experts.has_gate else experts.act_fn
    for expert in range(experts.num_experts):
        token, place = torch.where(chosen == expert)
        hidden = act(F.linear(x[token], first[expert], None if bias is None else bias[expert]))  # type: ignore[index]
        down_bias = None if experts.down_proj_bias is None else experts.down_proj_bias[expert]
        fed = F.linear(hidden, experts.down_proj[expert], down_bias)
        out = out.index_add(0, token, fed * gates[token, place, None])
    return out


class Experts(nn.Module):
    """The networks that a router chooses from, as fused matrices.

    gated    F_e(x) = W_down,e (act(W_gate,e x) ⊙ W_up,e x)         plain    F_e(x) = W_down,e act(W_up,e x)
    """

    def __init__(self, config: Any, number: int, width: int):
        super().__init__()
        self.config, self.number = config, number
        self.gated, self.biased = config.gated_mlp, config.mlp_bias
        self.act_fn = ACT2FN[config.hidden_act]
        self.aligned = width % ALIGNMENT == 0 and config.hidden_size % ALIGNMENT == 0
        if not self.aligned:
            warnings.warn(
                f"moe: experts of {width} × {config.hidden_size} run one by one: grouped products need multiples of "
                f"{ALIGNMENT}",
                stacklevel=2,
            )
        rows, first = (2 * width, "gate_up_proj") if self.gated else (width, "up_proj")
        self.first = first
        self.register_parameter(first, nn.Parameter(torch.empty(number, rows, config.hidden_size)))
        self.down_proj = nn.Parameter(torch.empty(number, config.hidden_size, width))
        if self.biased:
            self.register_parameter(f"{first}_bias", nn.Parameter(torch.empty(number, rows)))
            self.down_proj_bias = nn.Parameter(torch.empty(number, config.hidden_size))

    def initialize_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                init.zeros_(parameter)
            else:
                fill_matrix(parameter, self.config, writes_residual=name == "down_proj")

    def forward(self, x: Float[Tensor, "N d"], chosen: Int[Tensor, "N k"], gates: Float[Tensor, "N k"]) -> Tensor:
        """Σ g_e F_e(x) over the experts chosen for each token."""
        # Grouped products compute in the dtype of the weights, whatever autocast says.
        dtype = product_dtype(x)

        def cast(name: str) -> Tensor | None:
            parameter = getattr(self, name, None)
            return None if parameter is None else parameter.to(dtype)

        weights = ExpertWeights(
            self.number, self.act_fn, self.gated, self.biased, cast("gate_up_proj"), cast("gate_up_proj_bias"),
            cast("up_proj"), cast("up_proj_bias"), self.down_proj.to(dtype), cast("down_proj_bias"),
        )  # fmt: skip
        implementation = self.config._experts_implementation
        if x.is_meta:  # whose grouped product knows bf16 alone
            implementation = "batched_mm"
        elif implementation == "grouped_mm" and (dtype == torch.float64 or not self.aligned):
            implementation = "eager"
        run = ALL_EXPERTS_FUNCTIONS.get_interface(implementation, one_by_one)
        # transformers' function masks rows that only parallel experts have; it knows what compiles in other dtypes.
        if implementation == "grouped_mm" and (dtype == torch.bfloat16 or not torch.compiler.is_compiling()):
            run = grouped_experts
        return run(weights, x.to(dtype), chosen, gates.to(dtype))


class Router(nn.Module):
    """z = W_r x, in fp32 or wider."""

    def __init__(self, config: Any, experts: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))

    def initialize_parameters(self) -> None:
        fill_matrix(self.weight, self.config)

    def forward(self, x: Float[Tensor, "N d"]) -> Float[Tensor, "N E"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x.device.type):
            return F.linear(x.to(wide), self.weight.to(wide))


class SharedGate(nn.Module):
    """a = sigmoid(w · x), one number a token, in fp32 or wider; ½ at first."""

    def __init__(self, config: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size))

    def initialize_parameters(self) -> None:
        init.zeros_(self.weight)

    def forward(self, x: Float[Tensor, "N d"]) -> Float[Tensor, "N 1"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x.device.type):
            return F.linear(x.to(wide), self.weight.to(wide)).sigmoid().to(x.dtype)


@register("feed_forward", "moe")
class MixtureOfExperts(FeedForward):
    """`experts` networks, of which a router chooses `active` for every token, beside one that every token runs."""

    summary = "A router chooses some of many small networks for each token; one more serves every token."
    equation = "y = a · F_shared(x) + ρ · Σ_{e in top k} g_e F_e(x)"
    paper = "2507.18671"
    losses = ("balance_loss", "z_loss", "discipline_loss")
    by_layer = ("expert_load", "router_entropy", "router_z", "group_agreement", "domain_load")
    routers = ("gate", "shared_expert_gate")
    reads_tokens = True
    variants = (
        {"experts": 4, "active": 2, "width": 16},
        {
            "experts": 4, "active": 2, "width": 8, "slices": 2, "selection": "group", "norm_topk_prob": False,
            "shared_gate": "sigmoid", "routed_scaling": "G", "z": 0.01,
        },
        {"experts": 4, "active": 2, "width": 16, "shared": 0, "score": "sigmoid", "routed_scaling": "k"},
    )  # fmt: skip

    @dataclasses.dataclass(frozen=True)
    class Options:
        """experts: E, networks that the router chooses from, at least 1.
        active: k, how many of them a token runs; from 1 to `experts`.
        slices: G, experts of one group, the slices of one network; divides `experts`.
        width: of each expert; None: intermediate_size / slices.
        shared: width of the network that every token runs; 0: none; None: intermediate_size.
        shared_gate: a, a number from 0, or "sigmoid" of a learned projection of the token.
        routed_scaling: ρ, a number from 0, or "G", "k", or "match": (1 − a)·G, with which experts that are copies of
            one network compute what it did.
        score: what p is: "softmax" over all experts, "topk_softmax" over the k largest alone (with `norm_topk_prob`
            the same function), or "sigmoid".
        norm_topk_prob: the k gates of a token sum to 1.
        selection: "expert" takes the k experts with the best scores; "group" takes all slices of the k/G groups with
            the best scores, which does not depend on how equal scores round.
        balance: weight of the balance loss, at least 0.
        z: weight of the z loss, at least 0.
        discipline: weight of the discipline loss, at least 0; above 0 the batch must say the domain of its rows.
        discipline_anneals: this weight falls to 0 over the training, in equal steps.
        jitter: in training the router sees x ⊙ u, u uniform in 1 ± jitter; from 0 to below 1.
        """

        experts: int = 8
        active: int = 2
        slices: int = 1
        width: int | None = None
        shared: int | None = None
        shared_gate: float | str = 1.0
        routed_scaling: float | str = 1.0
        score: str = "softmax"
        norm_topk_prob: bool = True
        selection: str = "expert"
        balance: float = 0.001
        z: float = 0.0
        discipline: float = 0.0
        discipline_anneals: bool = False
        jitter: float = 0.0

        def __post_init__(self):
            check_range("moe", "experts", self.experts, 1)
            check_range("moe", "active", self.active, 1, self.experts)
            check_range("moe", "slices", self.slices, 1, self.experts)
            for name, least in (("width", 1), ("shared", 0)):
                if getattr(self, name) is not None:
                    check_range("moe", name, getattr(self, name), least)
            if isinstance(self.shared_gate, str):
                check_choice("moe", "shared_gate", self.shared_gate, ("sigmoid",))
            else:
                check_number("moe", "shared_gate", self.shared_gate, 0.0)
            if isinstance(self.routed_scaling, str):
                check_choice("moe", "routed_scaling", self.routed_scaling, ("G", "k", "match"))
            else:
                check_number("moe", "routed_scaling", self.routed_scaling, 0.0)
            check_choice("moe", "score", self.score, ("softmax", "topk_softmax", "sigmoid"))
            check_choice("moe", "selection", self.selection, ("expert", "group"))
            for name in ("balance", "z", "discipline"):
                check_number("moe", name, getattr(self, name), 0.0)
            check_number("moe", "jitter", self.jitter, 0.0, 1.0, "more would turn the input's sign")
            if self.experts % self.slices:
                raise ValueError(f"moe option slices={self.slices!r}: must divide experts={self.experts}")
            if self.selection == "group" and self.active % self.slices:
                raise ValueError(
                    f"moe option active={self.active!r}: must be a multiple of slices={self.slices} with "
                    "selection='group', which takes whole groups"
                )
            if self.routed_scaling == "match" and not self.renormalised:
                raise ValueError(
                    "moe option routed_scaling='match': needs norm_topk_prob=True, else gates do not sum to 1"
                )
            if self.routed_scaling == "match" and self.shared != 0 and self.shared_gate == 1.0:
                raise ValueError(
                    "moe option routed_scaling='match': is 0 with shared_gate=1.0, which leaves the experts nothing "
                    "to do; give a shared_gate below 1, or a number"
                )

        @property
        def groups(self) -> int:
            return self.experts // self.slices

        @property
        def renormalised(self) -> bool:
            """Whether the gates of a token sum to 1."""
            return self.norm_topk_prob or self.score == "topk_softmax"

        @property
        def scale(self) -> float:
            """ρ as a number."""
            first = 0.0 if self.shared == 0 else 0.5 if self.shared_gate == "sigmoid" else self.shared_gate
            named = {"G": self.slices, "k": self.active, "match": (1.0 - first) * self.slices}  # type: ignore[operator]
            return float(named.get(self.routed_scaling, self.routed_scaling))  # type: ignore[arg-type]

    def __init__(self, config: Any, options: Any):
        super().__init__(config, options)
        shared, width = self.widths(config, options)
        self.share = 1.0 / config.num_hidden_layers  # of a layer in a loss
        self.left: Tensor | None = None  # of the discipline loss's weight, while it anneals
        self.gate = Router(config, options.experts)
        self.experts = Experts(config, options.experts, width)
        if shared:
            self.shared_expert = Dense(config, NoOptions(), width=shared)
            if options.shared_gate == "sigmoid":
                self.shared_expert_gate = SharedGate(config)

    @staticmethod
    def widths(config: Any, options: Any) -> tuple[int, int]:
        """Widths of the shared expert (0: none) and of each routed one."""
        whole = config.intermediate_size
        shared = whole if options.shared is None else options.shared
        return shared, whole // options.slices if options.width is None else options.width

    @classmethod
    def unsupported(cls, config, options) -> str | None:
        if options.width is None and config.intermediate_size % options.slices:
            return (
                f"intermediate_size={config.intermediate_size} is not divisible by slices={options.slices}; give "
                "width, or slices that divide it"
            )
        return None

    @property
    def communicates(self) -> bool:
        return bool(self.training and self.options.balance) and dist.is_available() and dist.is_initialized()

    def forward(self, x, tokens=None):
        rows = x.flatten(0, -2)
        seen = rows
        if self.training and self.options.jitter:
            seen = rows * torch.empty_like(rows).uniform_(1 - self.options.jitter, 1 + self.options.jitter)
        z = self.gate(seen)
        p, chosen, gates = self.route(z)
        said = {} if tokens is None else self.say(z, p, chosen, tokens)
        out = self.experts(rows, chosen, gates).to(rows.dtype)
        if hasattr(self, "shared_expert"):
            fed = self.shared_expert(rows)
            if self.options.shared_gate == "sigmoid":
                fed = fed * self.shared_expert_gate(rows)
            elif self.options.shared_gate != 1.0:
                fed = fed * self.options.shared_gate
            out = out + fed
        out = out.view(x.shape)
        return out if tokens is None else (out, said)

    def route(self, z: Float[Tensor, "N E"]) -> tuple[Float[Tensor, "N E"], Int[Tensor, "N k"], Float[Tensor, "N k"]]:
        """Scores p, the experts of each token, and their gates times ρ."""
        options = self.options
        p = z.sigmoid() if options.score == "sigmoid" else z.softmax(-1)
        if options.selection == "group":
            best = p.unflatten(-1, (options.groups, options.slices)).sum(-1).topk(options.active // options.slices)[1]
            chosen = (best[..., None] * options.slices + torch.arange(options.slices, device=z.device)).flatten(-2)
            gates = p.gather(-1, chosen)
        else:
            gates, chosen = p.topk(options.active, dim=-1)
        if options.renormalised:
            gates = gates / gates.sum(-1, keepdim=True)
        return p, chosen, gates if options.scale == 1.0 else gates * options.scale

    def say(
        self, z: Float[Tensor, "N E"], p: Float[Tensor, "N E"], chosen: Int[Tensor, "N k"], tokens: TokenFacts
    ) -> dict[str, Tensor]:
        """The layer's losses (in training) and statistics by name, over the tokens that are not padding."""
        options, experts, groups = self.options, self.options.experts, self.options.groups
        real = z.new_ones(len(z)) if tokens.real is None else tokens.real.flatten().to(z.dtype)
        if options.score == "sigmoid":
            p = p / p.sum(-1, keepdim=True)
        number = real.sum()
        whole, number = number, number.clamp(min=1)
        picked = torch.zeros_like(z).scatter(-1, chosen, 1.0)  # [N, E]: 1 where chosen

        def mean(value: Tensor) -> Tensor:
            return (value * real).sum() / number

        squared = z.logsumexp(-1).square()
        counts = (picked * real[:, None]).sum(0)
        with torch.no_grad():
            said = {
                "expert_load": counts / (number * options.active),
                "router_entropy": mean(torch.special.entr(p).sum(-1)),
                "router_z": mean(squared),
            }
            if options.slices > 1:
                most = picked.unflatten(-1, (groups, options.slices)).sum(-1).amax(-1)
                said["group_agreement"] = mean(most / min(options.active, options.slices))
            if tokens.domains is not None:
                domain = tokens.domains.flatten()
                domain = torch.where((domain < 0) | (domain > groups), groups, domain)  # the last: none of the groups
                of_domain = F.one_hot(domain, groups + 1).to(z.dtype) * real[:, None]
                said["domain_load"] = of_domain.T @ picked / (number * options.active)
        if not self.training:
            return said
        if options.balance:
            everywhere, processes = counts.detach(), 1
            if self.communicates:
                processes = dist.get_world_size()
                summed = all_reduce(
                    torch.cat((everywhere, whole[None])), "sum", dist.distributed_c10d._get_default_group()
                )
                everywhere, whole = summed[:-1], summed[-1]
            whole = whole.clamp(min=1)
            # P_e times this process's share of the tokens: averaged over processes, as losses are, it is that of all
            mean_p = (p * real[:, None]).sum(0) * processes / whole
            share = everywhere / (whole * options.active)
            said["balance_loss"] = self.share * options.balance * experts * (share * mean_p).sum()
        if options.z:
            said["z_loss"] = self.share * options.z * mean(squared)
        if options.discipline:
            said["discipline_loss"] = self.share * options.discipline * self.discipline(z, p, real, tokens)
            if self.left is not None:
                said["discipline_loss"] = said["discipline_loss"] * self.left
        return said

    def on_step(self, step: int, of_steps: int) -> None:
        """Note how far training is; `train.Phases` calls this before every step."""
        if self.options.discipline_anneals:
            if self.left is None:
                self.left = torch.ones((), device=self.gate.weight.device)
            self.left.fill_(1 - step / of_steps)  # in place: a compiled layer reads the same tensor

    def discipline(self, z: Tensor, p: Tensor, real: Tensor, tokens: TokenFacts) -> Tensor:
        """−mean log Σ_j p_{d(t)·G + j}, over the real tokens of rows whose domain is one of the groups."""
        options = self.options
        if tokens.domains is None:
            raise ValueError(
                f"moe option discipline={options.discipline!r}: the batch does not say the domain of its rows; pass "
                "domains=…, train on named sources, or set it to 0"
            )
        domain = tokens.domains.flatten()
        known = (domain >= 0) & (domain < options.groups)
        score = p.log() if options.score == "sigmoid" else z.log_softmax(-1)
        of_group = score.unflatten(-1, (options.groups, options.slices)).logsumexp(-1)
        own = of_group.gather(-1, domain.clamp(0, options.groups - 1)[:, None])[:, 0]
        counted = real * known
        return -(own * counted).sum() / counted.sum().clamp(min=1)

    @classmethod
    def describe(cls, means: dict[str, Tensor]) -> dict[str, Any]:
        """Quantities by name from the mean statistics of many forwards, each with a number for every layer.

        expert_load, router_entropy, router_z and group_agreement unchanged, and

            load_max_over_mean     largest share of an expert · E
            load_entropy           −Σ_e f_e log f_e
            dead_experts           experts that no token ran
            domain_information     Σ_{d,e} f_{d,e} log(f_{d,e} / (f_d f_e)), in nats
        """
        out: dict[str, Any] = {name: value.tolist() for name, value in means.items() if name != "domain_load"}
        load = means.get("expert_load")
        if load is not None:
            out["load_max_over_mean"] = (load.amax(-1) * load.shape[-1]).tolist()
            out["load_entropy"] = torch.special.entr(load).sum(-1).tolist()
            out["dead_experts"] = (load == 0).sum(-1).tolist()
        joint = means.get("domain_load")
        if joint is not None:
            parts = torch.special.entr(joint.sum(-1)).sum(-1), torch.special.entr(joint.sum(-2)).sum(-1)
            out["domain_information"] = (sum(parts) - torch.special.entr(joint).sum((-2, -1))).tolist()
        return out

    @classmethod
    def counts(cls, config, options) -> Counts:
        d, layers, experts, k = config.hidden_size, config.num_hidden_layers, options.experts, options.active
        shared, width = cls.widths(config, options)
        maps = 3 if config.gated_mlp else 2
        learned = bool(shared) and options.shared_gate == "sigmoid"
        of_expert = maps * d * width + config.mlp_bias * (d + (maps - 1) * width)
        of_shared = (maps * d * shared + config.mlp_bias * (d + (maps - 1) * shared)) if shared else 0
        # softmax, or a function of each; groups; gates
        routing = experts if options.score == "sigmoid" else 4 * experts
        routing += experts * (options.selection == "group") + 2 * k * options.renormalised + k * (options.scale != 1.0)
        routed = k * (config.mlp_bias * (2 * d + (maps - 1) * width) + maps * width + d)  # the gate on the narrow side
        always = 0
        if shared:
            always = config.mlp_bias * (d + (maps - 1) * shared) + (maps - 1) * shared + d
            always += (1 + d) * learned + d * (not learned and options.shared_gate != 1.0)
        return Counts(
            matmul=layers * 2 * d * (maps * (shared + k * width) + experts + learned),
            last_matmul=0 if learned else layers * 2 * d * shared,
            elementwise=layers * (routing + routed + always),
            parameters=layers * (of_shared + experts * (of_expert + d) + d * learned),
            idle=layers * (experts - k) * of_expert,
        )

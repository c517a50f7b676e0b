"""Adaptive Latent CoT: token-level adaptive latent chain of thought (arXiv 2602.08220).

    u_{t,0} = c·W_in[x_t];   z_{t,k+1} = F(u_{t,k});   u_{t,k} = z_{t,k}                     k = 0 … M
    slot (t, k) sees (t', k')  iff  t' ≤ t, k' ≤ k and (t', k') ran                     (2-D causal)

    g_{t,k} = σ(w·z_{t,k} + b);  reach_{t,1} = 1,  reach_{t,k+1} = reach_{t,k}·g_{t,k}
    exit_{t,k} = reach_{t,k}·(1 − g_{t,k})
    slot (t, k) runs  iff  reach_{t,k+1} > τ;   the last of K_t outputs takes what is left: exit_{t,K_t} = reach_{t,K_t}
    logits_t = W_out Σ_{k ≤ K_t} exit_{t,k} z_{t,k}

    loss = CE + λ·mean_t Σ_{k=1}^{min(K_t,M)} sg(p_{t,k}^β)·reach_{t,k+1},   p_{t,k} = softmax(W_out z_{t,k})[x_{t+1}]

All tokens take step k together, and step k reads only steps ≤ k. So training and prefill in M + 1 forwards equal
decoding token by token, exactly. Slots that do not run are left out of the computation, in training as at inference.
The paper's formula of the penalty is not public; this one has all its reported properties
(docs/methods/adaptive_latent_cot.md).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fathom.depth.base import Counts, DepthMethod, DepthOutput, check_choice, check_number, check_range
from fathom.depth.halting import CollapseWatch, Score, check_mean_passes, scheduled_passes
from fathom.models.registry import register
from fathom.models.steps.cache import appended_segments
from fathom.models.steps.tokens import Chosen
from fathom.ops.cross_entropy import IGNORE, mean_over_targets


@register("depth", "adaptive_latent_cot")
class AdaptiveLatentCoT(DepthMethod):
    """Up to M latent steps a token; a router decides after each whether to go on, and mixes their states."""

    summary = "Latent steps as long as a router asks for them, exact in parallel; their states are mixed."
    equation = (
        "z_{k+1} = F(z_k);  "
        "reach_{k+1} = reach_k·σ(w·z_k + b), runs while > τ;  "
        "logits = W_out Σ_k (reach_k − reach_{k+1}) z_k"
    )
    paper = "2602.08220"
    variants: ClassVar[tuple[dict[str, Any], ...]] = (
        {"steps": 2, "penalty": 0.0, "threshold": 0.5, "router_bias": 0.0},
        {"steps": 3, "beta": 0.0, "penalty_on": "gate", "threshold": 0.3, "router_per_step": True, "router_bias": 0.0},
        {"steps": 2, "halting": "random", "mean_passes": 2.0},
    )
    adaptive = True
    identity = {"steps": 0}  # noqa: RUF012

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of Adaptive Latent CoT. λ, β, τ and the router's start are ours, the paper's are unknown.

        steps: M, the most latent steps of a token; 0 is the ordinary decoder.
        threshold: τ; a slot runs if its reach is above it.
        eval_threshold: τ at inference; None: the same.
        penalty: λ.
        beta: β; 0 penalises every latent step alike.
        penalty_on: "reach", or "gate": g_{t,k} instead of reach_{t,k+1}.
        correctness_from: p of every "step" (one more head each), or of the "mixture" that predicts.
        router_per_step: M routers, not one.
        router_bias: initial b. Weights start at 0.
        detach_router: the router's gradient stops at its input.
        detach_between_steps: gradients do not flow from a step's input into the step before.
        explore: in training, the share of slots below τ that run nevertheless; only with halting="router".
        halting: "router"; or baselines on the same slots. "act" and "exit_gate" are the methods of these names
            (act.py, exit_gate.py). "fixed" (all M steps), "random" and "uniform" (halting.py) have no router: the last
            state predicts.
        mean_passes: mean number of slots of a token under "random" and "uniform", 1 … M + 1.
        scale_embeds: True sets embed_scale to √(2.5·d), False to 1; None leaves it.
        """

        steps: int = 3
        threshold: float = 1e-4
        eval_threshold: float | None = None
        penalty: float = 0.03
        beta: float = 1.0
        penalty_on: str = "reach"
        correctness_from: str = "step"
        router_per_step: bool = False
        router_bias: float = 2.0
        detach_router: bool = False
        detach_between_steps: bool = False
        explore: float = 0.0
        halting: str = "router"
        mean_passes: float | None = None
        scale_embeds: bool | None = None
        passes: ClassVar[int] = 1
        method: ClassVar[str] = "adaptive_latent_cot"  # whose options these are, for what is refused

        def __post_init__(self):
            name = self.method
            check_range(name, "steps", self.steps, 0)
            for option in ("threshold", "eval_threshold"):
                value = getattr(self, option)
                if value is not None:
                    remedy = "1 or more prunes every latent step, as no reach is above 1: use steps=0 for that"
                    check_number(name, option, value, 0, 1, remedy)
            check_number(name, "penalty", self.penalty, 0)
            check_number(name, "beta", self.beta, 0)
            check_number(name, "explore", self.explore, 0, 1)
            check_number(name, "router_bias", self.router_bias, -math.inf)
            check_choice(name, "penalty_on", self.penalty_on, ("reach", "gate"))
            check_choice(name, "correctness_from", self.correctness_from, ("step", "mixture"))
            check_choice(name, "halting", self.halting, ("router", "act", "exit_gate", "fixed", "random", "uniform"))
            check_mean_passes(name, self.halting, self.mean_passes, self.steps + 1)
            if self.explore and self.halting != "router":
                raise ValueError(
                    f'{name} option explore={self.explore!r}: applies only with halting="router", not '
                    f"{self.halting!r}; set explore=0"
                )

        @property
        def routers(self) -> int:
            if not self.steps or self.halting in ("fixed", "random", "uniform"):
                return 0
            return self.steps if self.router_per_step else 1

        @property
        def scored(self) -> bool:
            """Whether the penalty depends on how right a prediction is."""
            return self.beta != 0 and self.penalty != 0

    def __init__(self, config, options):
        super().__init__(config, options)
        self.routers = nn.ModuleList(Score(config.hidden_size, options.router_bias) for _ in range(options.routers))
        self.segments = appended_segments(options.steps + 1) if options.steps else ()
        self.watch = CollapseWatch(self.name, "lower penalty or threshold, or raise beta, router_bias or explore")

    @property
    def slots(self) -> int:
        return self.options.steps + 1

    @classmethod
    def most_steps(cls, options) -> int:
        return options.steps + 1

    @classmethod
    def embed_scale(cls, config, options) -> float:
        # unit-variance rows for a table of deviation √(2/(5d)): a step's input is a normalised state, so
        return math.sqrt(2.5 * config.hidden_size)

    def forward(self, stack, embeddings, vocabulary) -> DepthOutput:
        if not self.options.steps:
            return DepthOutput(stack(embeddings))
        return stack.run_all(self.step_by_step, embeddings, vocabulary)

    @torch.compiler.disable(recursive=False)  # how many tokens run next is known when a step has run
    def step_by_step(self, stack, embeddings, vocabulary) -> DepthOutput | None:
        options = self.options
        penalised = self.training and stack.targets is not None and options.routers > 0
        wide = torch.promote_types(embeddings.dtype, torch.float32)
        reach = torch.ones(stack.numbers.shape, dtype=wide, device=embeddings.device)
        mixed, charge, remainder = torch.zeros_like(embeddings, dtype=wide), torch.zeros_like(reach), reach
        passes, exits, states = torch.zeros_like(stack.numbers), [], []
        planned = self.planned(stack)
        chosen, inputs = Chosen(), embeddings

        for k in range(1, options.steps + 2):  # z_k is the output of slot k − 1
            z = stack.append(inputs, chosen)
            here = chosen.take(reach)
            if k <= options.steps:
                gate, onward = self.route(z, here, k)
                goes_on = self.goes_on(onward, chosen, planned, k)
                if penalised:
                    charged = chosen.take(charge) + self.charge(z, gate, onward, chosen, stack, vocabulary)
                    charge = chosen.put(charge, charged)
            else:
                onward, goes_on = torch.zeros_like(here), torch.zeros_like(here, dtype=torch.bool)
            leaving = torch.where(goes_on, here - onward, here)
            if options.halting == "act":
                remainder = chosen.put(remainder, here)
            exits.append(chosen.put(torch.zeros_like(reach), leaving))
            passes = chosen.put(passes, chosen.take(passes) + 1)
            if options.halting == "exit_gate" and penalised:
                states.append(chosen.put(torch.zeros_like(embeddings, dtype=z.dtype), z))
            elif options.halting in ("router", "act"):
                mixed = chosen.put(mixed, chosen.take(mixed) + leaving[..., None] * z)
            else:
                mixed = chosen.put(mixed, z.to(wide))

            following = stack.choose(chosen, goes_on, self.all_go_on) if k <= options.steps else None
            if following is None:
                break
            inputs = following.from_before(z.detach() if options.detach_between_steps else z)
            reach, chosen = chosen.put(reach, onward), following

        if stack.cache is not None:
            stack.store_appended(passes)
        if not stack.settled():
            return None
        del exits[stack.reached :]  # of steps that some were to run and none did
        if options.routers:
            self.watch(stack.reached, passes.shape[1])
        trace = {"passes": passes, "exit": torch.stack(exits, dim=-1).detach()}
        hidden_states = mixed.to(z.dtype)
        if not penalised:
            return DepthOutput(hidden_states, trace=trace)
        if options.halting == "exit_gate":
            return DepthOutput(
                states[-1], trace=trace, objective=self.exit_gate_objective(states, exits, stack, vocabulary)
            )
        objective = None
        if options.halting == "act":
            charge = passes + remainder
        elif options.correctness_from == "mixture" and options.scored:
            # how right the prediction is, its loss says
            total, losses = vocabulary.loss(hidden_states, stack.targets)
            objective = total / (stack.targets != IGNORE).sum().clamp(min=1)
            charge = charge * (-options.beta * losses).exp()
        penalty = options.penalty * mean_over_targets(charge, self.predicted(stack)) + self.no_gradient()
        return DepthOutput(hidden_states, {"penalty": penalty}, trace, objective)

    def no_gradient(self) -> Tensor:
        """Zero, computed from all routers: one whose step no token reached then has a gradient, which DDP requires."""
        return 0.0 * torch.stack([parameter.sum() for parameter in self.routers.parameters()]).sum()

    scores = property(lambda self: self.routers)

    def predicted(self, stack) -> Tensor:
        """Targets of the real tokens: padding adds nothing to the penalty."""
        return torch.where(stack.real, stack.targets, IGNORE)

    def planned(self, stack) -> Tensor | None:
        """The number of slots of every token where a schedule decides it; else None."""
        if self.options.halting not in ("random", "uniform"):
            return None
        return scheduled_passes(self.options.halting, stack.position_ids, self.options.mean_passes, self.slots)

    def route(self, z, reach, k: int) -> tuple[Tensor, Tensor]:
        """The router's probability after step k, and the reach of step k + 1."""
        if not self.options.routers:
            return reach, reach
        logit = self.routers[k - 1 if self.options.router_per_step else 0](
            z.detach() if self.options.detach_router else z
        )
        if self.options.halting == "act":
            leaving = logit.sigmoid()
            return leaving, reach - leaving
        gate = (-logit if self.options.halting == "exit_gate" else logit).sigmoid()
        return gate, reach * gate

    @property
    def all_go_on(self) -> bool:
        return self.options.halting == "fixed" or (self.options.halting == "exit_gate" and self.training)

    def goes_on(self, reach, chosen, planned, k: int) -> Tensor:
        """Which of the chosen tokens run step k + 1, given its reach."""
        options = self.options
        if planned is not None:
            return chosen.take(planned) > k
        if self.all_go_on:
            return torch.ones_like(reach, dtype=torch.bool)
        evaluating = not self.training and options.eval_threshold is not None
        runs = reach > (options.eval_threshold if evaluating else options.threshold)
        return runs | (torch.rand_like(reach) < options.explore) if self.training and options.explore else runs

    def charge(self, z, gate, reach, chosen, stack, vocabulary) -> Tensor:
        """A step's term of the penalty, before the mixture weights it."""
        cost = gate if self.options.penalty_on == "gate" else reach
        if self.options.correctness_from == "mixture" or self.options.halting != "router":
            return cost
        return cost * self.correctness(z, chosen.take(stack.targets), vocabulary)

    def correctness(self, states, targets, vocabulary) -> Tensor | float:
        """sg(p^β) of the true next token."""
        if not self.options.scored:
            return 1.0
        with torch.no_grad():
            return (-self.options.beta * vocabulary.losses(states, targets)).exp()

    def exit_gate_objective(self, states, exits, stack, vocabulary) -> Tensor:
        """mean_t Σ_k exit_k·CE_k − λ·H(exit), H = −Σ_k exit_k log exit_k."""
        masses = torch.stack(exits)
        losses = torch.stack([vocabulary.losses(z, stack.targets) for z in states])
        entropy = torch.special.entr(masses)
        objective = mean_over_targets((masses * losses - self.options.penalty * entropy).sum(0), stack.targets)
        return objective + self.no_gradient()

    @classmethod
    def counts(cls, config, options, ran: tuple[float, ...] | None = None) -> Counts:
        if not options.steps:
            return Counts()
        d, v = config.hidden_size, config.vocab_size
        ran = (1.0,) * (options.steps + 1) if ran is None else ran
        slots, routed = sum(ran), sum(ran[: options.steps]) if options.routers else 0
        # routing: w·z, + b, σ, and reach·g (act: reach − g; exit_gate: −logit is free); exit = reach − onward
        routing = routed * (2 * d + 4)
        mixing = slots * 2 * d if options.halting in ("router", "act") else 0
        scored: float = 0  # heads whose logits only say how right a state is; they have no backward pass
        if options.halting == "router" and options.correctness_from == "step" and options.scored:
            scored = routed
        if options.halting == "exit_gate":
            # trains on every step's head: all but one, which is counted, forward and backward; the logits of all again
            scored = 3 * options.steps + (options.steps + 1)
        return Counts(
            slots=slots,
            sweeps={1: slots},
            keys=sum(share * sum(ran[: k + 1]) for k, share in enumerate(ran)),
            elementwise=routing + mixing,
            recomputed=scored * 2 * d * v,
            parameters=options.routers * (d + 1),
        )

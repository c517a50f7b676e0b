"""PonderLM-3: adaptive token-wise pondering with differentiable masking (arXiv 2603.02023).

Slots as in PonderLM-2: token t has (t,0) with input e_t = c·W_in[x_t], and (t,k), k = 1 … K, with input h_{t,k−1}, the
final-norm state of the slot before it. A router says from the first state how many thoughts to take:

    s_t = softmax(router(h_{t,0}))  over 0 … K;      w_{t,k} = Σ_{j≥k} s_{t,j}      (w_{t,0} = 1, falling)

Every query's score of the key of slot (t,k) gets + log w_{t,k}, in all layers and heads, and the states are mixed:

    logits_t = W_out Σ_k s_{t,k} h_{t,k}

At inference a slot with w_{t,k} < τ is not run: its share of the mixture and its attention weight would be below τ.
Decoding runs the slots one by one. All at once (training, `prefill="jacobi"`), states and router are found by Jacobi
sweeps, each pass under the mask of the one before:

    st = [E]
    for m = 0 … K−1:   y, s = F(interleave(st); w);   st = [E, y_0, …, y_m]           (growing passes)
    J times:           y, s = F(interleave(st); w);   st = [E, y_0, …, y_{K−1}]       (sweeps)
    y, s = F(interleave(st); w);   logits = W_out Σ_k s_k y_k

exact after J = K·(T−1) sweeps. Gradients flow through every pass, the mask and the mixture. The loss adds a penalty on
E[k] = Σ_k k·s_k = Σ_{k≥1} w_k, the thoughts a token is expected to take, averaged over the tokens that have a target.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from fathom.depth.base import Counts, DepthMethod, DepthOutput, check_choice, check_number
from fathom.depth.ponderlm2 import Sweeps, check_thoughts, jacobi_forwards, run_pass
from fathom.models.registry import register
from fathom.models.slots import interleave
from fathom.ops.biased_attention import MASKED
from fathom.ops.cross_entropy import IGNORE

SMALLEST = 1e-30  # w is clamped here before its logarithm: far below any τ, and finite in fp32


class Router(nn.Module):
    """Scores of 0 … K thoughts: W h + b, or W gelu(V h) + b. W and b start at zero: all depths equally likely.

    The scores are computed in fp32 or wider whatever runs around it: rounded to bf16 they move tokens across τ.
    """

    def __init__(self, width: int, choices: int, hidden: bool):
        super().__init__()
        self.hidden = nn.Linear(width, width, bias=False) if hidden else None
        self.weight = nn.Parameter(torch.empty(choices, width))
        self.bias = nn.Parameter(torch.empty(choices))

    def initialize_parameters(self) -> None:
        init.zeros_(self.weight)
        init.zeros_(self.bias)

    def forward(self, h: Float[Tensor, "B T d"]) -> Float[Tensor, "B T choices"]:
        h = h if self.hidden is None else F.gelu(self.hidden(h))
        wide = torch.promote_types(h.dtype, torch.float32)
        with maybe_autocast(h.device.type, enabled=False):
            return F.linear(h.to(wide), self.weight.to(wide), self.bias.to(wide))


def tail_sums(shares: Float[Tensor, "B T n"]) -> Float[Tensor, "B T n"]:
    """w_k = Σ_{j≥k} s_j, with w_0 = 1 exactly."""
    tails = shares[..., 1:].flip(-1).cumsum(-1).flip(-1).clamp(SMALLEST, 1.0)
    return F.pad(tails, (1, 0), value=1.0)


@register("depth", "ponderlm3")
class PonderLM3(DepthMethod):
    """Up to K latent thoughts after every token; a router on the token's first state says how many."""

    summary = "Latent thoughts whose number a router chooses per token, through a soft mask that attention reads."
    equation = (
        "s_t = softmax(router(h_{t,0}));  "
        "scores of slot (t,k) get + log Σ_{j≥k} s_{t,j};  "
        "logits_t = W_out Σ_k s_{t,k} h_{t,k}"
    )
    paper = "2603.02023"
    variants = (
        {"thoughts": 1, "sweeps": 12, "random_sweeps": False, "penalty_weight": 0.0},  # exact up to 13 tokens
        {
            "thoughts": 2, "sweeps": 14, "random_sweeps": False, "penalty_weight": 0.0, "prefill": "sequential",
            "router": "mlp",
        },
    )  # fmt: skip
    identity = {"thoughts": 0}  # noqa: RUF012
    ragged = True
    adaptive = True

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of PonderLM-3. The paper gives neither J nor the penalty nor the router's form; J follows PonderLM-2.

        thoughts: K, the most latent thoughts a token may take; 0 is the ordinary decoder.
        threshold: τ, at inference a slot with w < τ is not run; 0 runs all.
        router: "linear", or "mlp" with one hidden layer.
        penalty: added to the training loss, times penalty_weight: "steps" (mean E[k] of the batch), "target"
            ((mean E[k] − target)²), or "prior" (KL of the batch's mean shares to `prior`).
        penalty_weight: λ; 0 leaves the choice to the language-model loss.
        target: thoughts a token, for penalty="target".
        prior: shares of 0 … K thoughts, for penalty="prior"; None is uniform.
        sweeps: J, Jacobi sweeps in training and in a jacobi prefill. None: 3 in training; a prefill sweeps until all
            thoughts and s have settled.
        random_sweeps: in training, draw J uniformly from 2 … sweeps, once for all ranks.
        prefill: how several new tokens run at inference: by "jacobi" sweeps, or "sequential" (exact, slot by slot).
        tolerance: thoughts and s have settled once none changes by more than this; see `ponderlm2` for None.
        scale_embeds: True sets embed_scale to √(2.5·d), False to 1; None leaves it.
        checkpoint_passes: in training a forward keeps only its inputs, and the backward pass runs it again.
        gradient_passes: number of last forwards that have a backward pass in training; None: all.
        """

        thoughts: int = 3
        threshold: float = 1e-4
        router: str = "linear"
        penalty: str = "steps"
        penalty_weight: float = 0.01
        target: float = 1.0
        prior: tuple[float, ...] | None = None
        sweeps: int | None = None
        random_sweeps: bool = True
        prefill: str = "jacobi"
        tolerance: float | None = None
        scale_embeds: bool | None = None
        checkpoint_passes: bool = False
        gradient_passes: int | None = None
        passes: ClassVar[int] = 1

        def __post_init__(self):
            name = "ponderlm3"
            check_thoughts(name, self)
            check_choice(name, "router", self.router, ("linear", "mlp"))
            check_choice(name, "penalty", self.penalty, ("steps", "target", "prior"))
            check_number(name, "threshold", self.threshold, 0, 1)
            check_number(name, "penalty_weight", self.penalty_weight, 0)
            bounded = self.penalty == "target" and self.thoughts  # without thoughts there is no penalty
            check_number(name, "target", self.target, 0, self.thoughts if bounded else math.inf)
            if self.prior is not None:
                numbers = isinstance(self.prior, list | tuple) and all(type(p) in (int, float) for p in self.prior)
                if not (numbers and len(self.prior) == self.thoughts + 1 and min(self.prior) > 0) or not math.isclose(
                    sum(self.prior), 1.0, abs_tol=1e-6
                ):
                    raise ValueError(
                        f"{name} option prior={self.prior!r}: must be {self.thoughts + 1} positive shares, of 0 … "
                        f"{self.thoughts} thoughts, with sum 1, or None"
                    )
                object.__setattr__(self, "prior", tuple(self.prior))  # lists in JSON and YAML

    def __init__(self, config, options):
        super().__init__(config, options)
        if options.thoughts:
            self.router = Router(config.hidden_size, self.slots, options.router == "mlp")

    @property
    def parts_are_exact(self) -> bool:
        return self.options.prefill == "sequential"  # Jacobi sweeps settle within a tolerance, over a call's thoughts

    @property
    def slots(self) -> int:
        return self.options.thoughts + 1

    @classmethod
    def most_steps(cls, options) -> int:
        return options.thoughts + 1

    @classmethod
    def embed_scale(cls, config, options) -> float:
        return math.sqrt(2.5 * config.hidden_size)  # as in ponderlm2.py

    def forward(self, stack, embeddings, vocabulary) -> DepthOutput:
        if not self.options.thoughts:
            return DepthOutput(stack(embeddings))
        if not self.training and (embeddings.shape[1] == 1 or self.options.prefill == "sequential"):
            return self.sequential(stack, embeddings)
        return self.jacobi(stack, embeddings)

    def shares(
        self, h: Float[Tensor, "B T d"], real: Bool[Tensor, "B T"] | None
    ) -> tuple[Float[Tensor, "B T n"], Float[Tensor, "B T n"], Bool[Tensor, "B T n"]]:
        """The shares s, log w as a key bias, and which slots run; padding takes no thought."""
        s = self.router(h).softmax(-1)
        if real is not None:
            s = torch.where(real[..., None], s, F.one_hot(torch.tensor(0, device=s.device), self.slots).to(s))
        w = tail_sums(s)
        if self.training:
            return s, w.log(), torch.ones_like(w, dtype=torch.bool)
        # unclamped zeros are below any τ > 0; τ = 0 runs them all
        run = w >= self.options.threshold if self.options.threshold else torch.ones_like(w, dtype=torch.bool)
        return s, torch.where(run, w.log(), MASKED), run

    def sequential(self, stack, embeddings) -> DepthOutput:
        """The definition: one slot after the other; every token takes as many as the row that needs the most."""
        stack, outputs, shares, runs = stack.with_cache(len(embeddings)), [], [], []
        length = embeddings.shape[1]
        real = None if stack.attention_mask is None else stack.attention_mask[:, -length:].bool()
        for token in range(length):
            slot = embeddings[:, token : token + 1]
            start = torch.zeros(
                slot.shape[:2], dtype=torch.promote_types(slot.dtype, torch.float32), device=slot.device
            )
            h = stack.bind(slot, stack.layout(self.slots, token, key_bias=start))(slot)
            s, bias, run = self.shares(h, None if real is None else real[:, token : token + 1])
            executed = torch.where(run, s, 0.0)
            mixed = executed[..., :1] * h
            most = int(run.sum(-1).max()) if self.options.threshold else self.slots  # waits for the device
            for k in range(1, stack.needed(most)):
                h = stack.bind(h, stack.layout(self.slots, token, k, bias[..., k]))(h)
                mixed = mixed + executed[..., k : k + 1] * h
            outputs.append(mixed.to(h.dtype))
            shares.append(s)
            runs.append(run)
        return self.output(torch.cat(outputs, dim=1), torch.cat(shares, dim=1), torch.cat(runs, dim=1))

    def jacobi(self, stack, embeddings) -> DepthOutput:
        """Growing passes, sweeps, and the final pass, which alone writes the cache."""
        thoughts, length, n = self.options.thoughts, embeddings.shape[1], self.slots
        real = None if stack.attention_mask is None else stack.attention_mask[:, -length:].bool()
        plan = Sweeps.of(self, stack, embeddings)
        found: list[Tensor] = []  # the thoughts of stages 0, 1, …
        key_bias = None
        for m in range(1, n):
            with torch.set_grad_enabled(torch.is_grad_enabled() and m > plan.first):
                slots = interleave([embeddings, *found])
                y = run_pass(self, stack.bind(slots, stack.layout(m, key_bias=key_bias), keep=False), slots)
                s, bias, run = self.shares(y[:, ::m], real)
                found, key_bias = [y[:, i::m] for i in range(m)], bias[..., : m + 1].flatten(1)

        def sweep(before: tuple) -> tuple:
            found, _, bias, _ = before
            slots = interleave([embeddings, *found])
            y = run_pass(self, stack.bind(slots, stack.layout(n, key_bias=bias.flatten(1)), keep=False), slots)
            return [y[:, i::n] for i in range(thoughts)], *self.shares(y[:, ::n], real)

        def change(before: tuple, after: tuple) -> Tensor:
            """The change of the thoughts that run and of the shares."""
            (old, last, *_), (new, s, _, run) = before, after
            return torch.maximum(stack.largest_change(old, new, run[..., 1:]), (s - last).abs().max())

        (found, s, bias, run), ran = plan.run(sweep, change, (found, s, bias, run))
        slots, layout = interleave([embeddings, *found]), stack.layout(n, key_bias=bias.flatten(1))
        if not self.training and not torch.compiler.is_compiling():  # slots that no row runs are left out
            chosen = run.flatten(1).any(0).nonzero().flatten()
            slots, layout = slots[:, chosen], layout.take(chosen)
            y = slots.new_zeros(len(slots), n * length, slots.shape[2])
            y[:, chosen] = stack.bind(slots, layout)(slots)
        else:
            y = run_pass(self, stack.bind(slots, layout), slots)
        s, _, _ = self.shares(y[:, ::n], real)  # the fusion's; which slots ran was known before
        mixed = (torch.where(run, s, 0.0)[..., None] * y.unflatten(1, (length, n))).sum(2).to(y.dtype)
        out = self.output(mixed, s, run)
        out.trace.update(plan.trace(ran))
        if self.training and self.options.penalty_weight and stack.targets is not None:
            out.losses["penalty"] = self.options.penalty_weight * self.penalty(s, stack.targets)
        return out

    def output(self, hidden_states, s, run) -> DepthOutput:
        return DepthOutput(hidden_states, trace={"shares": s, "passes": run.sum(-1)})

    def penalty(self, s: Float[Tensor, "B T n"], targets: Int[Tensor, "B T"]) -> Tensor:
        """The penalty on the mean shares of the tokens that have a target; 0 if none has.

        E[k] is linear in s, so E[k] of the mean shares is the mean of E[k].
        """
        predicts = targets != IGNORE
        mean = (s * predicts[..., None]).sum((0, 1)) / predicts.sum().clamp(min=1)
        if self.options.penalty == "prior":
            prior = mean.new_tensor(self.options.prior or (1 / self.slots,) * self.slots)
            return (mean * (mean.clamp_min(SMALLEST).log() - prior.log())).sum()  # a share may have underflowed to 0
        expected = tail_sums(mean)[1:].sum()
        return expected if self.options.penalty == "steps" else (expected - self.options.target) ** 2

    @classmethod
    def counts(cls, config, options, ran: tuple[float, ...] | None = None) -> Counts:
        k, d = options.thoughts, config.hidden_size
        if not k:
            return Counts()
        n = k + 1
        weights = d * n + (d * d if options.router == "mlp" else 0)
        # biases, softmax, tail sums, logarithms; gelu
        routing = n + 4 * n + (n - 1) + n + (d if options.router == "mlp" else 0)

        def counts(routers: float, slots: float = n, heads: int = 1, **fields) -> Counts:
            return Counts(
                slots=slots,
                heads=heads,
                matmul=routers * 2 * weights,
                elementwise=routers * routing + d * slots + d * (slots - 1),  # and the states mixed
                parameters=weights + n,
                biased=True,
                **fields,
            )

        every, first = jacobi_forwards(options), jacobi_forwards(options, without_gradient=True)
        parallel = counts(
            sum(every.values()),
            sweeps=every,
            no_gradient=counts(sum(first.values()), heads=0, sweeps=first),
            checkpointed=options.checkpoint_passes,
        )
        return counts(1, sum(ran or (1.0,) * n), parallel=parallel)  # training runs every slot

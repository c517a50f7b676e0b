"""AdaPonderLM: gated pondering with token-wise adaptive depth (arXiv 2603.01914).

    E_0 = c·W_in[x]                                     m_0 = 1
    for i = 0 … K:
        h_i = F(E_i), keys and values of halted tokens frozen:  K_i ← where(m_i, K_i, K_{i−1}),  V likewise
        s_i = σ(MLP_i(h_i));   m_{i+1} = m_i·1(s_i ≥ τ)
        E_{i+1} = E_i + m_{i+1}·s_i·Σ_v softmax(h_i W_outᵀ)_v c·W_in[v]
    logits = W_out out,   out_t = h_{j,t} of the last pass j that t was active

    loss = CE + λ·mean of the smallest share k of all gate logits;   k = 0 up to S0, then linear to k_max at S1

With the readout frozen, nothing reads a halted token's later states. So dense training, sparse prefill (which leaves
halted tokens out) and decoding with a cache of the passes that ran give equal results, exactly. Penalised logits are
clamped at logit(τ) − 2, where a token is safely halted: without the clamp the penalty would push them down for ever.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fathom.depth.base import (
    Counts,
    DepthMethod,
    DepthOutput,
    check_choice,
    check_number,
    check_range,
    reads_earlier_passes,
)
from fathom.depth.halting import CollapseWatch, Score, check_mean_passes, scheduled_passes
from fathom.models.registry import register
from fathom.models.steps.cache import replaced_segments
from fathom.models.steps.tokens import Chosen

CLAMP_BELOW = 2.0  # logits under the threshold's, where the penalty ends


class Gate(nn.Module):
    """w·GELU(W h + a) + b, hidden width 4d; the last product in fp32 or wider."""

    def __init__(self, width: int, start: float):
        super().__init__()
        self.up_proj, self.score = nn.Linear(width, 4 * width), Score(4 * width, start)

    def forward(self, hidden_states: Float[Tensor, "B T d"]) -> Float[Tensor, "B T"]:
        return self.score(F.gelu(self.up_proj(hidden_states)))


def mean_of_smallest(values: Float[Tensor, " N"], share: float) -> Float[Tensor, ""]:
    """Mean of the smallest max(1, ⌊share·N⌋) of N values; 0 if `share` is 0 or there are no values."""
    if share == 0 or not len(values):
        return 0.0 * values.sum()  # every gate in the graph, as DDP wants it
    count = math.floor(share * len(values) * (1 + 1e-12))  # 0.2·20, as the schedule makes it, is a little under 4
    return values.topk(max(1, count), largest=False).values.mean()


@register("depth", "adaponderlm")
class AdaPonderLM(DepthMethod):
    """PonderLM whose tokens leave the loop one by one, when their gate of the pass closes."""

    summary = "Pondering in which a gate halts each token on its own; halted tokens keep their keys."
    equation = "E_{i+1} = E_i + m_{i+1}·σ(MLP_i(h_i))·softmax(h_i W_outᵀ)·(c·W_in);  m_{i+1} = m_i·1(σ(MLP_i(h_i)) ≥ τ)"
    paper = "2603.01914"
    variants = (
        {"steps": 2, "threshold": 0.5},
        {"steps": 3, "threshold": 0.4, "top_k": 5, "premultiply_steps": True, "scale_embeds": True},
        {"steps": 2, "threshold": 0.5, "accumulate": False},
        {"steps": 2, "halting": "uniform", "mean_passes": 2.3},
    )
    adaptive = True
    replaces = True
    identity = {"steps": 0, "scale_embeds": None}  # noqa: RUF012

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of AdaPonderLM; the paper's values, where it gives them.

        steps: K, pondering passes (the total is K + 1); 0 is the ordinary decoder.
        threshold: τ, compared on the logit; 0 halts nobody.
        freeze_readout: a halted token is read out as its last active pass left it. False reads it out as the last
            pass recomputes it; all passes then run for all tokens, at inference too.
        accumulate: E_{i+1} = E_i + …; False: E_0 + …, where a halted token's input stays as it is.
        premultiply_steps: start from K·E_0.
        top_k: mix only the k likeliest tokens, renormalised; None mixes the whole vocabulary.
        scale_embeds: True sets embed_scale to √d, False to 1; None leaves it.
        penalty: λ.
        prune: k_max, in effect the share of gates that are closed at the end of training.
        penalty_on: the gates' "logit", or "prob" σ(logit), which has next to no gradient near τ.
        prune_from, prune_full: S0 and S1, shares of the training steps.
        gate_only: share of the training steps, from the first on, in which only the gates train (continued
            pretraining).
        gate_bias: initial b of the gates; 5 starts continued pretraining close to the PonderLM checkpoint.
        halting: "gates"; or baselines without gates, s = 1: "fixed", PonderLM itself; "random", "uniform" (halting.py).
        mean_passes: mean number of passes of a token under "random" and "uniform", 1 … K + 1.
        """

        steps: int = 3
        threshold: float = 1e-4
        freeze_readout: bool = True
        accumulate: bool = True
        premultiply_steps: bool = False
        top_k: int | None = None
        scale_embeds: bool | None = None
        penalty: float = 0.1
        prune: float = 0.1
        penalty_on: str = "logit"
        prune_from: float = 0.1
        prune_full: float = 0.5
        gate_only: float = 0.0
        gate_bias: float = 0.0
        halting: str = "gates"
        mean_passes: float | None = None
        passes: ClassVar[int] = 1

        def __post_init__(self):
            name = "adaponderlm"
            check_range(name, "steps", self.steps, 0)
            if self.top_k is not None:
                check_range(name, "top_k", self.top_k, 1)
            remedy = "1 or more halts every token after its first pass: use steps=0 for that"
            check_number(name, "threshold", self.threshold, 0, 1, remedy)
            check_number(name, "penalty", self.penalty, 0)
            for option in ("prune", "prune_from", "prune_full", "gate_only"):
                check_number(name, option, getattr(self, option), 0, 1)
            if self.prune_from > self.prune_full:
                raise ValueError(
                    f"{name} option prune_from={self.prune_from!r}: must not be above prune_full={self.prune_full!r}"
                )
            check_number(name, "gate_bias", self.gate_bias, -math.inf)
            check_choice(name, "penalty_on", self.penalty_on, ("logit", "prob"))
            check_choice(name, "halting", self.halting, ("gates", "fixed", "random", "uniform"))
            check_mean_passes(name, self.halting, self.mean_passes, self.steps + 1)
            if self.gate_only and not self.gates:
                raise ValueError(
                    f"{name} option gate_only={self.gate_only!r}: with steps={self.steps} and halting={self.halting!r} "
                    "there are no gates, and nothing would train; set gate_only=0"
                )

        @property
        def gates(self) -> int:
            return self.steps if self.halting == "gates" else 0

        @property
        def threshold_logit(self) -> float:
            return math.log(self.threshold / (1 - self.threshold)) if self.threshold else -math.inf

    def __init__(self, config, options):
        super().__init__(config, options)
        self.gates = nn.ModuleList(Gate(config.hidden_size, options.gate_bias) for _ in range(options.gates))
        self.segments = replaced_segments(options.steps + 1) if options.steps else ()
        self.watch = CollapseWatch(self.name, "lower prune, penalty or threshold, or raise gate_bias")

    @classmethod
    def most_steps(cls, options) -> int:
        return options.steps + 1

    @classmethod
    def unsupported(cls, config, options):
        if options.top_k is not None and options.top_k > config.vocab_size:
            return f"top_k={options.top_k} exceeds vocab_size={config.vocab_size}"
        return super().unsupported(config, options)

    @classmethod
    def refuse_checkpoint(cls, stored, given) -> str | None:
        """Why a PonderLM checkpoint cannot be read with these options; with open gates it must compute what it did."""
        before, now = stored.depth, given.depth
        if before["name"] != "pondering":
            return None
        same = ("steps", "accumulate", "premultiply_steps", "top_k")
        for name, value in {**{name: now[name] for name in same}, "feedback": "mixture", "temperature": 1.0}.items():
            if before.get(name, value) != value:
                remedy = f"set {name}={before[name]!r}" if name in same else "it cannot be continued"
                return f"it was trained with depth 'pondering', {name}={before[name]!r}, not {value!r}; {remedy}"
        if reads_earlier_passes(given, before):
            return (
                f"it was trained with mixer={given.mixer['name']!r}, whose layers read earlier passes, and here they "
                "read their own pass alone; continue it as depth 'pondering', or change the mixer"
            )
        return None

    @property
    def slots(self) -> int:
        return self.options.steps + 1

    @property
    def pruned_share(self) -> float:
        """The share k of penalised gates at this progress of the training."""
        start, full, progress = self.options.prune_from, self.options.prune_full, self.progress or 0.0
        if progress < start:
            return 0.0
        return self.options.prune * (min(1.0, (progress - start) / (full - start)) if full > start else 1.0)

    def trains_alone(self) -> bool:
        return (self.progress or 0.0) < self.options.gate_only

    def forward(self, stack, embeddings, vocabulary) -> DepthOutput:
        if not self.options.steps:
            return DepthOutput(stack(embeddings))
        return stack.run_all(self.step_by_step, embeddings, vocabulary)

    @torch.compiler.disable(recursive=False)  # how many tokens run next is known when a pass has run
    def step_by_step(self, stack, embeddings, vocabulary) -> DepthOutput | None:
        options = self.options
        if self.training and options.gates and self.progress is None:
            self.progress = 0.0
            warnings.warn(
                "adaponderlm: nobody says how far training is, so the penalty stays off and gate_only freezes nothing; "
                "add fathom.train.Phases() to the Trainer's callbacks, or set model.depth.progress before every step",
                stacklevel=2,
            )
        dense = self.training or not options.freeze_readout
        stack.flat = stack.flat and not dense
        first = embeddings * options.steps if options.premultiply_steps else embeddings
        inputs = first  # of the tokens that run
        out, passes, logits, active = embeddings, torch.zeros_like(stack.numbers), [], stack.real
        planned = self.planned(stack)
        chosen = Chosen()

        for i in range(options.steps + 1):
            h = stack.replace(inputs, chosen)
            out = chosen.put(out, h) if i and options.freeze_readout else h
            passes = chosen.put(passes, chosen.take(passes) + 1)
            if i == options.steps:
                break
            strength, stays = None, torch.ones(h.shape[:2], dtype=torch.bool, device=h.device)
            if options.gates:
                logits.append(self.gates[i](h))
                strength, stays = logits[-1].sigmoid().to(h.dtype), logits[-1] >= options.threshold_logit
            elif planned is not None:
                stays = chosen.take(planned) > i + 1
            active = stays & active if dense else active
            following = Chosen(None, active) if dense else stack.choose(chosen, stays, options.halting == "fixed")
            if following is None:
                break
            thought = vocabulary.mixture(following.from_before(h), top_k=options.top_k)
            before = following.from_before(inputs)
            inputs = before if options.accumulate else following.take(first)
            if strength is None:
                inputs = inputs + thought
            else:
                inputs = torch.addcmul(inputs, following.from_before(strength)[..., None], thought)
            if dense:  # halted tokens keep theirs
                inputs = torch.where(active[..., None], inputs, before)
            chosen = following

        if stack.cache is not None:
            stack.store_replaced(passes)
        if not stack.settled():
            return None
        if options.gates and not self.training:
            self.watch(stack.reached if not dense else int(passes.max()), passes.shape[1])
        losses = {}
        if self.training and options.gates and self.pruned_share:
            losses["penalty"] = options.penalty * self.penalty(torch.stack(logits), stack)
        return DepthOutput(out, losses, {"passes": passes})

    scores = property(lambda self: self.gates)

    def planned(self, stack) -> Tensor | None:
        """The number of passes of every token where a schedule decides it; else None."""
        if self.options.halting not in ("random", "uniform"):
            return None
        return scheduled_passes(self.options.halting, stack.position_ids, self.options.mean_passes, self.slots)

    @torch.compiler.disable  # a share that grows every step would be another graph every step
    def penalty(self, logits: Float[Tensor, "K B T"], stack) -> Float[Tensor, ""]:
        """Mean of the smallest gates of the real tokens in this batch, those of halted tokens among them."""
        values = logits.sigmoid() if self.options.penalty_on == "prob" else logits
        if self.options.penalty_on == "logit":
            values = values.clamp(min=self.options.threshold_logit - CLAMP_BELOW)
        values = values.flatten() if stack.attention_mask is None else values[:, stack.real].flatten()
        return mean_of_smallest(values, self.pruned_share)

    @classmethod
    def counts(cls, config, options, ran: tuple[float, ...] | None = None) -> Counts:
        if not options.steps:
            return Counts()
        every = (1.0,) * (options.steps + 1)
        sparse = cls.sums(config, options, every if ran is None or not options.freeze_readout else ran)
        return dataclasses.replace(sparse, parallel=cls.sums(config, options, every))

    @classmethod
    def sums(cls, config, options, ran: tuple[float, ...]) -> Counts:
        """The mean counts per token when the share ran[i] of tokens runs pass i."""
        d, v = config.hidden_size, config.vocab_size
        passes, gated = sum(ran), sum(ran[:-1]) if options.gates else 0
        thoughts = passes - 1
        # softmax over the mixed tokens (4 each); top-k sums K weighted rows of the table without a matrix product
        mixture = 4 * v if options.top_k is None else (4 + 2 * d) * options.top_k
        mixture += d if config.embed_scale != 1.0 else 0
        update = 2 * d if options.gates else d  # s·mixture, + E
        gate = (4 * d + 4 * d) + (2 * 4 * d + 1) + 1  # bias and GELU, w·x + b, σ
        return Counts(
            slots=passes,
            sweeps={1: passes},
            keys=passes,
            heads=1 + thoughts,
            matmul=gated * 2 * d * 4 * d + (0 if options.top_k else thoughts * 2 * d * v),
            elementwise=thoughts * (mixture + update) + gated * gate + (d if options.premultiply_steps else 0),
            recomputed=thoughts * 2 * d * v,  # the logits; the product with the table need not be computed again
            parameters=options.gates * (4 * d * d + 4 * d + 4 * d + 1),
        )

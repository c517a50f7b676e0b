"""ACT: adaptive computation time (Graves, arXiv 1603.08983), on the slots of Adaptive Latent CoT.

    z_{t,k+1} = F(z_{t,k}),  k = 0 … M;      exit_{t,k} = σ(w·z_{t,k} + b)
    K_t = the first k with Σ_{j≤k} exit_{t,j} ≥ 1 − ε, at most M + 1
    exit_{t,K_t} ← reach_t = 1 − Σ_{j<K_t} exit_{t,j}
    logits_t = W_out Σ_{k≤K_t} exit_{t,k} z_{t,k};     loss = CE + λ·mean_t (K_t + reach_t)

Steps, cache and visibility are those of `adaptive_latent_cot`, which runs the same model with halting="act".
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from fathom.depth.adaptive_latent_cot import AdaptiveLatentCoT
from fathom.models.registry import register


@dataclasses.dataclass(frozen=True)
class RuleOptions(AdaptiveLatentCoT.Options):
    """Options of a method with one halting rule; options of the other rules are fixed."""

    beta: ClassVar[float] = 0.0  # type: ignore[misc]
    penalty_on: ClassVar[str] = "reach"  # type: ignore[misc]
    correctness_from: ClassVar[str] = "step"  # type: ignore[misc]
    explore: ClassVar[float] = 0.0  # type: ignore[misc]
    mean_passes: ClassVar[float | None] = None  # type: ignore[misc]


@register("depth", "act")
class ACT(AdaptiveLatentCoT):
    """Latent steps until their exit probabilities add up to 1 − ε; these weight the mixture of states."""

    summary = "Latent steps until their exit probabilities add up to one (adaptive computation time)."
    equation = "exit_k = σ(w·z_k + b) until Σ exit ≥ 1 − ε;  logits = W_out Σ_k exit_k z_k;  loss = CE + λ·(K + reach)"
    paper = "1603.08983"
    variants = ({"steps": 2, "threshold": 0.2, "router_bias": 0.0},)

    @dataclasses.dataclass(frozen=True)
    class Options(RuleOptions):
        """Options of ACT; the defaults are those that docs/results/adaptive.md measures.

        threshold: ε; a token goes on while more than this is left.
        penalty: λ, the price of a step.
        """

        threshold: float = 0.01
        penalty: float = 0.01
        router_bias: float = -1.0
        halting: ClassVar[str] = "act"  # type: ignore[misc]
        method: ClassVar[str] = "act"

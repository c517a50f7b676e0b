"""The exit gate of Ouro (arXiv 2510.25741), on the slots of Adaptive Latent CoT.

    z_{t,k+1} = F(z_{t,k}),  k = 0 … M;      λ_{t,k} = σ(w·z_{t,k} + b)
    exit_{t,k} = λ_{t,k} Π_{j<k} (1 − λ_{t,j}),   the last takes what is left
    training:   mean_t Σ_k exit_{t,k}·CE(W_out z_{t,k}) − β·H(exit_t),  all M + 1 steps run
    inference:  logits_t = W_out z_{t,K_t},   K_t = the first k with Σ_{j≤k} exit_{t,j} ≥ q

Steps, cache and visibility are those of `adaptive_latent_cot`, which runs the same model with halting="exit_gate". The
paper instead loops the layers at a token's own slot.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from fathom.depth.act import RuleOptions
from fathom.depth.adaptive_latent_cot import AdaptiveLatentCoT
from fathom.models.registry import register


@register("depth", "exit_gate")
class ExitGate(AdaptiveLatentCoT):
    """Latent steps that are all trained to predict; at inference the first whose exit mass reaches q predicts."""

    summary = "Latent steps that all learn to predict; a gate says which one is read (Ouro's early exit)."
    equation = (
        "exit_k = λ_k Π_{j<k} (1 − λ_j),  λ_k = σ(w·z_k + b);  "
        "loss = Σ_k exit_k·CE(z_k) − β·H(exit);  reads the first k with Σ_{j≤k} exit_j ≥ q"
    )
    paper = "2510.25741"
    variants = ({"steps": 2, "threshold": 0.5, "router_bias": 0.0},)

    @dataclasses.dataclass(frozen=True)
    class Options(RuleOptions):
        """Options of the exit gate; the defaults are those that docs/results/adaptive.md measures.

        threshold: 1 − q; at inference a token goes on while more exit mass than this is left.
        penalty: β, the weight of the entropy of the exits.
        """

        threshold: float = 0.2
        penalty: float = 0.1
        router_bias: float = -1.0
        halting: ClassVar[str] = "exit_gate"  # type: ignore[misc]
        method: ClassVar[str] = "exit_gate"

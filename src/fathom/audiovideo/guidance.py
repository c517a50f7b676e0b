"""Guidance by text T and by the bridge B, which makes the two streams follow each other more closely.

    ṽ = v(∅,∅) + s_B [v(∅,B) − v(∅,∅)] + s_T [v(T,B) − v(∅,B)]
      = (1 − s_B) v(∅,∅) + (s_B − s_T) v(∅,B) + s_T v(T,B)

A branch whose weight is 0 is not evaluated, so that one formula has all cases: s_T = s_B = 1 is the model itself (1
evaluation), s_B = 1 guidance by text (2), s_B = s_T the step from neither to both (2), and all others are dual (3).
∅ for text is the negative prompt, ∅ for the bridge the same forward without what the bridge adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Pair = tuple[Tensor, Tensor]  # of video and audio


class Branch(NamedTuple):
    """One evaluation: its weight in ṽ, and whether text and bridge are on."""

    weight: float
    text: bool
    bridge: bool


def branches(text_scale: float, bridge_scale: float) -> tuple[Branch, ...]:
    """The evaluations of a step, those with weight 0 left out."""
    every = (
        Branch(1.0 - bridge_scale, False, False),
        Branch(bridge_scale - text_scale, False, True),
        Branch(text_scale, True, True),
    )
    return tuple(branch for branch in every if branch.weight)


def guided(
    evaluate: Callable[[tuple[Branch, ...]], list[Pair]], text_scale: float, bridge_scale: float, batched: bool
) -> Pair:
    """ṽ of both modalities. `evaluate` returns the velocities of some branches.

    batched: evaluate all branches at once, with the memory of as many clips; else one after the other.
    """
    asked = branches(text_scale, bridge_scale)
    found = evaluate(asked) if batched else [pair for branch in asked for pair in evaluate((branch,))]
    video, audio = (
        sum(branch.weight * pair[modality] for branch, pair in zip(asked, found, strict=True)) for modality in (0, 1)
    )
    return video, audio  # type: ignore[return-value]

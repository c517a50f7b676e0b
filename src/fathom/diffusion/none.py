"""No diffusion: the ordinary language model, which predicts the next token."""

from __future__ import annotations

from typing import Any, ClassVar

from fathom.diffusion.base import Objective
from fathom.models.registry import register


@register("diffusion", "none")
class NoDiffusion(Objective):
    """The model predicts the next token."""

    summary = "The model predicts the next token, from left to right."
    equation = "p(x) = Π_j p(x_j | x_<j)"
    identity: ClassVar[dict[str, Any]] = {}

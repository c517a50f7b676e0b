"""One forward of the stack per token: the ordinary decoder, the baseline of every comparison."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from fathom.depth.base import Counts, DepthMethod, DepthOutput
from fathom.models.registry import register


@register("depth", "vanilla")
class Vanilla(DepthMethod):
    """h = F(E)."""

    summary = "The ordinary decoder: one forward of the layer stack per token."
    equation = "logits = F(c·W_in[x]) W_outᵀ"
    identity: ClassVar[dict[str, Any]] = {}

    @dataclasses.dataclass(frozen=True)
    class Options:
        """No options."""

        passes: ClassVar[int] = 1

    @classmethod
    def unsupported(cls, config, options):
        return None

    def forward(self, stack, embeddings, vocabulary) -> DepthOutput:
        return DepthOutput(stack(embeddings))

    @classmethod
    def counts(cls, config, options) -> Counts:
        return Counts()

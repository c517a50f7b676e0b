"""FastV (arXiv 2403.06764): after two layers of the language model, leave out what the prompt attends to least."""

from __future__ import annotations

import dataclasses

from fathom.vision.base import LanguageCompressor


@dataclasses.dataclass(frozen=True)
class FastV(LanguageCompressor):
    """The first `layer` layers read every vision token; those after it the m that the prompt's last token attends to
    most in that layer, in the mean over heads. Ties: the earlier token.

    layer: K, counted from 1.
    """

    layer: int = 2

    name = "fastv"
    paper = "An Image is Worth 1/2 Tokens After Layer 2, arXiv 2403.06764"
    summary = "After layer K of the language model keep the vision tokens that the last token attends to most."
    equation = "S = top_m mean_heads A_K[last, :], for layers K+1 … L"
    invariants = ("identity", "linear", "channels", "scale", "subset")

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.layer) is not int or self.layer < 1:
            raise self.refuse("layer", self.layer, "use a whole number of at least 1")

    def stages(self, tokens, layers):
        if self.layer >= layers:
            raise self.refuse("layer", self.layer, f"the language model has {layers} layers; use less")
        return {self.layer - 1: self.tokens}

    def keep(self, scores, states, count):
        index = scores.argsort(descending=True, stable=True)[:count].sort().values
        return index, states[index]

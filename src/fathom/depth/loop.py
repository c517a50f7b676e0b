"""Loop: the whole layer stack applied R times to the hidden states (looped / universal transformer baseline).

    h_0 = E (+ positions);   h_r = layers(h_{r−1}),  r = 1 … R;   output = norm(h_R)

As in the PonderLM papers, a pass starts from the last one's state, with no input re-injection and no norm between
passes; positions are the same in every pass; the final norm is applied once. Every pass keeps its own keys and values,
so cached decoding equals the full forward. (The papers' baseline scales embeddings by √(2.5·d): config field
`embed_scale`.)
"""

from __future__ import annotations

import dataclasses

from fathom.depth.base import Counts, DepthMethod, DepthOutput, check_range
from fathom.models.registry import register


@register("depth", "loop")
class Loop(DepthMethod):
    """h ← layers(h), `passes` times, then the final norm."""

    summary = "The whole layer stack applied `passes` times to the hidden states."
    equation = "h_0 = E;  h_r = layers(h_{r−1}),  r = 1 … R;  logits = norm(h_R) W_outᵀ"
    paper = "1807.03819"
    variants = ({"passes": 3},)
    identity = {"passes": 1}  # noqa: RUF012

    @dataclasses.dataclass(frozen=True)
    class Options:
        """passes: total forwards of the stack per token, at least 1."""

        passes: int = 4

        def __post_init__(self):
            check_range("loop", "passes", self.passes, 1)

    def forward(self, stack, embeddings, vocabulary) -> DepthOutput:
        hidden_states = stack.add_positions(embeddings)
        for r in range(self.options.passes):
            hidden_states = stack.layers(hidden_states, pass_index=r)
        return DepthOutput(stack.normalize(hidden_states))

    @classmethod
    def counts(cls, config, options) -> Counts:
        return Counts(passes=options.passes, final_norms=1)

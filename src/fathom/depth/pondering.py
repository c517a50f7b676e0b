"""PonderLM: pondering in continuous space (arXiv 2505.20674).

    E_0 = c·W_in[x]                       (× s with premultiply_steps)
    for i = 0 … s−1:
        P_i     = softmax(F(E_i) W_outᵀ)          [B, T, V]
        E_{i+1} = E_i + P_i (c·W_in)              (E_0 + … with accumulate=False)
    logits = F(E_s) W_outᵀ;   loss on the last pass only

No parameters are added and nothing is detached. Every pass keeps its own keys and values (cache layer i·L + ℓ), which
makes cached decoding equal to recomputing the sequence; the authors' code has no cached decoding.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from fathom.depth.base import Counts, DepthMethod, DepthOutput, check_choice, check_range, draw_for_all_ranks
from fathom.models.registry import register


@register("depth", "pondering")
class Pondering(DepthMethod):
    """s extra forwards, each fed the expected embedding of the prediction before it."""

    summary = "Extra forwards on the probability-weighted mixture of token embeddings."
    equation = "E_{i+1} = E_i + softmax(F(E_i) W_outᵀ)·(c·W_in),  i = 0 … s−1;  logits = F(E_s) W_outᵀ"
    paper = "2505.20674"
    variants = (
        {"steps": 2},
        {"steps": 2, "top_k": 5, "premultiply_steps": True, "scale_embeds": True},
        {"steps": 2, "accumulate": False, "feedback": "hidden_linear"},
    )
    identity = {"steps": 0, "scale_embeds": None}  # noqa: RUF012

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of PonderLM; the defaults are the paper's.

        steps: extra forwards s (the total is s + 1); 0 is the ordinary decoder.
        top_k: mix only the k likeliest tokens, renormalised; None mixes the whole vocabulary. Ties: lower id first.
        scale_embeds: True sets the decoder's embed_scale to √d, False to 1; None leaves it.
        premultiply_steps: start from s·E_0.
        accumulate: E_{i+1} = E_i + mixture; False keeps only the newest mixture, E_0 + mixture.
        feedback: "mixture", or the paper's ablations "hidden" (last hidden state) and "hidden_linear" (W·hidden).
        temperature: divides the logits of the mixture.
        softmax_dtype: "float32" (or wider), or "model" for parity with the authors' code.
        random_steps: in training, draw the number of steps uniformly from 1 … steps, once for all ranks.
        """

        steps: int = 3
        top_k: int | None = None
        scale_embeds: bool | None = None
        premultiply_steps: bool = False
        accumulate: bool = True
        feedback: str = "mixture"
        temperature: float = 1.0
        softmax_dtype: str = "float32"
        random_steps: bool = False

        def __post_init__(self):
            check_range("pondering", "steps", self.steps, 0)
            if self.top_k is not None:
                check_range("pondering", "top_k", self.top_k, 1)
            check_choice("pondering", "feedback", self.feedback, ("mixture", "hidden", "hidden_linear"))
            check_choice("pondering", "softmax_dtype", self.softmax_dtype, ("float32", "model"))
            if not 0 < self.temperature < float("inf"):
                raise ValueError(f"pondering option temperature={self.temperature!r}: must be positive and finite")

        @property
        def passes(self) -> int:
            return self.steps + 1

    def __init__(self, config, options):
        super().__init__(config, options)
        if options.feedback == "hidden_linear" and options.steps:  # without steps it would never have a gradient
            self.feedback_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    @classmethod
    def unsupported(cls, config, options):
        if options.top_k is not None and options.top_k > config.vocab_size:
            return f"top_k={options.top_k} exceeds vocab_size={config.vocab_size}"
        return super().unsupported(config, options)

    def forward(self, stack, embeddings, vocabulary) -> DepthOutput:
        steps = (
            self.draw_steps(embeddings.device) if self.training and self.options.random_steps else self.options.steps
        )
        if self.options.premultiply_steps and steps:
            embeddings = embeddings * steps
        first = embeddings
        for i in range(steps):
            thought = self.feedback(stack(embeddings, pass_index=i), vocabulary)
            embeddings = (embeddings if self.options.accumulate else first) + thought
        return DepthOutput(stack(embeddings, pass_index=steps))

    def feedback(self, hidden_states, vocabulary):
        if self.options.feedback == "mixture":
            return vocabulary.mixture(
                hidden_states,
                top_k=self.options.top_k,
                temperature=self.options.temperature,
                wide=self.options.softmax_dtype == "float32",
            )
        if self.options.feedback == "hidden_linear":
            return self.feedback_proj(hidden_states)
        return hidden_states

    def draw_steps(self, device: torch.device) -> int:
        """Uniform on 1 … steps, the same on all ranks."""
        return draw_for_all_ranks(min(1, self.options.steps), self.options.steps, device)

    @classmethod
    def counts(cls, config, options) -> Counts:
        s, d, v = options.steps, config.hidden_size, config.vocab_size
        premultiply = d if options.premultiply_steps and s else 0
        if options.feedback == "mixture":
            # softmax over the mixed tokens (4 each); top-k sums K weighted rows of the table without a matrix product
            mixture = 4 * v if options.top_k is None else (4 + 2 * d) * options.top_k
            mixture += v if options.temperature != 1.0 else 0
            mixture += d if config.embed_scale != 1.0 else 0
            return Counts(
                passes=s + 1,
                heads=1 + s,
                matmul=0 if options.top_k else s * 2 * d * v,
                elementwise=s * (mixture + d) + premultiply,
                recomputed=s * 2 * d * v,  # the logits; the product with the table need not be computed again
            )
        linear = d * d if options.feedback == "hidden_linear" and s else 0
        return Counts(passes=s + 1, matmul=s * 2 * linear, elementwise=s * d + premultiply, parameters=linear)

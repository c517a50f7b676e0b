"""Masked diffusion (LLaDA, arXiv 2502.09992; MDLM, arXiv 2406.07524): writing by filling in hidden tokens.

    t ~ U(0, 1);   every token is hidden with probability t;   the model predicts hidden tokens from all others

    −log p(x) ≤ E_t E_hidden [ 1/t · Σ_{j hidden} −log p(x_j | the others) ]

so it is a generative model; t is no input. A model adapted from an autoregressive one may keep that model's `shift`:
the state of token j − 1 predicts token j (Dream, arXiv 2508.15487). The task `masked_diffusion` trains it;
`fathom.diffusion` samples and scores it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fathom.diffusion.base import Objective
from fathom.models.registry import register


@register("diffusion", "masked")
class Masked(Objective):
    """The model predicts hidden tokens of a row from all of its other tokens."""

    summary = "The model predicts hidden tokens from all others of the row, so text is filled in any order."
    equation = "−log p(x) ≤ E_t E_hidden [1/t · Σ_{j hidden} −log p(x_j | tokens not hidden)]"
    paper = "2502.09992"
    variants = ()  # the suite of causal language models does not run it: tests/diffusion

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options:

        mask_token_id: the token that stands for a hidden one.
        shift: the state of token j − 1 predicts token j, as in the autoregressive model it was adapted from.
        """

        mask_token_id: int | None = None
        shift: bool = False

    @classmethod
    def unsupported(cls, config, options):
        if options.mask_token_id is None:
            return f"mask_token_id=None: name the mask token, an id below vocab_size={config.vocab_size}"
        if not 0 <= options.mask_token_id < config.vocab_size:
            return f"mask_token_id={options.mask_token_id}: must be below vocab_size={config.vocab_size}"
        special = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
        for name, value in special.items():
            if options.mask_token_id in (value if isinstance(value, list) else [value]):
                return f"mask_token_id={options.mask_token_id} is {name}: use a token that no text has"
        return None

    @staticmethod
    def generate(model: Any, inputs: Any, attention_mask: Any, generation_config: Any, **options: Any) -> Any:
        from fathom.diffusion.sampling import generate

        return generate(model, inputs, attention_mask, generation_config, **options)

"""`FathomForMaskedDiffusion`: the decoder as a masked diffusion language model, which fills hidden tokens of a row.

Every token sees all of its row. A hidden token is written as the mask token, and the model says what it was.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import can_return_tuple

from fathom.models.causal_lm import FathomForCausalLM, slice_positions
from fathom.models.checkpoints import diffusion as diffusion_checkpoints
from fathom.models.checkpoints.stock import FIELDS, check_names
from fathom.models.configuration import FathomConfig
from fathom.models.hf_versions import FathomOutput
from fathom.models.registry import build_options, lookup
from fathom.ops.cross_entropy import IGNORE


class FathomForMaskedDiffusion(FathomForCausalLM):
    """p(x_j | the tokens of the row that are not hidden) for every position j, from one forward pass.

        h = depth(stack, E);   logits_j = h_j W_outᵀ        (`shift`: h_{j−1} W_outᵀ, and for j = 0 that of h_0)

    The config's section `diffusion` names the mask token and says whether predictions are shifted. `from_pretrained`
    and `save_stock_pretrained` work as of FathomForCausalLM; a stock checkpoint of an autoregressive model is adapted
    by `diffusion={"name": "masked", "mask_token_id": …, "shift": True}`.
    """

    predicts = ("masked",)

    def __init__(self, config: FathomConfig):
        super().__init__(config)
        self.objective: Any = lookup("diffusion", config.diffusion["name"])
        self.diffusion = build_options("diffusion", config.diffusion)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As of FathomForCausalLM; checkpoints of LLaDA and Dream in their authors' layouts load too, without their
        code (checkpoints/diffusion.py)."""
        path = pretrained_model_name_or_path
        if path is None or isinstance(kwargs.get("config"), FathomConfig):
            return super().from_pretrained(path, *args, **kwargs)
        changes = {name: kwargs[name] for name in FIELDS if name in kwargs}
        found = diffusion_checkpoints.load(path, changes)
        if found is None:
            return super().from_pretrained(path, *args, **kwargs)
        config, state = found
        kind = {"dtype": config.dtype, **{name: value for name, value in kwargs.items() if name not in changes}}
        model, report = PreTrainedModel.from_pretrained.__func__(  # type: ignore[attr-defined]
            cls, None, config=config, state_dict=state, output_loading_info=True, **kind
        )
        check_names(path, report["missing_keys"], report["unexpected_keys"])
        return model

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "B T"] | None = None,
        inputs_embeds: Float[Tensor, "B T d"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        loss_weights: Float[Tensor, "B T"] | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> FathomOutput:
        """As of FathomForCausalLM, without a cache. `logits[:, j]` are of token j, whatever `shift` says.

        labels: the true token of every position that the loss is of, −100 elsewhere; nothing is shifted. With `shift`
            token 0, which no token precedes, is left out.
        loss_weights: factor of every label's loss. The loss is Σ weight · (−log p) / number of labels, or divided by
            `num_items_in_batch`.
        """
        if kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None:
            raise ValueError(
                "past_key_values: a diffusion model's tokens see later ones, so no cache of earlier ones is exact; "
                "generate() takes a block_cache"
            )
        kwargs.update(use_cache=False, return_dict=True)
        if labels is not None:
            shift = self.diffusion.shift
            kwargs["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORE) if shift else labels
            if loss_weights is not None:
                kwargs["loss_scales"] = F.pad(loss_weights[:, 1:], (0, 1)) if shift else loss_weights
        out = super().forward(
            input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds,
            num_items_in_batch=num_items_in_batch, **kwargs,
        )  # fmt: skip
        if out.logits is not None:
            if self.diffusion.shift:
                out.logits = torch.cat([out.logits[:, :1], out.logits[:, :-1]], dim=1)
            out.logits = slice_positions(out.logits, logits_to_keep)
        return out

    @torch.no_grad()
    def generate(  # type: ignore[override]
        self,
        inputs: Int[Tensor, "B P"] | None = None,
        attention_mask: Int[Tensor, "B P"] | None = None,
        generation_config: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Continue prompts, or fill in masks, by the sampler of fathom.diffusion: see `DiffusionGenerationConfig`,
        whose fields may also be given as keyword arguments."""
        if inputs is None:
            inputs = kwargs.pop("input_ids", None)
        return self.objective.generate(self, inputs, attention_mask, generation_config, **kwargs)

"""`FathomForMaskedDiffusion`: the decoder as a masked diffusion language model, which fills hidden tokens of a row.

Every token sees its whole row, or with `diffusion: block` its block and all earlier ones. A hidden token is replaced by
the mask token, and the model predicts what it was.
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
from fathom.models.checkpoints.stock import FIELDS, check_names, forget_path
from fathom.models.configuration import FathomConfig
from fathom.models.hf_versions import FathomOutput
from fathom.models.registry import build_options, lookup
from fathom.ops.cross_entropy import IGNORE
from fathom.ops.visibility import Blocks, TwoStreams, Visibility


class FathomForMaskedDiffusion(FathomForCausalLM):
    """p(x_j | the tokens of the row that are not hidden) for every position j, from one forward pass.

        h = depth(stack, E);   logits_j = h_j W_outᵀ        (`shift`: h_{j−1} W_outᵀ, and for j = 0 that of h_0)

    The config's section `diffusion` names the mask token and says whether predictions are shifted. `from_pretrained`
    and `save_stock_pretrained` work as in FathomForCausalLM. A stock checkpoint of an autoregressive model is adapted
    by `diffusion={"name": "masked", "mask_token_id": …, "shift": True}`.
    """

    predicts = ("masked", "block")

    def __init__(self, config: FathomConfig):
        super().__init__(config)
        self.objective: Any = lookup("diffusion", config.diffusion["name"])
        self.diffusion = build_options("diffusion", config.diffusion)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in FathomForCausalLM. Checkpoints of LLaDA and Dream in their authors' layouts load too, without their
        code (checkpoints/diffusion.py).
        """
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
        forget_path(model)
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
        clean_ids: Int[Tensor, "B T"] | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> FathomOutput:
        """As in FathomForCausalLM, without a cache. `logits[:, j]` predict token j, with and without `shift`.

        labels: the true token at every position that the loss counts, −100 elsewhere; nothing is shifted. With `shift`
            token 0 is left out, as no token precedes it.
        loss_weights: factor of every label's loss. The loss is Σ weight · (−log p) / number of labels, or /
            `num_items_in_batch` where that is given.
        clean_ids: for block diffusion, the row without hidden tokens. A block of `input_ids` sees earlier blocks of
            `clean_ids`, so that all blocks are predicted in one pass. Rows may be padded on the right only.
        """
        if kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None:
            raise ValueError(
                "past_key_values: a diffusion model's tokens see later ones, so no cache of earlier ones is exact; "
                "generate() takes a block_cache"
            )
        kwargs.update(use_cache=False, return_dict=True)
        if clean_ids is not None:
            input_ids, attention_mask, position_ids, kwargs["visibility"] = self.two_streams(
                input_ids, clean_ids, attention_mask, position_ids
            )
            kwargs["scored_tokens"] = clean_ids.shape[1]
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

    def bind_stack(
        self,
        embeddings: Float[Tensor, "B T d"],
        attention_mask: Any,
        position_ids: Int[Tensor, "B T"] | None,
        cache: Any,
        layer_kwargs: dict[str, Any],
        visibility: Visibility | None = None,
    ) -> Any:
        """As in FathomForCausalLM; tokens of a block diffusion model see their block and earlier ones."""
        if visibility is None and self.config.diffusion["name"] == "block":
            visibility = Blocks(self.diffusion.block_length)
        return super().bind_stack(embeddings, attention_mask, position_ids, cache, layer_kwargs, visibility)

    def two_streams(
        self,
        noisy: Any,
        clean: Int[Tensor, "B T"],
        attention_mask: Int[Tensor, "B T"] | None,
        position_ids: Int[Tensor, "B T"] | None,
    ) -> tuple[Int[Tensor, "B 2T"], Int[Tensor, "B 2T"], Int[Tensor, "B 2T"], TwoStreams]:
        """Ids, mask, positions (equal in both copies) and visibility of the doubled row [noisy | clean]."""
        if self.config.diffusion["name"] != "block":
            raise ValueError("clean_ids: tokens of diffusion='masked' see all of their row; leave it out")
        if noisy is None or noisy.shape != clean.shape:
            raise ValueError(f"clean_ids of shape {list(clean.shape)}: must be that of input_ids, which hold the masks")
        length = clean.shape[1]
        if attention_mask is None:
            if position_ids is not None:
                raise ValueError("position_ids with clean_ids: packed documents are not kept apart; use rows of one")
            attention_mask = torch.ones_like(clean)
        elif attention_mask.shape != clean.shape or not right_padded(attention_mask):
            raise ValueError("attention_mask with clean_ids: must be [rows, tokens], with padding on the right alone")
        if position_ids is None:
            position_ids = torch.arange(length, device=clean.device).expand_as(clean)
        both = [torch.cat([x, x], dim=1) for x in (attention_mask, position_ids)]
        return torch.cat([noisy, clean], dim=1), both[0], both[1], TwoStreams(self.diffusion.block_length, length)

    @torch.no_grad()
    def generate(  # type: ignore[override]
        self,
        inputs: Int[Tensor, "B P"] | None = None,
        attention_mask: Int[Tensor, "B P"] | None = None,
        generation_config: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Token ids of continued prompts, or of rows with their masks filled in, by fathom.diffusion's sampler.

        Fields of `DiffusionGenerationConfig` may also be given as keyword arguments.
        """
        if inputs is None:
            inputs = kwargs.pop("input_ids", None)
        return self.objective.generate(self, inputs, attention_mask, generation_config, **kwargs)


def right_padded(attention_mask: Int[Tensor, "B T"]) -> bool:
    """Whether every row begins with a token and has padding only at its end."""
    real = attention_mask.bool()
    return bool((real[:, 0] & (real[:, 1:] <= real[:, :-1]).all(1)).all())

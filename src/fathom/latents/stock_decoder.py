"""The decoder of a stock encoder-decoder (T5, BART) as the contextual decoder: it reads W z instead of encoder states.

Its cross-attention has no positions, so a row of the memory is found by its content, or with
`memory_positions="learned"` by a table added to the memory. transformers' own cache keeps the memory's keys and values,
computed once. The stock encoder is dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from fathom.latents.codar import CoDAR
from fathom.latents.encoder import tied_below
from fathom.ops.cross_entropy import IGNORE

ENCODER_LAYERS = {"t5": "block", "bart": "layers"}  # by model type


@dataclasses.dataclass(frozen=True)
class StockMemory:
    """The vectors in place of an encoder's output.

    Attributes:
        states: [B, L, d].
        mask: rows that are seen, [B, L]; None: all.
    """

    states: Float[Tensor, "B L d"]
    mask: Bool[Tensor, "B L"] | None


class StockDecoder(nn.Module):
    """A stock decoder with `read`, `forward`, `reading` and `generate` as in `ContextualDecoder`. It always needs a
    memory, and prompts of a batch must have equal lengths.
    """

    def __init__(self, config: Any, width: int, options: CoDAR, length: int):
        super().__init__()
        if config.model_type not in ENCODER_LAYERS:
            known = ", ".join(ENCODER_LAYERS)
            raise ValueError(f"decoder: model_type={config.model_type!r}: stock decoders are {known}, or leave it out")
        if options.memory_positions == "rotary" or options.diagonal:
            named = "diagonal=True" if options.diagonal else "memory_positions='rotary'"
            raise ValueError(f"codar option {named}: a stock decoder has no place for it; use 'learned' or 'none'")
        self.config, self.memory = config, None
        self.model = AutoModelForSeq2SeqLM.from_config(config)
        setattr(self.model.get_encoder(), ENCODER_LAYERS[config.model_type], nn.ModuleList())
        self.all_tied_weights_keys = tied_below("model", self.model)
        self.model.generation_config.eos_token_id = self.model.generation_config.forced_eos_token_id = None
        self.project = nn.Linear(width, config.d_model)
        self.places = nn.Embedding(length, config.d_model) if options.memory_positions == "learned" else None

    def read(self, z: Float[Tensor, "B L k"], mask: Bool[Tensor, "B L"] | None = None) -> StockMemory:
        """The memory of vectors."""
        states = self.project(z.to(self.project.weight.dtype))
        if self.places is not None:
            states = states + self.places.weight[: z.shape[1]]
        return StockMemory(states, mask)

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        memory: StockMemory | None = None,
        shift_labels: Int[Tensor, "B T"] | None = None,
        num_items_in_batch: Any = None,
        use_cache: bool = False,
    ) -> Seq2SeqLMOutput:
        """Logits [:, i] of token i, and the loss of `shift_labels`, the tokens themselves."""
        memory = self.memory if memory is None else memory
        if memory is None:
            raise ValueError("memory=None: a stock decoder reads vectors; use our blocks for a language model")
        logits = self.model(decoder_input_ids=input_ids, use_cache=use_cache, **self._given(memory)).logits
        loss = None
        if shift_labels is not None:
            targets = shift_labels.flatten()
            total = F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=IGNORE, reduction="sum")
            own = (targets != IGNORE).sum().clamp(min=1)
            loss = total / (own if num_items_in_batch is None else num_items_in_batch)
        return Seq2SeqLMOutput(loss=loss, logits=logits)

    @contextlib.contextmanager
    def reading(self, memory: StockMemory | None) -> Iterator[None]:
        """A context in which forward and generate() read this memory."""
        before, self.memory = self.memory, memory  # type: ignore[assignment]
        try:
            yield
        finally:
            self.memory = before

    def generate(self, input_ids: Int[Tensor, "B P"], attention_mask: Tensor, **options: Any) -> Int[Tensor, "B T"]:
        """As in transformers, from the decoder's own tokens. Raises ValueError for padded prompts."""
        if not bool(attention_mask.bool().all()):
            raise ValueError("attention_mask: a stock decoder reads prompts of one length; give rows one by one")
        assert self.memory is not None
        return self.model.generate(decoder_input_ids=input_ids, **self._given(self.memory), **options)

    @staticmethod
    def _given(memory: StockMemory) -> dict[str, Any]:
        mask = None if memory.mask is None else memory.mask.long()
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=memory.states), "attention_mask": mask}

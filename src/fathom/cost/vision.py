"""Cost of LLaVA models whose vision tokens are compressed: FLOPs by torch's counter on the meta device, bytes in closed
form."""

from __future__ import annotations

import copy
import functools
import json
from collections import Counter
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel

from fathom.vision import from_dict
from fathom.vision.base import LanguageCompressor


def patch_grid(config: Any, side: int) -> tuple[int, int]:
    """Rows and columns of patches of a square picture. Raises ValueError if its side is no multiple of a patch."""
    patch = config.vision_config.patch_size
    if side % patch:
        raise ValueError(
            f"side={side}: no whole number of patches of {patch} pixels; use {side - side % patch or patch}"
        )
    return side // patch, side // patch


def vision_tokens(config: Any, side: int) -> int:
    """Vision tokens that a language model reads of a square picture. Raises ValueError where the grid has too few."""
    return from_dict(config.vision_compress).count(patch_grid(config, side))  # type: ignore[attr-defined]


def kv_bytes(config: Any, side: int, text_tokens: int, dtype: torch.dtype) -> float:
    """Σ over layers of 2 · Hkv · d numbers for each vision token that the layer reads and each token of the text, whose
    image token the picture replaces."""
    text = config.text_config
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    method: Any = from_dict(config.vision_compress)  # type: ignore[attr-defined]
    read = method.read(patch_grid(config, side), text.num_hidden_layers)
    return 2.0 * text.num_key_value_heads * width * dtype.itemsize * sum(tokens + text_tokens - 1 for tokens in read)


def llava_flops(config: Any, side: int, text_tokens: int) -> dict[str, float]:
    """FLOPs of one forward on a picture and a text, its image token included: `tower`, `projector` with the compressor,
    and `language` with the head on the text: each layer as one that reads so many tokens."""
    kind: Any = type(config)
    return dict(_counted(json.dumps(config.to_dict(), default=str), kind, side, text_tokens))


@functools.cache
def _counted(written: str, kind: Any, side: int, text_tokens: int) -> tuple[tuple[str, float], ...]:
    from fathom.vision.checkpoints import FathomLlavaForConditionalGeneration

    config = kind.from_dict(json.loads(written))
    grid = patch_grid(config, side)
    method: Any = from_dict(config.vision_compress)  # type: ignore[attr-defined]
    read = method.read(grid, config.text_config.num_hidden_layers)
    stock = kind.from_dict({**config.to_dict(), "vision_compress": {"name": "all_tokens"}})
    empty, one_layer = copy.copy(config.text_config), copy.copy(config.text_config)
    empty.num_hidden_layers, one_layer.num_hidden_layers = 0, 1
    with torch.device("meta"), torch.no_grad():
        model: Any = FathomLlavaForConditionalGeneration(
            stock if isinstance(method, LanguageCompressor) else config
        ).eval()
        without, layer = (AutoModel.from_config(text).eval() for text in (empty, one_layer))
        found = {}
        with FlopCounterMode(display=False) as counter:
            states = model.model.vision_tower(torch.empty(1, 3, side, side), output_hidden_states=True).hidden_states
        found["tower"] = float(counter.get_total_flops())
        with FlopCounterMode(display=False) as counter:
            model.model.multi_modal_projector(states[config.vision_feature_layer][:, 1:])
        found["projector"] = float(counter.get_total_flops())
        with FlopCounterMode(display=False) as counter:
            model.lm_head(torch.empty(1, text_tokens, config.text_config.hidden_size))
        found["language"] = float(counter.get_total_flops())
        found["language"] += _run(without, read[0] + text_tokens - 1)
        for tokens, layers in Counter(read).items():
            length = tokens + text_tokens - 1
            found["language"] += layers * (_run(layer, length) - _run(without, length))
    return tuple(found.items())


def _run(model: Any, length: int) -> float:
    """FLOPs of one forward of a language model on the meta device, without its head."""
    mask = torch.empty(1, 1, length, length)  # without one, transformers would look for packed documents
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=torch.empty(1, length, model.config.hidden_size), attention_mask=mask)
    return float(counter.get_total_flops())

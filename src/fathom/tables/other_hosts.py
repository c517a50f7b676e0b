"""RASAT's relations in other models than T5: encoders of BERT's form and the prompts of causal decoders. Ours.

    s_ij = c·q_i·(k_j + E_K[R_ij]) + mask,   a = softmax_j s,   o_i = Σ_j a_ij (v_j + E_V[R_ij])

The paper has only T5's encoder. A decoder reads its prompt with relations, and writes without: its own tokens have no
relation to others (id 0, a zero vector), so a cached step is ordinary attention.
Where positions are rotary, q is rotated before it meets E_K, so s depends on the place of token i itself; padding has
no place, as in `generate`.

    related = relate(model, {"name": "rasat", "init": "zero"})     # a model of transformers, BertModel or a Llama
    with related.reads(relation_ids):                              # [B, T, T] of the prompts
        model.generate(**inputs)
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from fathom.models.registry import RELATIONS, build_options, lookup, resolve_section
from fathom.models.seq2seq_t5 import check_ids
from fathom.ops.relation_attention import relation_attention

NAME = "fathom_relations"  # of the attention in transformers' registry
_FILE, _OPTIONS = "relations.safetensors", "relations.json"


class Related(nn.Module):
    """E_K and E_V of one model, and the relations that it reads now. `relate` makes it a part of the model, so that its
    tables train with the model's other parameters.

    Attributes:
        section: `{"name": …, options}`.
    """

    def __init__(self, model: PreTrainedModel, section: Any):
        super().__init__()
        self.section = resolve_section(RELATIONS, section)
        method: Any = lookup(RELATIONS, self.section["name"])
        self.options = build_options(RELATIONS, self.section)
        if method.numbering(self.options) is None:
            raise ValueError(f"relations={self.section['name']!r}: has no tables; a model is so without `relate`")
        config = model.config
        self.width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        with torch.device(model.device):
            self.method = method(_Width(self.width), self.options).to(model.dtype)
            for table in self.method.children():
                table.initialize_parameters()
        self.ids: Tensor | None = None

    @contextlib.contextmanager
    def reads(self, relation_ids: Tensor) -> Iterator[None]:
        """A context in which the model uses these ids [B, T, T] whenever it reads T tokens at once.

        They are of the prompts for `generate`, of whole texts for a forward in training and for its backward pass where
        activations are recomputed. Id 0 is no relation, for tokens of an answer and padding.
        """
        if relation_ids.ndim != 3:
            raise ValueError(f"relation_ids of shape {tuple(relation_ids.shape)}: must be [texts, tokens, tokens]")
        shape = (relation_ids.shape[0], relation_ids.shape[1])
        check_ids(relation_ids, shape, len(self.method.tables()[0]))
        before = self.ids
        # looked up as int64 by every layer, which keeps them for its backward pass: one tensor for all of them
        self.ids = relation_ids.to(self.method.tables()[0].device).long()
        try:
            yield
        finally:
            self.ids = before

    def save_pretrained(self, folder: str | Path) -> None:
        """The tables and their options, beside the model's own files."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.method.state_dict().items()}, Path(folder) / _FILE)
        (Path(folder) / _OPTIONS).write_text(json.dumps(self.section), encoding="utf-8")

    def load(self, folder: str | Path) -> None:
        """The tables that `save_pretrained` wrote. Raises ValueError for tables of other relations."""
        stored = json.loads((Path(folder) / _OPTIONS).read_text(encoding="utf-8"))
        if stored != self.section:
            raise ValueError(
                f"{folder}: has tables of relations={stored}; call relate() with these, not {self.section}"
            )
        self.method.load_state_dict(load_file(Path(folder) / _FILE))


class _Width:
    """The fields of a config that a method reads."""

    host = "t5"

    def __init__(self, width: int):
        self.d_kv = width


def relate(model: PreTrainedModel, relations: Any) -> Related:
    """Tables of relations for a model of transformers whose self-attention goes through its AttentionInterface.

    Args:
        relations: `{"name": "rasat", options}`, as T5's config has it.

    Raises ValueError for an encoder-decoder (T5's section `relations` is for those), and for a model whose attention
    cannot be replaced.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder: load FathomT5ForConditionalGeneration with relations="
        )
    related = Related(model, relations)
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"{type(model).__name__}: its attention cannot be replaced ({error})") from error
    model.add_module("relations", related)
    layers = 0
    for module in model.modules():
        if hasattr(module, "rotary_emb"):  # the stack of a decoder
            module.register_forward_pre_hook(functools.partial(_count_without_padding, related), with_kwargs=True)
        if hasattr(module, "layer_idx") and hasattr(module, "scaling"):  # self-attention as transformers writes it
            object.__setattr__(module, "_related", related)  # no submodule: its tables are the model's, once
            layers += 1
    if not layers:
        raise ValueError(f"{type(model).__name__}: has no self-attention of the form that transformers' models share")
    return related


def _count_without_padding(related: Related, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Position ids that begin at a row's first token, where a text is read without any."""
    mask, read = kwargs.get("attention_mask"), kwargs.get("input_ids")
    read = kwargs.get("inputs_embeds") if read is None else read
    counted = related.ids is None or kwargs.get("position_ids") is not None
    if not counted and read is not None and mask is not None and mask.ndim == 2:
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -read.shape[1] :]
    return args, kwargs


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention with relations as a function of transformers' `AttentionInterface`: (output [B, T, h, d], weights)."""
    scaling = module.scaling if scaling is None else scaling
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    related: Related = module._related
    ids, count = related.ids, query.shape[2]
    if ids is not None and count > 1:
        if ids.shape[1] != count or key.shape[2] != count:
            raise ValueError(
                f"relation_ids of {ids.shape[1]} tokens: the model reads {count} tokens over {key.shape[2]} keys; give "
                "the relations of what it reads at once, from its first token on"
            )
        if len(query) != len(ids):
            if module.training or len(query) % len(ids):
                raise ValueError(
                    f"relation_ids of {len(ids)} texts: the model reads {len(query)} texts; give the relations of each"
                )
            ids = ids.repeat_interleave(len(query) // len(ids), dim=0)  # beams
        ids = ids.to(query.device)
        of_keys, of_values = (table.to(query.dtype) for table in related.method.tables())
        output, weights = relation_attention(
            query, key, value, ids, of_keys, of_values, attention_mask, scaling=scaling, dropout=dropout
        )
    else:
        scores = (query @ key.transpose(-2, -1)) * scaling
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
        output = nn.functional.dropout(weights, dropout, dropout > 0) @ value
    return output.transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, eager_mask)

"""A stock Llama as one GGUF file, the format of llama.cpp.

Weights keep their precision; vectors are float32, as llama.cpp wants them. llama.cpp rotates pairs of neighbouring
channels where transformers rotates halves, so the rows of W_q and W_k are put in that order. Nothing is quantised:
`llama-quantize` does that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

NAME = "model.gguf"
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # kinds of tokens
_TOP = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_SPLITS: dict[
    str, list[dict[str, Any]]
] = {  # llama.cpp's name of a rule to split texts, and its parts in tokenizer.json
    "gpt-2": [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}],
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    ],
}


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE. Attributes:
    tokens, kinds: by id; ids between them and the model's are filled with unused ones.
    merges: "left right", from the first learnt.
    splits: llama.cpp's name of the rule by which texts are split.
    ends: ids of special tokens by llama.cpp's name for what they are, "bos", "eos", "padding".
    begins: whether texts are read with a bos before them.
    chat: the chat template; None where there is none.
    """

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    splits: str
    ends: dict[str, int]
    begins: bool = False
    chat: str | None = None


def check(config: Any) -> None:
    """Raise ValueError for a stock config that is not written as GGUF."""
    if config.model_type != "llama":
        raise ValueError(f"model_type={config.model_type!r}: only stock Llama models are written as GGUF")
    rope = config.rope_parameters or {}
    refused = {
        "rope_type": (rope.get("rope_type", "default"), "default"),
        "hidden_act": (config.hidden_act, "silu"),
        "attention_bias": (config.attention_bias, False),
        "mlp_bias": (config.mlp_bias, False),
        "is_causal": (getattr(config, "is_causal", True), True),
    }
    for name, (value, only) in refused.items():
        if value != only:
            raise ValueError(f"{name}={value!r}: GGUF is written of Llama models with {name}={only!r} only")


def vocabulary(tokenizer: Any, checkpoint: str, size: int) -> Vocabulary:
    """The tokenizer data of a GGUF file. Raises ValueError for a tokenizer that llama.cpp would read differently."""
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{checkpoint}: no gguf form: it has no tokenizer.json, and a GGUF file holds the tokenizer")
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    model, split = stored["model"], stored["pre_tokenizer"] or {}
    parts = split.get("pretokenizers", [split])
    rule = [name for name, wanted in _SPLITS.items() if len(wanted) == len(parts) and all(map(_agree, wanted, parts))]
    if model["type"] != "BPE" or model.get("byte_fallback") or not rule or stored["normalizer"] is not None:
        raise ValueError(
            f"{checkpoint}: no gguf form: its tokenizer is no byte-level BPE that splits texts as GPT-2 or SmolLM do"
        )
    if len(tokenizer) > size:
        raise ValueError(
            f"{checkpoint}: no gguf form: its tokenizer has {len(tokenizer)} tokens and the model {size}; give it a "
            "tokenizer that it was made for"
        )
    plain, with_specials = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    begins = tokenizer.bos_token_id is not None and with_specials == [tokenizer.bos_token_id, *plain]
    if with_specials != plain and not begins:
        raise ValueError(
            f"{checkpoint}: no gguf form: its tokenizer reads 'a' as "
            f"{tokenizer.convert_ids_to_tokens(with_specials)}; of special tokens, GGUF adds only a bos before a text"
        )
    added = {entry["id"]: entry for entry in stored["added_tokens"]}
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    tokens, kinds = [], []
    for index in range(size):
        tokens.append(names.get(index, f"[PAD{index}]"))
        special = index in added and added[index]["special"]
        unused = index not in names
        kinds.append(CONTROL if special else USER_DEFINED if unused or index in added else NORMAL)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    ends = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "padding": tokenizer.pad_token_id}
    chat = tokenizer.chat_template
    return Vocabulary(
        tokens, kinds, merges, rule[0], {name: token for name, token in ends.items() if token is not None}, begins,
        chat if isinstance(chat, str) else None,
    )  # fmt: skip


def write(model: Any, vocabulary: Vocabulary, path: Path, name: str, licence: str | None = None) -> None:
    """Write a stock Llama model. `name`: what programs show."""
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
    from gguf.quants import quantize

    config = model.config
    writer = GGUFWriter(str(path), "llama")
    writer.add_type("model")
    writer.add_name(name)
    if licence is not None:
        writer.add_license(licence)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.splits)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    writer.add_token_merges(vocabulary.merges)
    tell = {"bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id, "padding": writer.add_pad_token_id}
    for which, token in vocabulary.ends.items():
        tell[which](token)
    writer.add_add_bos_token(vocabulary.begins)
    writer.add_add_space_prefix(False)
    if vocabulary.chat is not None:
        writer.add_chat_template(vocabulary.chat)
    kinds = {torch.bfloat16: GGMLQuantizationType.BF16, torch.float16: GGMLQuantizationType.F16}
    files = {torch.bfloat16: LlamaFileType.MOSTLY_BF16, torch.float16: LlamaFileType.MOSTLY_F16}
    writer.add_file_type(files.get(model.dtype, LlamaFileType.ALL_F32))
    for tensor, weight in model.state_dict().items():
        if tensor == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if tensor.endswith(("q_proj.weight", "k_proj.weight")):
            weight = neighbouring(weight, config.head_dim)
        kind = kinds.get(weight.dtype, GGMLQuantizationType.F32) if weight.ndim > 1 else GGMLQuantizationType.F32
        numbers = quantize(weight.float().numpy(), kind)
        writer.add_tensor(named(tensor), numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def neighbouring(weight: Float[Tensor, "HD d"], head_dim: int) -> Float[Tensor, "HD d"]:
    """The rows of a projection so that the channels that turn together, i and i + D/2 of a head, lie side by side."""
    return weight.view(-1, 2, head_dim // 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def named(name: str) -> str:
    """llama.cpp's name of a tensor of Llama."""
    if name == "lm_head.weight":
        return "output.weight"
    name = name.removeprefix("model.")
    if name in _TOP:
        return _TOP[name]
    _, layer, part = name.split(".", 2)
    return f"blk.{layer}.{_LAYER[part.removesuffix('.weight')]}.weight"


def _agree(wanted: dict[str, Any], part: dict[str, Any]) -> bool:
    return all(part.get(key) == value for key, value in wanted.items())

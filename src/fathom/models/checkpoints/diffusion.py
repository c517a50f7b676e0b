"""Checkpoints of diffusion models in their authors' layouts, read without their code: LLaDA (arXiv 2502.09992) and
Dream (arXiv 2508.15487).

LLaDA is a Llama decoder with other tensor names and no biases, in which every token sees the whole row. Dream has the
tensors of Qwen2, and predictions shifted by one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig, Qwen2Config

from fathom.models.checkpoints.stock import State, config_from_stock, damage_named
from fathom.models.configuration import FathomConfig

LLADA_FIELDS = {
    "d_model": "hidden_size", "mlp_hidden_size": "intermediate_size", "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads", "max_sequence_length": "max_position_embeddings", "rms_norm_eps": "norm_eps",
    "weight_tying": "tie_word_embeddings", "eos_token_id": "eos_token_id", "pad_token_id": "pad_token_id",
}  # fmt: skip
# Fields that change what the model computes, and the one value that is implemented.
LLADA_FIXED = {
    "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True, "alibi": False,
    "include_bias": False, "include_qkv_bias": False, "attention_layer_norm": False, "scale_logits": False,
    "input_emb_norm": False, "clip_qkv": None, "multi_query_attention": None, "layer_norm_with_affine": True,
}  # fmt: skip
LLADA_NAMES = (
    ("model.transformer.blocks.", "model.layers."),
    ("model.transformer.wte.", "model.embed_tokens."),
    ("model.transformer.ln_f.", "model.norm."),
    ("model.transformer.ff_out.", "lm_head."),
    (".attn_norm.", ".input_layernorm."),
    (".q_proj.", ".self_attn.q_proj."),
    (".k_proj.", ".self_attn.k_proj."),
    (".v_proj.", ".self_attn.v_proj."),
    (".attn_out.", ".self_attn.o_proj."),
    (".ff_norm.", ".post_attention_layernorm."),
    (".ff_proj.", ".mlp.gate_proj."),
    (".up_proj.", ".mlp.up_proj."),
    (".ff_out.", ".mlp.down_proj."),
)


def load(path: Any, changes: dict[str, Any]) -> tuple[FathomConfig, State] | None:
    """Config and tensors, in the decoder's names, of a checkpoint in one of these layouts; None for any other.

    changes: fields of FathomConfig that override the checkpoint's. Raises ValueError for a field that is not
        implemented.
    """
    stored, _ = PreTrainedConfig.get_config_dict(path)
    kind = str(stored.get("model_type")).lower()
    if kind not in ("llada", "dream"):
        return None
    config = llada_config(stored, changes) if kind == "llada" else dream_config(stored, changes)
    state = read(path)
    if kind == "llada":
        state = {renamed(name): tensor for name, tensor in state.items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    config.dtype = next(iter(state.values())).dtype
    return config, state


def llada_config(stored: dict[str, Any], changes: dict[str, Any]) -> FathomConfig:
    """The config of a stored LLaDA one, with `changes`. Raises ValueError for a field that is not implemented."""
    for name, only in LLADA_FIXED.items():
        if stored.get(name, only) not in (only, None):
            raise ValueError(f"llada config field {name}={stored[name]!r} is not implemented here (only {only!r})")
    fields = {ours: stored[theirs] for theirs, ours in LLADA_FIELDS.items() if stored.get(theirs) is not None}
    fields["num_key_value_heads"] = stored.get("n_kv_heads") or stored["n_heads"]
    fields["vocab_size"] = stored.get("embedding_size") or stored["vocab_size"]
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": stored.get("rope_theta", 10_000.0)}
    fields["diffusion"] = {"name": "masked", "mask_token_id": stored.get("mask_token_id", 126336)}
    return FathomConfig(**{"backbone": "llama", "init": "hf", **fields, **changes})


def dream_config(stored: dict[str, Any], changes: dict[str, Any]) -> FathomConfig:
    """The config of a stored Dream one, which is Qwen2's with shifted masked diffusion, with `changes`."""
    names = set(Qwen2Config.__dataclass_fields__) | {"rope_theta"}  # type: ignore[attr-defined]
    qwen = Qwen2Config(**{name: value for name, value in stored.items() if name in names and name != "model_type"})
    section = {"name": "masked", "mask_token_id": stored.get("mask_token_id", 151666), "shift": True}
    return config_from_stock(qwen, **{"diffusion": section, **changes})


def renamed(name: str) -> str:
    """The decoder's name for a tensor of LLaDA."""
    for theirs, ours in LLADA_NAMES:
        name = name.replace(theirs, ours)
    return name


def llada_state(model: Any) -> dict[str, Tensor]:
    """The tensors of a model under LLaDA's names, embed_scale folded into the input table."""
    config, found = model.config, {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name == "model.embed_tokens.weight" and config.embed_scale != 1.0:
            tensor = tensor * config.embed_scale
        for theirs, ours in LLADA_NAMES:
            name = name.replace(ours, theirs)
        found[name] = tensor.contiguous()
    return found


def llada_fields(config: FathomConfig, dtype: Any) -> dict[str, Any]:
    """config.json of LLaDA for a masked diffusion decoder of the Llama family."""
    sizes = {theirs: getattr(config, ours) for theirs, ours in LLADA_FIELDS.items()}
    return {
        "model_type": "llada",
        "architectures": ["LLaDAModelLM"],
        **LLADA_FIXED,
        **sizes,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "embedding_size": config.vocab_size,
        "rope_theta": config.rope_parameters["rope_theta"],
        "mask_token_id": config.diffusion["mask_token_id"],
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def read(path: Any) -> dict[str, Tensor]:
    """All tensors of a folder or hub name, one file or sharded."""
    folder = Path(path)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    state: dict[str, Tensor] = {}
    with damage_named(path):
        for file in sorted(files):
            if not (folder / file).is_file():
                raise ValueError(f"{folder / file}: not there; copy the whole checkpoint")
            state.update(load_file(folder / file))
    return state

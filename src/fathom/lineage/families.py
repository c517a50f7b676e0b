"""What differs between model families: tensor names, fused layouts, norm kind, rotary dims. Facts only, no tensors.

A *role* is Fathom's name for a weight: `q`, `k`, `v`, `o`, `gate`, `up`, `down`, `attn_norm`, `ffn_norm`,
`q_norm`, `k_norm`,
`router`, `experts.3.gate`, `shared.up`; biases end in `.bias`. Everything is in nn.Linear layout [out, in], heads in
rotate-half layout (rotary pair i = rows i and i + rotary/2), q/k/v apart, whatever the file holds.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fathom.lineage.errors import CheckpointError

FusedLayout = Literal["blocks", "per_head", "grouped"]
"""How q, k, v share one matrix: [q; k; v] · for each head [q; k; v] · for each KV head [its q heads; k; v]."""

_LLAMA = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "qkv": "self_attn.qkv_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "gate_up": "mlp.gate_up_proj",
    # multi-head latent attention (DeepSeek): low-rank factors with a norm between them
    "q_a": "self_attn.q_a_proj", "q_a_norm": "self_attn.q_a_layernorm", "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa", "kv_a_norm": "self_attn.kv_a_layernorm", "kv_b": "self_attn.kv_b_proj",
}  # fmt: skip
_LLAMA_MOE = _LLAMA | {
    "router": "mlp.gate", "router_correction": "mlp.gate.e_score_correction_bias",
    "shared_router": "mlp.shared_expert_gate",
    # all experts in one tensor, as a Fathom checkpoint has them
    "experts.gate_up": "mlp.experts.gate_up_proj", "experts.up": "mlp.experts.up_proj",
    "experts.down": "mlp.experts.down_proj",
    **{f"experts.{{e}}.{r}": f"mlp.experts.{{e}}.{r}_proj" for r in ("gate", "up", "down")},
    **{f"shared.{r}": f"mlp.shared_expert.{r}_proj" for r in ("gate", "up", "down")},
}  # fmt: skip
_SANDWICH = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}
_GPT2 = {
    "qkv": "attn.c_attn", "o": "attn.c_proj", "attn_norm": "ln_1", "ffn_norm": "ln_2", "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}  # fmt: skip
_NEOX = {
    "qkv": "attention.query_key_value", "o": "attention.dense", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
}  # fmt: skip
_BLOOM = _NEOX | {"qkv": "self_attention.query_key_value", "o": "self_attention.dense"}
_GGUF = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "qkv": "attn_qkv", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "post_attn_norm": "post_attention_norm",
    "post_ffn_norm": "post_ffw_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "router": "ffn_gate_inp",
    "experts.gate": "ffn_gate_exps", "experts.up": "ffn_up_exps", "experts.down": "ffn_down_exps",
    "shared.gate": "ffn_gate_shexp", "shared.up": "ffn_up_shexp", "shared.down": "ffn_down_shexp",
    "q_a": "attn_q_a", "q_a_norm": "attn_q_a_norm", "q_b": "attn_q_b", "kv_a": "attn_kv_a_mqa",
    "kv_a_norm": "attn_kv_a_norm", "kv_b": "attn_kv_b",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """The conventions of one `model_type`. The default is Llama's."""

    names: Mapping[str, str] = field(default_factory=lambda: _LLAMA_MOE)
    embed: str = "embed_tokens"
    head: str = "lm_head"
    final_norm: str = "norm"
    positions: str = ""  # learned absolute positions
    blocks: str = "model.layers."  # where a checkpoint written by Fathom puts layer 0
    norm: Literal["rms", "layer"] = "rms"
    gain_offset: float = 0.0  # Gemma and Qwen3-Next store γ − 1
    fused: FusedLayout = "blocks"
    transposed: bool = False  # Conv1D stores [in, out]
    rotary: float = 1.0  # part of the head that rotates, unless the configuration says otherwise
    interleaved: bool = False  # rotary pair i = rows 2i and 2i + 1
    post_norm: bool = False  # norms on the outputs of the sub-layers only (OLMo-2): readers see the raw residual


_GEMMA2 = Family(names=_LLAMA | _SANDWICH, gain_offset=1.0)
_GPT2_FAMILY = Family(
    names=_GPT2, embed="wte", head="lm_head", final_norm="ln_f", positions="wpe", blocks="transformer.h.", norm="layer",
    transposed=True, rotary=0.0,
)  # fmt: skip
_PHI_NAMES = _LLAMA | {"o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2", "q_norm": "self_attn.q_layernorm",
                       "k_norm": "self_attn.k_layernorm"}  # fmt: skip
_MIXTRAL_NAMES = _LLAMA | {
    "router": "block_sparse_moe.gate",
    **{
        f"experts.{{e}}.{r}": f"block_sparse_moe.experts.{{e}}.{w}"
        for r, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}
_DEEPSEEK = Family(
    names=_LLAMA_MOE | {f"shared.{r}": f"mlp.shared_experts.{r}_proj" for r in ("gate", "up", "down")}, interleaved=True
)

FAMILIES: dict[str, Family] = {
    "gemma": Family(gain_offset=1.0),
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "olmo": Family(names=_LLAMA, norm="layer"),
    "olmo2": Family(names=_LLAMA | _SANDWICH, post_norm=True),
    "olmo3": Family(names=_LLAMA | _SANDWICH, post_norm=True),
    "gpt2": _GPT2_FAMILY,
    "gpt_neox": Family(
        names=_NEOX, embed="embed_in", head="embed_out", final_norm="final_layer_norm", blocks="gpt_neox.layers.",
        norm="layer", fused="per_head", rotary=0.25,
    ),
    "bloom": Family(
        names=_BLOOM, embed="word_embeddings", final_norm="ln_f", blocks="transformer.h.", norm="layer",
        fused="per_head", rotary=0.0,
    ),
    "falcon": Family(
        names=_BLOOM | {"attn_norm": "ln_attn", "ffn_norm": "ln_mlp"}, embed="word_embeddings", final_norm="ln_f",
        blocks="transformer.h.", norm="layer", fused="grouped",
    ),
    "mpt": Family(
        names=_GPT2 | {"qkv": "attn.Wqkv", "o": "attn.out_proj", "attn_norm": "norm_1", "ffn_norm": "norm_2",
                       "up": "ffn.up_proj", "down": "ffn.down_proj"},
        embed="wte", final_norm="norm_f", blocks="transformer.blocks.", norm="layer", rotary=0.0,
    ),
    "phi": Family(names=_PHI_NAMES, final_norm="final_layernorm", norm="layer", rotary=0.5),
    "phi3": Family(names=_LLAMA),
    "nemotron": Family(names=_LLAMA, norm="layer", gain_offset=1.0),
    "mixtral": Family(names=_MIXTRAL_NAMES),
    "qwen3_next": Family(gain_offset=1.0),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "qwen": Family(
        names=_GPT2 | {"gate": "mlp.w2", "up": "mlp.w1", "down": "mlp.c_proj"}, embed="wte", final_norm="ln_f",
        blocks="transformer.h.",
    ),
    "baichuan": Family(names=_LLAMA | {"qkv": "self_attn.W_pack"}),
    "internlm2": Family(
        names={"qkv": "attention.wqkv", "o": "attention.wo", "attn_norm": "attention_norm", "ffn_norm": "ffn_norm",
               "gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"},
        embed="tok_embeddings", head="output", fused="grouped",
    ),
    "stablelm": Family(names=_LLAMA, norm="layer", rotary=0.25),
    "cohere": Family(names=_LLAMA, norm="layer", interleaved=True),
    "cohere2": Family(names=_LLAMA, norm="layer", interleaved=True),
    "starcoder2": Family(names=_LLAMA | {"up": "mlp.c_fc", "down": "mlp.c_proj"}, norm="layer"),
}  # fmt: skip


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face configuration; unknown ones are read as Llama."""
    if config.get("model_type") == "fathom":  # one naming, Llama's, for all its backbones
        positions = config.get("positions") or "rotary"
        positions = positions["name"] if isinstance(positions, dict) else positions
        if positions == "rope_pp":
            raise CheckpointError(
                "positions='rope_pp': each projected head writes twice through o_proj, which fingerprints do not read; "
                "compare the checkpoint that it was made of"
            )
        return Family(
            norm="layer" if config.get("norm") == "layernorm" else "rms",
            positions="embed_positions",
            rotary=0.0 if positions in ("learned", "alibi") else 1.0,
        )
    family = FAMILIES.get(config.get("model_type", ""), Family())
    two_norms = config.get("new_decoder_architecture") and config.get("num_ln_in_parallel_attn") != 1
    if config.get("model_type") == "falcon" and not two_norms:  # Falcon-7B and -RW, Falcon2
        norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        return replace(family, names={**family.names, **norms})
    return family


# Architectures whose GGUF rotary pairs are neighbours (llama.cpp's "norm" rope): its converter permutes q and k rows.
_GGUF_INTERLEAVED = {
    "llama", "llama4", "deci", "baichuan", "internlm2", "minicpm", "xverse", "command-r", "cohere2", "olmo", "arctic",
    "deepseek", "deepseek2", "chatglm", "granite", "granitemoe", "bailingmoe", "smollm3", "arcee", "ernie4_5",
}  # fmt: skip
_GGUF_LAYER_NORM = {
    "gpt2",
    "gptneox",
    "bloom",
    "falcon",
    "mpt",
    "phi2",
    "stablelm",
    "command-r",
    "cohere2",
    "starcoder2",
}
_GGUF_NO_ROTARY = {"gpt2", "bloom", "mpt"}


def gguf_family(arch: str) -> Family:
    """GGUF has one naming for all architectures, keeps q/k/v in blocks, and bakes γ offsets in."""
    names = _GGUF | ({"attn_norm": "", "ffn_norm": ""} if arch == "olmo2" else {})
    return Family(
        names=names, embed="token_embd", head="output", final_norm="output_norm", positions="position_embd",
        norm="layer" if arch in _GGUF_LAYER_NORM else "rms", rotary=0.0 if arch in _GGUF_NO_ROTARY else 1.0,
        interleaved=arch in _GGUF_INTERLEAVED, post_norm=arch == "olmo2",
    )  # fmt: skip


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model: how the rows of q, k, v fall into heads, and which of them rotate."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    experts: int = 0
    value_dim: int = 0  # MLA: head size of v; 0 = head_dim
    nope_dim: int = 0  # MLA: leading, non-rotating part of a q/k head
    nope_layers: frozenset[int] = frozenset()  # layers without rotary positions (SmolLM3)

    def rotary(self, layer: int) -> int:
        return 0 if layer in self.nope_layers else self.rotary_dim


def _first(config: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    return next((config[k] for k in keys if config.get(k) is not None), default)


def geometry(config: Mapping[str, Any], family: Family) -> Geometry:
    """Sizes from a Hugging Face configuration (multimodal: its language part must be passed)."""
    hidden = _first(config, "hidden_size", "n_embd", "d_model", "dim")
    heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    layers = _first(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if not (hidden and heads and layers):
        raise CheckpointError(
            "config.json: hidden_size, num_attention_heads and num_hidden_layers are needed; one is missing"
        )
    kv_heads = _first(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads)
    for name, size in (("hidden size", hidden), ("heads", heads), ("layers", layers), ("key-value heads", kv_heads)):
        if not isinstance(size, int) or size < 1:
            raise CheckpointError(f"config.json: {name} is {size!r}; one whole number for all layers is needed")
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} heads cannot share {kv_heads} key-value heads evenly")
    if config.get("model_type") == "falcon" and not config.get("new_decoder_architecture"):
        kv_heads = 1 if config.get("multi_query", True) else heads
    head_dim = _first(config, "head_dim", "kv_channels", default=hidden // heads)
    if not isinstance(head_dim, int) or head_dim < 1:
        raise CheckpointError(f"config.json: head_dim is {head_dim!r}; a whole number is needed")
    rope = config.get("rope_parameters") or {}
    part = _first(
        config, "partial_rotary_factor", "rotary_pct", default=rope.get("partial_rotary_factor", family.rotary)
    )
    rotary_dim = int(_first(config, "rotary_dim", default=head_dim * part)) if family.rotary else 0
    if config.get("model_type") == "falcon" and config.get("alibi"):
        rotary_dim = 0
    nope = frozenset(i for i, rotates in enumerate(config.get("no_rope_layers") or ()) if not rotates)
    value_dim = nope_dim = 0
    if config.get("kv_lora_rank"):
        nope_dim, rotary_dim = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        head_dim, value_dim, kv_heads = nope_dim + rotary_dim, config["v_head_dim"], heads
    own = config.get("feed_forward") if config.get("model_type") == "fathom" else None
    experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts", default=0)
    experts = own["experts"] if own and own["name"] == "moe" else experts
    return Geometry(hidden, layers, heads, kv_heads, head_dim, rotary_dim, experts, value_dim, nope_dim, nope)


def gguf_config(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """The Hugging Face keys that `geometry` reads, from GGUF metadata (already stripped of the architecture prefix)."""
    config = {
        "model_type": arch,
        "hidden_size": metadata.get("embedding_length"),
        "num_hidden_layers": metadata.get("block_count"),
        "num_attention_heads": metadata.get("attention.head_count"),
        "num_key_value_heads": metadata.get("attention.head_count_kv"),
        "head_dim": metadata.get("attention.key_length"),
        "rotary_dim": metadata.get("rope.dimension_count"),
        "intermediate_size": metadata.get("feed_forward_length"),
        "num_experts": metadata.get("expert_count"),
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("rope.freq_base"),
        "max_position_embeddings": metadata.get("context_length"),
    }
    if rank := metadata.get("attention.kv_lora_rank"):
        rotary = metadata["rope.dimension_count"]
        key = metadata.get("attention.key_length_mla", metadata["attention.key_length"])
        value = metadata.get("attention.value_length_mla", metadata["attention.value_length"])
        config |= {
            "kv_lora_rank": rank,
            "qk_rope_head_dim": rotary,
            "qk_nope_head_dim": key - rotary,
            "v_head_dim": value,
        }
    return {k: v for k, v in config.items() if v is not None}


_LAYER = re.compile(r"^(?P<prefix>.*?)(?:layers|h|blocks|blk)\.(?P<layer>\d+)\.(?P<tail>.+)$")
_FOREIGN = re.compile(
    r"(?:^|\.)(?:vision|visual|audio|image|vit|talker|code2wav|encoder|mm_|speech|mtp)", re.IGNORECASE
)
# What is no parameter: tables and masks that a configuration determines, scales of quantised weights.
_DERIVED = re.compile(
    r"(inv_freq|rope_freqs\.weight|masked_bias|attn\.bias|attention\.bias|_scale_inv|SCB|weight_format)$"
)


def language_prefix(names: list[str]) -> str:
    """The path in front of `layers.0.` of the language tower: of all non-vision, non-audio stacks, the one with
    most tensors."""
    count: dict[str, int] = {}
    for name in names:
        if (match := _LAYER.match(name)) and not _FOREIGN.search(match["prefix"]):
            count[match["prefix"]] = count.get(match["prefix"], 0) + 1
    if not count:
        raise CheckpointError("no decoder layers found: no tensor name contains layers.N., h.N., blocks.N. or blk.N.")
    return max(count, key=lambda p: count[p])


def roles(names: list[str], family: Family, layers: int) -> tuple[dict[tuple[int, str], str], dict[str, str]]:
    """({(layer, role): tensor name}, {"embed" | "head" | "final_norm" | "positions"[.bias]: tensor name})."""
    prefix = language_prefix(names)
    role_of = {tail: role for role, tail in family.names.items() if tail}
    # Outer names nearest to the root first: model.norm is the final norm, model.depth.norm is not.
    names = sorted(names, key=lambda name: name.count("."))
    # A fixed expert number hides in the tail; `{e}` patterns are matched after it is lifted out.
    in_layer: dict[tuple[int, str], str] = {}
    outside: dict[str, str] = {}
    for name in names:
        if (match := _LAYER.match(name)) and match["prefix"] == prefix:
            layer, tail = int(match["layer"]), match["tail"]
            stem, bias = re.sub(r"\.(weight|bias)$", "", tail), ".bias" if tail.endswith(".bias") else ""
            expert = re.search(r"experts\.(\d+)\.", stem)
            lifted = stem if expert is None else stem.replace(expert[0], "experts.{e}.", 1)
            if layer < layers and (role := role_of.get(lifted)):
                role = role if expert is None else role.replace("{e}", expert[1])
                in_layer[layer, role + bias] = name
        elif match is None and not _FOREIGN.search(name):
            stem, bias = re.sub(r"\.(weight|bias)$", "", name), ".bias" if name.endswith(".bias") else ""
            wanted = {
                family.embed: "embed",
                family.head: "head",
                family.final_norm: "final_norm",
                family.positions: "positions",
            }
            if role := wanted.get(stem.rsplit(".", 1)[-1]):
                outside.setdefault(role + bias, name)
    return in_layer, outside


def stored_layers(names: list[str]) -> set[int]:
    """Numbers of the decoder layers that have any tensor."""
    prefix = language_prefix(names)
    return {int(m["layer"]) for n in names if (m := _LAYER.match(n)) and m["prefix"] == prefix}


def without_role(names: list[str], known: Iterable[str]) -> list[str]:
    """Tensors of the language model that no role names: parameters of a method that Fathom's lineage does not read."""
    read = set(known)
    return sorted(n for n in names if n not in read and not _FOREIGN.search(n) and not _DERIVED.search(n))

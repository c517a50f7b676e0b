"""Stock checkpoints of the four families, Qwen2 and three mixtures: configs and tensor names, to Fathom's and back.

Reading goes through transformers' own class, so every file format and legacy key that it accepts is accepted here. A
field of the family's config that the decoder does not implement is refused by name.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fathom.models import hf_versions
from fathom.models.checkpoints import depth_attention as depth_attention_checkpoints
from fathom.models.checkpoints import mixtures
from fathom.models.checkpoints import rope_pp as rope_pp_checkpoints
from fathom.models.checkpoints.adapter import merge_adapter
from fathom.models.configuration import FAMILIES, FathomConfig
from fathom.models.method import Method
from fathom.models.registry import SECTIONS, build_options, lookup

State = dict[str, Tensor]

# Fields that every config class has, or that do not change the function the model computes.
BOOKKEEPING = {
    "transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype", "chunk_size_feed_forward",
    "is_encoder_decoder", "id2label", "label2id", "problem_type", "use_cache", "name_or_path", "per_layer_config",
    "tie_last_hidden_states", "classifier_dropout", "is_decoder",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "layer_types", "sliding_window", "max_window_layers",  # read through `refuse_unimplemented`
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Family:
    """The map between one stock family and the decoder.

    fields: stock config field → Fathom field.   fixed: stock fields with the only value that is implemented.
    to_fathom, to_stock: functions of a state dict and the Fathom config.
    backbone: Fathom's name for the family, where it differs from transformers'.
    """

    fields: dict[str, str]
    fixed: dict[str, Any]
    to_fathom: Callable[[State, FathomConfig], State]
    to_stock: Callable[[State, FathomConfig], State]
    backbone: str | None = None


SHARED = {
    name: name
    for name in (
        "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "initializer_range",
    )
}  # fmt: skip
LLAMA_FIELDS = {
    **SHARED,
    **{
        name: name
        for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "hidden_act", "max_position_embeddings", "rope_parameters", "attention_bias",
            "attention_dropout",
        )
    },
    "rms_norm_eps": "norm_eps",
}  # fmt: skip


QWEN2_FIELDS = {theirs: ours for theirs, ours in LLAMA_FIELDS.items() if theirs not in ("head_dim", "attention_bias")}
MIXTRAL_FIELDS = {theirs: ours for theirs, ours in LLAMA_FIELDS.items() if theirs != "attention_bias"}


def same(state: State, config: FathomConfig) -> State:
    """The state dict as it is: the decoder has the tensor names of Llama and Qwen3."""
    return dict(state)


NEOX_NAMES = (
    ("model.embed_tokens.", "gpt_neox.embed_in."),
    ("model.norm.", "gpt_neox.final_layer_norm."),
    ("model.layers.", "gpt_neox.layers."),
    (".self_attn.o_proj.", ".attention.dense."),
    (".mlp.up_proj.", ".mlp.dense_h_to_4h."),
    (".mlp.down_proj.", ".mlp.dense_4h_to_h."),
    ("lm_head.", "embed_out."),  # the head's name up to some 5.x; read either, write what the class has
)
GPT2_NAMES = (
    ("model.embed_tokens.", "transformer.wte."),
    ("model.embed_positions.", "transformer.wpe."),
    ("model.norm.", "transformer.ln_f."),
    ("model.layers.", "transformer.h."),
    (".input_layernorm.", ".ln_1."),
    (".post_attention_layernorm.", ".ln_2."),
    (".self_attn.o_proj.", ".attn.c_proj."),
    (".mlp.up_proj.", ".mlp.c_fc."),
    (".mlp.down_proj.", ".mlp.c_proj."),
)


def rename(name: str, pairs: tuple[tuple[str, str], ...], to_stock: bool) -> str:
    """A tensor name with every (ours, theirs) pair replaced, in the direction asked for."""
    for ours, theirs in pairs:
        name = name.replace(ours, theirs) if to_stock else name.replace(theirs, ours)
    return name


def neox_to_fathom(state: State, config: FathomConfig) -> State:
    """GPT-NeoX's tensors in the decoder's names. Its fused q, k, v have rows [head, (q, k, v), D]."""
    out: State = {}
    for name, tensor in state.items():
        if ".attention.query_key_value." in name:
            layer, kind = name.split(".attention.query_key_value.")
            fused = tensor.view(config.num_attention_heads, 3, config.head_dim, *tensor.shape[1:])
            for i, part in enumerate("qkv"):
                key = f"{rename(layer + '.', NEOX_NAMES, False)}self_attn.{part}_proj.{kind}"
                out[key] = fused[:, i].reshape(-1, *tensor.shape[1:])
        else:
            out[rename(name, NEOX_NAMES, False)] = tensor
    return out


def neox_to_stock(state: State, config: FathomConfig) -> State:
    """The inverse of `neox_to_fathom`."""
    out: State = {}
    for name, tensor in state.items():
        if ".self_attn.q_proj." in name:
            heads = (config.num_attention_heads, 1, config.head_dim, *tensor.shape[1:])
            parts = [state[name.replace("q_proj", f"{p}_proj")].reshape(heads) for p in "qkv"]
            fused = torch.cat(parts, dim=1).reshape(-1, *tensor.shape[1:])
            out[rename(name, NEOX_NAMES, True).replace(".self_attn.q_proj.", ".attention.query_key_value.")] = fused
        elif ".self_attn.k_proj." not in name and ".self_attn.v_proj." not in name:
            out[rename(name, NEOX_NAMES, True)] = tensor
    return out


def gpt2_to_fathom(state: State, config: FathomConfig) -> State:
    """GPT-2's tensors in the decoder's names. It stores linear weights as [in, out] and fuses q, k, v side by side."""
    out: State = {}
    for name, tensor in state.items():
        if name.endswith(".weight") and (".attn.c_" in name or ".mlp.c_" in name):
            tensor = tensor.T
        if ".attn.c_attn." in name:
            layer, kind = name.split(".attn.c_attn.")
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                out[f"{rename(layer + '.', GPT2_NAMES, False)}self_attn.{part}_proj.{kind}"] = piece.contiguous()
        else:
            out[rename(name, GPT2_NAMES, False)] = tensor.contiguous()
    return out


def gpt2_to_stock(state: State, config: FathomConfig) -> State:
    """The inverse of `gpt2_to_fathom`."""
    out: State = {}
    for name, tensor in state.items():
        linear = name.endswith(".weight") and ("_proj." in name)
        if ".self_attn.q_proj." in name:
            tensor = torch.cat([state[name.replace("q_proj", f"{p}_proj")] for p in "qkv"])
            name = name.replace(".self_attn.q_proj.", ".attn.c_attn.")
        elif ".self_attn.k_proj." in name or ".self_attn.v_proj." in name:
            continue
        out[rename(name, GPT2_NAMES, True)] = tensor.T.contiguous() if linear else tensor
    return out


STOCK: dict[str, Family] = {
    "llama": Family(
        fields={**LLAMA_FIELDS, "mlp_bias": "mlp_bias"}, fixed={"pretraining_tp": 1}, to_fathom=same, to_stock=same
    ),
    "qwen3": Family(fields=LLAMA_FIELDS, fixed={"use_sliding_window": False}, to_fathom=same, to_stock=same),
    "gpt_neox": Family(
        fields={
            **SHARED, "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
            "num_hidden_layers": "num_hidden_layers", "num_attention_heads": "num_attention_heads",
            "hidden_act": "hidden_act", "max_position_embeddings": "max_position_embeddings",
            "layer_norm_eps": "norm_eps", "use_parallel_residual": "parallel_residual",
            "attention_bias": "attention_bias", "rope_parameters": "rope_parameters",
            "attention_dropout": "attention_dropout", "hidden_dropout": "residual_dropout",
        },
        fixed={}, to_fathom=neox_to_fathom, to_stock=neox_to_stock,
    ),
    "gpt2": Family(
        fields={
            **SHARED, "n_embd": "hidden_size", "n_inner": "intermediate_size", "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads", "n_positions": "max_position_embeddings",
            "activation_function": "hidden_act", "layer_norm_epsilon": "norm_eps", "attn_pdrop": "attention_dropout",
            "resid_pdrop": "residual_dropout", "embd_pdrop": "embedding_dropout",
        },
        fixed={
            "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
        to_fathom=gpt2_to_fathom, to_stock=gpt2_to_stock,
    ),
    "qwen2": Family(
        fields=QWEN2_FIELDS, fixed={"use_sliding_window": False}, to_fathom=same, to_stock=same
    ),
    "qwen2_moe": Family(
        fields=QWEN2_FIELDS, fixed={"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        to_fathom=same, to_stock=mixtures.folded, backbone="llama",
    ),
    "mixtral": Family(
        fields=MIXTRAL_FIELDS, fixed={"sliding_window": None, "router_jitter_noise": 0.0},
        to_fathom=same, to_stock=mixtures.folded, backbone="llama",
    ),
    "qwen3_moe": Family(
        fields=LLAMA_FIELDS, fixed={"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        to_fathom=same, to_stock=mixtures.folded, backbone="qwen3",
    ),
}  # fmt: skip
MIXTURES = ("qwen2_moe", "mixtral", "qwen3_moe")
assert {family.backbone or name for name, family in STOCK.items()} == set(FAMILIES)


def refuse_unimplemented(stock: PreTrainedConfig) -> None:
    """Raise ValueError for a field of the family's config that the decoder does not implement, by name."""
    family = STOCK[stock.model_type]
    for name, only in family.fixed.items():
        if getattr(stock, name, only) != only:
            raise ValueError(
                f"{stock.model_type} config field {name}={getattr(stock, name)!r} is not implemented here "
                f"(only {only!r})"
            )
    partial = (getattr(stock, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    if partial != 1.0 and stock.model_type != "gpt_neox":
        raise ValueError(
            f"{stock.model_type} config field rope_parameters: partial_rotary_factor={partial!r} is not implemented "
            "here (transformers' class turns all channels)"
        )
    if getattr(stock, "is_heterogeneous", False):
        raise ValueError(
            f"{stock.model_type} config field per_layer_config: layers that differ are not implemented here"
        )
    kinds = getattr(stock, "layer_types", None) or ()
    for layer, kind in enumerate(kinds):
        if kind != "full_attention":
            raise ValueError(
                f"{stock.model_type} config field layer_types={kind!r} (layer {layer}) is not implemented here "
                "(only 'full_attention')"
            )
    if getattr(stock, "quantization_config", None) is not None:
        raise ValueError(
            "config field quantization_config: quantized weights are not implemented here; dequantize the model first"
        )
    known = BOOKKEEPING | set(family.fields) | set(family.fixed)
    if stock.model_type in MIXTURES:
        known |= set(mixtures.READ)
    if family.backbone == "llama":
        known.add("qkv_bias")
    for field in dataclasses.fields(type(stock)):  # type: ignore[arg-type]
        default = field.default if field.default is not dataclasses.MISSING else None
        value = getattr(stock, field.name, default)
        if field.name not in known and value != default and value is not None:
            raise ValueError(f"{stock.model_type} config field {field.name}={value!r} is not implemented here")


def config_from_stock(stock: PreTrainedConfig, **changes: Any) -> FathomConfig:
    """The Fathom config of a stock config; `changes` override or add fields (`depth={…}`, …).

    Raises ValueError for an unsupported family or field.
    """
    stock, changes = depth_attention_checkpoints.translate(stock, changes)
    if stock.model_type not in STOCK:
        raise ValueError(f"family {stock.model_type!r} is not supported; supported families: {', '.join(STOCK)}")
    refuse_unimplemented(stock)
    family = STOCK[stock.model_type]
    fields = {ours: getattr(stock, theirs, None) for theirs, ours in family.fields.items()}
    if stock.model_type == "gpt_neox":  # one field there, three here: after the embedding, attention and MLP
        fields.update(embedding_dropout=stock.hidden_dropout, attention_output_bias=stock.attention_bias, mlp_bias=True)
        fields["partial_rotary_factor"] = stock.rope_parameters.get("partial_rotary_factor", 1.0)
    if stock.model_type in ("qwen2", "qwen2_moe"):
        fields.update(head_dim=getattr(stock, "head_dim", None), attention_output_bias=False)
        fields.update(attention_bias=getattr(stock, "qkv_bias", True), norm_eps=stock.rms_norm_eps)
    if stock.model_type in MIXTURES:
        fields["feed_forward"] = mixtures.section_of(stock)
    fields.update(backbone=family.backbone or stock.model_type, init="hf", embed_scale=None, dtype=stock.dtype)
    fields["is_causal"] = getattr(stock, "is_causal", True)  # transformers reads it of any decoder
    if getattr(stock, "mask_token_id", None) is not None:  # as `stock_config` writes it
        fields["diffusion"] = {
            "name": "masked", "mask_token_id": stock.mask_token_id, "shift": getattr(stock, "shift", False)
        }  # fmt: skip
    return FathomConfig(**{**fields, **changes})


# What FathomConfig itself declares.
FIELDS = [field.name for field in dataclasses.fields(FathomConfig) if field.name in FathomConfig.__annotations__]  # type: ignore[arg-type]

# Keyword arguments of from_pretrained that say where the finished model's tensors lie, and of what kind it is; the rest
# goes to reading the stock files.
PLACES = ("device_map", "max_memory", "offload_folder", "offload_buffers")
KIND = ("dtype", "torch_dtype", "attn_implementation")

HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "gguf_file")

# Names in files that no causal language model reads: buffers that older versions saved, heads of other tasks.
UNREAD = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.bias|masked_bias)$|^(score|classifier|v_head)\.")


def load_stock(
    path: Any, adapter: tuple[Any, dict[str, Any]] | None, kwargs: dict[str, Any]
) -> tuple[FathomConfig, FathomConfig, State, GenerationConfig | None, dict[str, Any]] | None:
    """A stock checkpoint: (config, stored config, state dict in Fathom's names, generation config, arguments of
    `KIND`).

    None if `path` holds a Fathom checkpoint. An adapter is merged, because a family may fuse matrices that are separate
    here. Raises ValueError for an unsupported family, and a tensor that is absent or has no place.
    """
    kwargs = {name: kwargs[name] for name in kwargs if name not in ("output_loading_info", "adapter_name")}
    changes = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
    hub = {name: kwargs[name] for name in HUB if name in kwargs}
    stock_config = kwargs.pop("config", None) or AutoConfig.from_pretrained(path, **hub)
    if stock_config.model_type == FathomConfig.model_type:
        return None
    stock_config, changes = depth_attention_checkpoints.translate(stock_config, changes)
    mode = kwargs.pop("rope_pp_mode", None)
    kind = {name: kwargs.pop(name) for name in KIND if name in kwargs}
    dtype = kind.get("dtype", kind.pop("torch_dtype", "auto"))
    if mode is not None:
        stock_config, state = rope_pp_checkpoints.read(path, stock_config, mode)
        changes.setdefault("positions", {"name": "rope_pp"})
        config, stored = (config_from_stock(stock_config, **part) for part in (changes, {"positions": "rope_pp"}))
        kind["dtype"] = config.dtype = next(iter(state.values())).dtype if dtype in ("auto", None) else dtype
        return config, stored, state, None, kind
    rope_pp_checkpoints.refuse_without_mode(path, stock_config)
    if "gguf_file" in hub:  # dequantised on reading
        stock_config.quantization_config = None
    config, stored = config_from_stock(stock_config, **changes), config_from_stock(stock_config)
    check_positions(path, config, stored)
    kwargs.update(hub, dtype=dtype, config=stock_config)
    with hf_versions.weights_alone() as alone:
        read: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **kwargs, **alone)
    stock, report = read
    check_names(path, report["missing_keys"], report["unexpected_keys"])
    if adapter is not None:
        stock, missing, unexpected = merge_adapter(stock, *adapter)
        check_names(adapter[0], missing, unexpected)
    kind["dtype"] = config.dtype = stock.dtype
    state = STOCK[stock_config.model_type].to_fathom(stock.state_dict(), config)
    for section in SECTIONS:
        method: Any = lookup(section, getattr(config, section)["name"])
        state = method.read_stock(state, config, build_options(section, getattr(config, section)))
    if config.tie_word_embeddings:
        head, table = stock.get_output_embeddings().weight, stock.get_input_embeddings().weight
        config.tie_word_embeddings = head is table or torch.equal(head, table)  # a head of its own is kept, as there
        if config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
    return config, stored, state, stock.generation_config, kind


def changed_sections(given: FathomConfig, stored: FathomConfig) -> list[re.Pattern[str]]:
    """Patterns of parameters that methods of `given` may add to a checkpoint with config `stored`, or leave out."""
    return [part.owns for name, part in SECTIONS.items() if getattr(given, name) != getattr(stored, name)]


def converts(given: FathomConfig, stored: FathomConfig) -> bool:
    """Whether `stored` is an ordinary checkpoint whose tensors the positions method of `given` converts."""
    if given.positions == stored.positions or stored.positions["name"] not in SECTIONS["positions"].plain:
        return False
    method: Any = lookup("positions", given.positions["name"])
    return method.read_stock.__func__ is not Method.read_stock.__func__  # type: ignore[attr-defined]


def forget_path(model: Any) -> None:
    """Leave a model that was made of another checkpoint's tensors without a path; transformers writes "None".

    peft stores the path in an adapter as that of its base: the other checkpoint is none, as it lacks the method.
    """
    model.name_or_path = model.config.name_or_path = ""


def check_names(
    path: Any,
    missing: Iterable[str],
    unexpected: Iterable[str] = (),
    given: FathomConfig | None = None,
    stored: FathomConfig | None = None,
) -> None:
    """Raise ValueError for a tensor that is absent from the files, which transformers would fill with random numbers,
    and for a tensor in them that has no place in the model.

    given, stored: configs of the model and of the checkpoint. A method other than the stored one may add parameters and
        leave some out; a model with fewer layers may leave some out, too.
    """
    added: list[re.Pattern[str]] = []
    left: list[re.Pattern[str]] = [UNREAD]
    if given is not None and stored is not None:
        added = changed_sections(given, stored)
        fewer = range(given.num_hidden_layers, stored.num_hidden_layers)
        name, was = given.feed_forward["name"], stored.feed_forward["name"]
        if name != was and any(SECTIONS["feed_forward"].owns.match(one) for one in missing):
            raise ValueError(
                f"{path} with feed_forward={name!r}: the checkpoint's network is {was!r}, and this one's weights "
                "would be random; `fathom grow` makes a mixture of a dense network"
            )
        left += added + [re.compile(rf"model\.layers\.{layer}\.") for layer in fewer]
    absent = sorted(name for name in missing if not any(part.match(name) for part in added))
    if absent:
        raise ValueError(f"{path}: weights are missing from the checkpoint: {_some(absent)}")
    homeless = sorted(name for name in unexpected if not any(part.search(name) for part in left))
    if homeless:
        raise ValueError(
            f"{path}: the checkpoint has weights that its config has no place for, so it is of another model: "
            f"{_some(homeless)}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def check_positions(path: Any, given: FathomConfig, stored: FathomConfig) -> None:
    """Raise ValueError where the learned position vectors that the weights were trained with would be lost."""
    new, old = given.positions["name"], stored.positions["name"]
    if old == "learned" and new != old:
        raise ValueError(
            f"{path} with positions={new!r}: the checkpoint was trained with {old!r}, and its position vectors would "
            "be lost; leave it out, or train a new model"
        )


def check_depth(path: Any, given: FathomConfig, stored: FathomConfig) -> None:
    """Raise ValueError if the weights of a Fathom checkpoint cannot be used under another config's depth method."""
    method: Any = lookup("depth", given.depth["name"])
    reason = method.refuse_checkpoint(stored, given)
    if reason:
        raise ValueError(f"{path} with depth={given.depth['name']!r}: {reason}")


@contextlib.contextmanager
def changes_named(path: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """A context that turns the error about shapes of tensors into a ValueError. It names the arguments in `kwargs` of
    from_pretrained that contradict the config of a Fathom checkpoint, if there are any."""
    try:
        yield
    except RuntimeError as error:
        changes = changed(path, kwargs) if "ignore_mismatched_sizes" in str(error) else []
        if not changes:
            raise
        raise ValueError(
            f"{path}: its tensors have other shapes than with {', '.join(changes)} (the report above lists them); give "
            "what is stored, or leave it out"
        ) from error


def configs(path: Any, kwargs: dict[str, Any]) -> tuple[FathomConfig, FathomConfig]:
    """For a Fathom checkpoint, the stored config changed by `kwargs` of from_pretrained, and the stored config."""
    hub = {name: kwargs[name] for name in HUB if name in kwargs}
    stored, given = FathomConfig.from_pretrained(path, **hub), kwargs.get("config")
    if not isinstance(given, FathomConfig):
        given = FathomConfig.from_pretrained(path, **hub, **{name: kwargs[name] for name in FIELDS if name in kwargs})
    return given, stored


def changed(path: Any, kwargs: dict[str, Any]) -> list[str]:
    """The fields and options that `kwargs` change in the config of a Fathom checkpoint, with their stored values."""
    given, stored = configs(path, kwargs)
    changes = []
    for field in FIELDS:
        new, old = getattr(given, field), getattr(stored, field)
        if isinstance(new, dict) and "name" in new and new["name"] == old["name"]:
            options = [(f"{field} option {option}", new[option], old.get(option)) for option in new]
        elif isinstance(new, dict) and "name" in new:
            options = [(field, new["name"], old["name"])]
        else:
            options = [(field, new, old)]
        changes += [f"{what}={new!r} (stored: {old!r})" for what, new, old in options if new != old]
    return changes


@contextlib.contextmanager
def damage_named(path: Any) -> Iterator[None]:
    """A context that turns errors about a truncated or corrupt safetensors file, and about shapes that contradict the
    config, into a ValueError that names the file or the checkpoint."""
    try:
        yield
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"{path}: its tensors have other shapes than its config.json says (the report above lists them)"
        ) from error
    except SafetensorError as error:
        damaged: Any = path
        for file in sorted(Path(path).rglob("*.safetensors")):
            try:
                safe_open(file, framework="pt")
            except SafetensorError:
                damaged = file
        raise ValueError(f"{damaged}: truncated or corrupt safetensors file ({error}); copy it again") from error


def family_of(config: FathomConfig) -> str:
    """The stock family whose class computes the model. Raises ValueError for a model with other methods than `moe`."""
    plain = {name: section.plain for name, section in SECTIONS.items()}
    if mixtures.is_mixture(config):
        plain["feed_forward"] = ("moe",)
    if any(getattr(config, section)["name"] not in names for section, names in plain.items()):
        active = {section: getattr(config, section)["name"] for section in SECTIONS}
        raise ValueError(f"only a vanilla model is a stock {config.backbone} model; this one has {active}")
    if mixtures.is_mixture(config):
        return mixtures.family_of(config)
    biases = (config.attention_bias, config.attention_output_bias)
    return "qwen2" if config.backbone == "llama" and biases == (True, False) else config.backbone


def stock_config(config: FathomConfig) -> PreTrainedConfig:
    """The stock config that computes the same function. Raises ValueError if no stock model of the family does."""
    name = family_of(config)
    fields = {theirs: getattr(config, ours) for theirs, ours in STOCK[name].fields.items()}
    if mixtures.is_mixture(config):
        fields.update(mixtures.stock_fields(config, name))
    if not config.is_causal:
        fields["is_causal"] = False
    if config.diffusion["name"] != "none":
        fields.update({name: value for name, value in config.diffusion.items() if name != "name"})
    stock = CONFIG_MAPPING[name](**fields, dtype=config.dtype)
    back = config_from_stock(stock, init=config.init, embed_scale=config.embed_scale)
    for field in FIELDS:
        ours, theirs = getattr(config, field), getattr(back, field)
        said = field in ("feed_forward", "intermediate_size") and name in MIXTURES  # by `mixtures`
        if ours != theirs and field != "use_cache" and not said:
            raise ValueError(f"{field}={ours!r} is no stock {name} model (that has {theirs!r})")
    return stock


def save_stock(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Write a vanilla Fathom model, or a mixture of experts, as its family's stock checkpoint, embed_scale folded into
    the input table.

    Raises ValueError for a model with other methods, with adapters, with offloaded weights, or with a tied head and
    embed_scale ≠ 1: scaling the shared table would change the head.
    """
    config: FathomConfig = copy.copy(model.config)  # type: ignore[assignment]
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"{folder}: the model has adapters beside its weights; merge them first (peft: merge_and_unload)"
        )
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if any(tensor.is_meta for tensor in state.values()):
        raise ValueError(f"{folder}: weights of the model are offloaded; load it without offloading to save it")
    if config.tie_word_embeddings:  # a head of its own is kept, whatever the config says
        config.tie_word_embeddings = torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    target = stock_config(config)
    if config.embed_scale != 1.0:
        if config.tie_word_embeddings:
            raise ValueError(
                f"embed_scale={config.embed_scale:g} cannot be folded into a tied input table, the head shares it; "
                "train with tie_word_embeddings=False or embed_scale=1"
            )
        state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"] * config.embed_scale
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(target, dtype=model.dtype)
    state = STOCK[family_of(config)].to_stock(state, config)
    expected = stock.state_dict().keys()
    if "lm_head.weight" in expected and "embed_out.weight" in state:
        state["lm_head.weight"] = state.pop("embed_out.weight")
    stock.load_state_dict({k: v for k, v in state.items() if k in expected}, strict=True, assign=True)
    stock.tie_weights()
    stock.generation_config = model.generation_config
    stock.save_pretrained(folder)

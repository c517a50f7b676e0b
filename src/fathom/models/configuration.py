"""`FathomConfig`: one decoder for four families, and independent sections that say which methods run on it."""

from __future__ import annotations

import inspect
import math
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from fathom.models import saved_files
from fathom.models.registry import (
    ENCODER,
    SECTIONS,
    build_options,
    check_type,
    filled,
    lookup,
    nearest,
    override_section,
    resolve_section,
)
from fathom.version import __version__

# What a backbone family means. Every entry is an ordinary config field and can be overridden one by one;
# only an unmodified family (checkpoints.py) saves back as that family's stock checkpoint.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "norm": "rmsnorm",
        "positions": "rotary",
        "qk_norm": False,
        "parallel_residual": False,
        "gated_mlp": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
    },
    "qwen3": {
        "norm": "rmsnorm",
        "positions": "rotary",
        "qk_norm": True,
        "parallel_residual": False,
        "gated_mlp": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "norm_eps": 1e-6,
        "partial_rotary_factor": 1.0,
    },
    "gpt_neox": {
        "norm": "layernorm",
        "positions": "rotary",
        "qk_norm": False,
        "parallel_residual": True,
        "gated_mlp": False,
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu",
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
    },
    "gpt2": {
        "norm": "layernorm",
        "positions": "learned",
        "qk_norm": False,
        "parallel_residual": False,
        "gated_mlp": False,
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu_new",
        "norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
    },
    "qwen2": {
        "norm": "rmsnorm",
        "positions": "rotary",
        "qk_norm": False,
        "parallel_residual": False,
        "gated_mlp": True,
        "attention_bias": True,
        "attention_output_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "norm_eps": 1e-6,
        "partial_rotary_factor": 1.0,
    },
}

# Default of fields that __post_init__ fills: from the family, or from other fields.
DERIVED: Any = None


class FathomConfig(PreTrainedConfig):
    """Configuration of the Fathom decoder.

    Attributes:
        backbone: family whose structure is the default: "llama", "qwen3", "gpt_neox", "gpt2" or "qwen2".
        vocab_size, hidden_size, num_hidden_layers, max_position_embeddings: sizes, named as in transformers.
        num_attention_heads, num_key_value_heads, head_dim: heads; None: as many key/value heads as query heads, and
            hidden_size / num_attention_heads.
        intermediate_size: None means 4·hidden for a plain MLP, 8/3·hidden rounded up to a multiple of 32 for a gated
            one.
        norm, qk_norm, parallel_residual: structure of a layer; None takes the family's value.
        gated_mlp, attention_bias, mlp_bias, hidden_act, norm_eps, partial_rotary_factor: likewise.
        attention_output_bias: bias of `o_proj`; None follows `attention_bias`.
        rope_parameters: RoPE type and its parameters, as in transformers (every type Llama supports).
        attention_dropout, residual_dropout, embedding_dropout: dropout in training.
        is_causal: a token sees itself and all earlier ones; False: all tokens of its row, as in transformers.
        tie_word_embeddings: head and input table share one matrix.
        init: initialisation rule of a model made from scratch, "scaled" or "hf" (initialization.py).
        initializer_range: standard deviation of the "hf" rule.
        embed_scale: input embeddings are multiplied by this; None means √hidden under "scaled", 1 under "hf".
            Learned positions are not scaled.
        depth, mixer, residual, positions, feed_forward: `{"name": …, options}`, the methods; see `fathom methods`.
            `positions` defaults to the family's.
        diffusion: what the model predicts: with "none" the next token; with another method hidden tokens of a row, seen
            from both sides, so that `is_causal` is False.

    Raises:
        ValueError: an unknown family, method or option, a size that does not divide, an unsupported combination.
    """

    model_type = "fathom"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache", "losses", "trace", "auxiliary"]

    backbone: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int = DERIVED
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = DERIVED
    head_dim: int = DERIVED
    max_position_embeddings: int = 2048
    norm: str = DERIVED
    qk_norm: bool = DERIVED
    parallel_residual: bool = DERIVED
    gated_mlp: bool = DERIVED
    attention_bias: bool = DERIVED
    attention_output_bias: bool = DERIVED
    mlp_bias: bool = DERIVED
    hidden_act: str = DERIVED
    norm_eps: float = DERIVED
    partial_rotary_factor: float = DERIVED
    rope_parameters: dict = DERIVED
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0
    tie_word_embeddings: bool = False
    is_causal: bool = True
    init: str = "scaled"
    initializer_range: float = 0.02
    embed_scale: float = DERIVED
    depth: dict[str, Any] = DERIVED
    mixer: dict[str, Any] = DERIVED
    residual: dict[str, Any] = DERIVED
    positions: dict[str, Any] = DERIVED
    feed_forward: dict[str, Any] = DERIVED
    diffusion: dict[str, Any] = DERIVED
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        if kwargs.get("per_layer_config"):
            raise ValueError(
                f"per_layer_config={kwargs['per_layer_config']!r}: layers that differ (KV heads, head dims, …) are not "
                "implemented; all layers share one shape"
            )
        for field, value in kwargs.items():
            if isinstance(value, dict) and isinstance(value.get("name"), str):
                if field == ENCODER:
                    raise ValueError(
                        f"encoder={value!r}: a causal decoder has none, as later tokens would reach earlier ones; use "
                        "FathomEncoderConfig, FathomBartConfig or FathomLongT5Config"
                    )
                raise ValueError(
                    f"{field}={value!r}: the config has no section {field!r}{nearest(field, list(SECTIONS))}; its "
                    f"sections: {', '.join(SECTIONS)}"
                )
        if self.backbone not in FAMILIES:
            raise ValueError(f"backbone={self.backbone!r} is not supported; families: {', '.join(FAMILIES)}")
        for field, hint in self.types().items():
            if getattr(type(self), field, None) is not DERIVED or getattr(self, field) is not None:
                check_type(field, getattr(self, field), hint)
        for field, value in FAMILIES[self.backbone].items():
            if getattr(self, field) is None:
                setattr(self, field, value)
        if self.attention_output_bias is None:
            self.attention_output_bias = self.attention_bias
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"num_attention_heads={self.num_attention_heads!r}: must divide hidden_size={self.hidden_size} "
                    "where head_dim is not given"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            gated = 32 * math.ceil(self.hidden_size * 8 / 3 / 32)
            self.intermediate_size = gated if self.gated_mlp else 4 * self.hidden_size

        for section in SECTIONS:
            setattr(self, section, resolve_section(section, getattr(self, section)))
        if self.diffusion["name"] != "none":
            self.is_causal = False

        scale_embeds = self.depth.get("scale_embeds")
        if scale_embeds is not None:  # a method's option sets the decoder's field; nothing multiplies twice
            method, options = lookup("depth", self.depth["name"]), build_options("depth", self.depth)
            wanted = method.embed_scale(self, options) if scale_embeds else 1.0  # type: ignore[attr-defined]
            if self.embed_scale is not None and not math.isclose(self.embed_scale, wanted):
                raise ValueError(
                    f"depth option scale_embeds={scale_embeds} means embed_scale={wanted:g}, "
                    f"but embed_scale={self.embed_scale:g} was given; drop one of the two"
                )
            self.embed_scale = wanted
        if self.embed_scale is None:
            self.embed_scale = math.sqrt(self.hidden_size) if self.init == "scaled" else 1.0
        super().__post_init__(**kwargs)
        self._check()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, but fields among `kwargs` are checked and completed like the others, not only set.
        Options of a method that `config_dict` names too override its own one by one."""
        given = {name: kwargs.pop(name) for name in cls.types() if name in kwargs}
        for section in SECTIONS:
            if section in given:
                given[section] = override_section(section, config_dict.get(section), given[section])
        with saved_files.naming_newer_versions(config_dict):
            return super().from_dict({**config_dict, **given}, **kwargs)

    def _validate_yarn_by_turns_rope_parameters(self, rope: dict[str, Any], ignore_keys: set[str] | None = None):
        """Check the parameters of our own RoPE type (positions/rotary.py). transformers requires this name."""
        optional = {"original_max_position_embeddings", "beta_fast", "beta_slow", "partial_rotary_factor"}
        required = {"rope_type", "rope_theta", "factor"}
        self._check_received_keys(rope["rope_type"], set(rope), required, optional, ignore_keys=ignore_keys)

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, with the version that wrote it."""
        return {**super().to_dict(), "fathom_version": __version__}

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers, plus the file by which Auto classes find Fathom in a process that has not imported it."""
        plain = self.diffusion["name"] == "none"
        self.auto_map = dict(saved_files.AUTO_MAP if plain else saved_files.DIFFUSION_AUTO_MAP)
        saved_files.write_code(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As in transformers; also registers the model with the Auto classes, which unpickling alone would not do."""
        filled()
        self.__dict__.update(state)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: transformers would copy this class's source into every checkpoint saved afterwards."""

    @classmethod
    def types(cls) -> dict[str, Any]:
        """The annotated type of every field that Fathom declares."""
        return inspect.get_annotations(FathomConfig, eval_str=True)

    def _check(self) -> None:
        def refuse(argument: str, value: Any, remedy: str):
            raise ValueError(f"{argument}={value!r}: {remedy}")

        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        for size in (*sizes, "head_dim", "intermediate_size", "num_key_value_heads"):
            if getattr(self, size) < 1:
                refuse(size, getattr(self, size), "must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            refuse(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"must divide num_attention_heads={self.num_attention_heads}",
            )
        if self.norm not in ("rmsnorm", "layernorm"):
            refuse("norm", self.norm, 'use "rmsnorm" or "layernorm"')
        from transformers.activations import ACT2FN  # here: half a second that `import fathom` need not take

        if self.hidden_act not in ACT2FN:
            refuse("hidden_act", self.hidden_act, f"no activation of transformers; it has {', '.join(sorted(ACT2FN))}")
        if self.init not in ("scaled", "hf"):
            refuse("init", self.init, 'use "scaled" or "hf"')
        for dropout in ("attention_dropout", "residual_dropout", "embedding_dropout"):
            if not 0.0 <= getattr(self, dropout) < 1.0:
                refuse(dropout, getattr(self, dropout), "must be in [0, 1)")
        if self.embed_scale is not None and self.embed_scale <= 0:
            refuse("embed_scale", self.embed_scale, "must be positive")
        depth: Any = lookup("depth", self.depth["name"])
        if not self.is_causal and not depth.sees_anyone(self, build_options("depth", self.depth)):
            reason = f"depth={self.depth['name']!r} gives a token slots or steps of causal order"
            if self.diffusion["name"] != "none":
                refuse("diffusion", self.diffusion["name"], f"its tokens see all of a row, and {reason}; use another")
            refuse("is_causal", False, reason)
        for registry in SECTIONS:
            section = getattr(self, registry)
            method = lookup(registry, section["name"])
            reason = method.unsupported(self, build_options(registry, section))  # type: ignore[attr-defined]
            if reason:
                raise ValueError(f"{registry}={section['name']!r} does not combine with this config: {reason}")

    @property
    def passes(self) -> int:
        """Forwards of the layer stack per token at inference (1 for vanilla)."""
        return build_options("depth", self.depth).passes

    @property
    def heads_seen(self) -> int:
        """Query heads that attention sees: projected heads times the heads that `positions` makes of each."""
        method: Any = lookup("positions", self.positions["name"])
        return self.num_attention_heads * method.heads(build_options("positions", self.positions))

    @property
    def score_channels(self) -> int:
        """Channels of keys beyond `head_dim`, through which `positions` adds a bias to scores."""
        method: Any = lookup("positions", self.positions["name"])
        return method.channels(self, build_options("positions", self.positions))

    @property
    def most_steps(self) -> int:
        """Forwards of the stack that follow on one another for a token at inference: passes, or slots run one by one.
        Jacobi sweeps, which only run slots in parallel, do not count."""
        method: Any = lookup("depth", self.depth["name"])
        return method.most_steps(build_options("depth", self.depth))

    @property
    def is_vanilla(self) -> bool:
        """True when no method is active: the model is an ordinary decoder of its family."""
        return all(getattr(self, section)["name"] in SECTIONS[section].plain for section in SECTIONS)

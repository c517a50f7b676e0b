"""Configs of the encoders that a method of the `encoder` section runs on: BART, LongT5, and the decoder's blocks."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from transformers import BartConfig, LongT5Config, PreTrainedConfig, T5Config

from fathom.models import lazy_configs, saved_files
from fathom.models.configuration import FathomConfig
from fathom.models.registry import ENCODER, RELATIONS, build_options, filled, lookup, override_section, resolve_section
from fathom.version import __version__


class EncoderSection:
    """The section of an encoder's config, `encoder` or `relations`: `{"name": …, options}`, resolved and checked like a
    decoder's sections."""

    section: ClassVar[str] = ENCODER
    host: ClassVar[str]  # encoders/base.py
    stock: ClassVar[type | None] = None  # the config that a stock checkpoint of this family has
    auto_class: ClassVar[tuple[str, str]]  # of transformers, and the model's class

    def layer_flops(self, tokens: float, keys: float) -> float:
        """Matrix-product FLOPs of an encoder layer in which each of `tokens` reads `keys`; a multiply-add is 2."""
        raise NotImplementedError  # abstract

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]
        own = resolve_section(self.section, getattr(self, self.section))
        setattr(self, self.section, own)
        method: Any = lookup(self.section, own["name"])
        reason = method.unsupported(self, build_options(self.section, own))
        if reason:
            raise ValueError(f"{self.section}={own['name']!r} does not combine with this config: {reason}")

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """As in transformers; a stock config of the family is read with the plain method."""
        found, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)  # type: ignore[misc]
        kind, own = found.get("model_type"), cls.model_type  # type: ignore[attr-defined]
        stock = None if cls.stock is None else cls.stock.model_type  # type: ignore[attr-defined]
        if kind not in (None, own, stock):
            families = own if stock is None else f"{own} or {stock}"
            raise ValueError(f"{pretrained_model_name_or_path}: model_type={kind!r}: {cls.__name__} reads {families}")
        if kind == stock:
            found = {key: value for key, value in found.items() if key != "architectures"} | {"model_type": own}
        return found, rest

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; our fields among `kwargs` are checked, and the section completed by the stored one."""
        own = {name: kwargs.pop(name) for name in inspect.get_annotations(cls) if name in kwargs}
        if cls.section in own:
            own[cls.section] = override_section(cls.section, config_dict.get(cls.section), own[cls.section])
        with saved_files.naming_newer_versions(config_dict):
            return super().from_dict({**config_dict, **own}, **kwargs)  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, with the version that wrote it."""
        return {**super().to_dict(), "fathom_version": __version__}  # type: ignore[misc]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers, plus the file by which Auto classes find Fathom in a process that has not imported it."""
        auto, model = self.auto_class
        names = {"AutoConfig": type(self).__name__, auto: model}
        self.auto_map = {key: f"{saved_files.CODE.stem}.{name}" for key, name in names.items()}
        saved_files.write_code(save_directory)
        PreTrainedConfig.save_pretrained(self, save_directory, *args, **kwargs)  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As in transformers; also registers the model with the Auto classes, which unpickling alone would not do."""
        filled()
        self.__dict__.update(state)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """As in transformers. The decoder's has the decoder's number of layers, which T5 names apart: `generate` counts
        the layers of its cache there, and stock T5 fails where the decoder is the deeper one."""
        found = super().get_text_config(decoder=decoder, encoder=encoder)  # type: ignore[misc]
        layers = getattr(self, "num_decoder_layers", None)
        if decoder and not encoder and layers is not None and found is not self:
            found.num_layers = layers
        return found

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: transformers would copy this class's source into every checkpoint saved afterwards."""

    def stock_config(self) -> Any:
        """The config of the same model as a stock one of its family."""
        assert self.stock is not None
        own = (*inspect.get_annotations(type(self)), *saved_files.NOT_STOCK)
        return self.stock(**{key: value for key, value in self.to_dict().items() if key not in own})  # type: ignore[attr-defined]


def _check_buckets(config: Any) -> None:
    """Refuse distances that T5's rule has no bucket for: its logarithm would divide by zero."""
    buckets, farthest = config.relative_attention_num_buckets, config.relative_attention_max_distance
    if 2 * farthest <= buckets:
        raise ValueError(
            f"relative_attention_max_distance={farthest}: must exceed half of "
            f"relative_attention_num_buckets={buckets}, as near distances have a bucket each"
        )


def _decoder_layer(width: int, inner: int, weights: float, target: float, memory: float, keys: float) -> float:
    """FLOPs of one decoder layer: self-attention, cross-attention over `memory` positions, feed-forward network."""
    linear = 2 * target * (6 * width * inner + weights) + 2 * memory * 2 * width * inner
    return linear + 4 * target * (keys + memory) * inner


class FathomBartConfig(EncoderSection, BartConfig):
    """BART's config with a section `encoder`.

    Attributes:
        encoder: `{"name": …, options}`; see `fathom methods`. None: full.
    """

    model_type = "fathom_bart"
    host = "bart"
    stock = BartConfig
    auto_class = ("AutoModelForSeq2SeqLM", "FathomBartForConditionalGeneration")

    encoder: Any = None

    def layer_flops(self, tokens: float, keys: float) -> float:
        d: Any = self.d_model
        inner: Any = self.encoder_ffn_dim
        return 2 * tokens * (4 * d * d + 2 * d * inner) + 4 * tokens * keys * d

    def decoder_flops(self, target: float, memory: float, keys: float) -> float:
        """Matrix-product FLOPs of the decoder and its head on `target` tokens that each see `keys`, with the keys and
        values of `memory` positions."""
        d: Any = self.d_model
        layers: Any = self.decoder_layers
        return (
            layers * _decoder_layer(d, d, 2 * d * self.decoder_ffn_dim, target, memory, keys)
            + 2 * target * d * self.vocab_size
        )


class FathomLongT5Config(EncoderSection, LongT5Config):
    """LongT5's config with a section `encoder`.

    Attributes:
        encoder: `{"name": …, options}`; see `fathom methods`. None: full, LongT5's own `encoder_attention_type`.
        embedding_std: of a new model's embeddings; None: `initializer_factor`, 1 in LongT5 (see `FathomT5Config`).
    """

    model_type = "fathom_longt5"
    host = "longt5"
    stock = LongT5Config
    auto_class = ("AutoModelForSeq2SeqLM", "FathomLongT5ForConditionalGeneration")

    encoder: Any = None
    embedding_std: float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        _check_buckets(self)

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.num_heads * self.d_kv

    @property
    def feed_forward_weights(self) -> int:
        return (3 if self.is_gated_act else 2) * self.d_model * self.d_ff

    def layer_flops(self, tokens: float, keys: float) -> float:
        return 2 * tokens * (4 * self.d_model * self.inner + self.feed_forward_weights) + 4 * tokens * keys * self.inner

    def own_flops(self, length: int) -> float:
        """FLOPs of the encoder with the attention that `encoder_attention_type` names. Each block of queries reads
        three blocks of keys, and with transient-global attention one key for every `global_block_size` tokens.
        """
        size = self.local_radius + 1
        padded = -(-length // size) * size
        layer = self.layer_flops(length, 0) + 4 * padded * 3 * size * self.inner
        if self.encoder_attention_type == "transient-global":
            anchors = length // self.global_block_size
            layer += 2 * anchors * length * self.d_model  # their sums
            layer += 4 * anchors * self.d_model * self.inner + 4 * padded * anchors * self.inner
        return self.num_layers * layer

    def decoder_flops(self, target: float, memory: float, keys: float) -> float:
        """As in BART's config."""
        layer = _decoder_layer(self.d_model, self.inner, self.feed_forward_weights, target, memory, keys)
        layers = self.num_decoder_layers or self.num_layers
        return layers * layer + 2 * target * self.d_model * self.vocab_size


class FathomT5Config(EncoderSection, T5Config):
    """T5's config with a section `relations`.

    Attributes:
        relations: `{"name": …, options}`; see `fathom methods`. None: none, T5 as it is.
        source: how a question and its database are written for this model, as `Source` of fathom.tables writes it;
            None: that class's defaults.
        embedding_std: standard deviation of a new model's embeddings; None: `initializer_factor`, 1 in T5. Beside such
            large embeddings attention adds little at first, and a small model takes longer to learn to copy.
    """

    section = RELATIONS
    model_type = "fathom_t5"
    host = "t5"
    stock = T5Config
    auto_class = ("AutoModelForSeq2SeqLM", "FathomT5ForConditionalGeneration")

    relations: Any = None
    source: Any = None
    embedding_std: float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        _check_buckets(self)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers. Raises ValueError for options that would change which relation a stored row means."""
        stored, given = config_dict.get(RELATIONS), kwargs.get(RELATIONS)
        if stored and given:
            given = resolve_section(RELATIONS, override_section(RELATIONS, stored, given))
            method: Any = lookup(RELATIONS, given["name"])
            if stored["name"] == given["name"]:
                old, new = (method.ids(build_options(RELATIONS, section)) for section in (stored, given))
                if old != new:
                    raise ValueError(
                        f"relations={kwargs[RELATIONS]!r}: the checkpoint's tables are of "
                        f"{max(old.values())} relations, and these options have {max(new.values())} or others; load it "
                        "with the options that it has"
                    )
        return super().from_dict(config_dict, **kwargs)

    def layer_flops(self, tokens: float, keys: float) -> float:
        inner = self.num_heads * self.d_kv
        weights = (3 if self.is_gated_act else 2) * self.d_model * self.d_ff
        return 2 * tokens * (4 * self.d_model * inner + weights) + 4 * tokens * keys * inner

    def encoder_flops(self, length: int) -> float:
        """FLOPs of the encoder on one source, relations included."""
        method: Any = lookup(RELATIONS, self.relations["name"])
        named = method.ids(build_options(RELATIONS, self.relations))
        rows = max(named.values()) + 1 if named else 0  # of each table: q E_Kᵀ, and the summed weights with E_V
        relations = 4 * length * rows * self.num_heads * self.d_kv
        return self.num_layers * (self.layer_flops(length, length) + relations)

    def decoder_flops(self, target: float, memory: float, keys: float) -> float:
        """As in BART's config."""
        inner = self.num_heads * self.d_kv
        weights = (3 if self.is_gated_act else 2) * self.d_model * self.d_ff
        layer = _decoder_layer(self.d_model, inner, weights, target, memory, keys)
        layers = self.num_decoder_layers or self.num_layers
        return layers * layer + 2 * target * self.d_model * self.vocab_size


class FathomEncoderConfig(EncoderSection, FathomConfig):
    """The decoder's config for `FathomForSequenceClassification`: its blocks, each token seeing all.

    Attributes:
        encoder: `{"name": …, options}`; see `fathom methods`. None: full.
        pooling: what the head reads: "cls", the first token, or "mean", the mean over tokens.
        towers: texts of one example, 1 or 2; two share all weights and the head reads u, v, u·v and u − v.
        num_labels: classes, as in transformers.
    """

    model_type = "fathom_encoder"
    host = "decoder"
    auto_class = ("AutoModelForSequenceClassification", "FathomForSequenceClassification")

    encoder: Any = None
    is_causal: bool = False
    pooling: str = "cls"
    towers: int = 1

    @property
    def first(self) -> int:
        """Tokens before the text: the CLS token, if there is one."""
        return int(self.pooling == "cls")

    def layer_flops(self, tokens: float, keys: float) -> float:
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        feed_forward: Any = lookup("feed_forward", self.feed_forward["name"])
        whole = feed_forward.counts(self, build_options("feed_forward", self.feed_forward)).matmul
        linear = 2 * self.hidden_size * self.head_dim * heads + whole / self.num_hidden_layers
        return tokens * linear + 4 * tokens * keys * self.num_attention_heads * self.head_dim

    def _check(self) -> None:
        super()._check()
        if self.is_causal:
            raise ValueError("is_causal=True: an encoder's tokens see all others; leave it out")
        if self.pooling not in ("cls", "mean"):
            raise ValueError(f'pooling={self.pooling!r}: use "cls" or "mean"')
        if self.towers not in (1, 2):
            raise ValueError(f"towers={self.towers!r}: use 1 or 2")
        for section, plain in (("depth", "vanilla"), ("mixer", "none"), ("residual", "standard")):
            if getattr(self, section)["name"] != plain:
                raise ValueError(
                    f"{section}={getattr(self, section)['name']!r}: an encoder runs its layers once, with "
                    f"{section}={plain!r}"
                )
        if self.parallel_residual:
            raise ValueError(f"parallel_residual={self.parallel_residual!r}: an encoder's blocks are not parallel")


lazy_configs.register(FathomBartConfig, FathomLongT5Config, FathomT5Config, FathomEncoderConfig)

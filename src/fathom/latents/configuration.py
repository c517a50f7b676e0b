"""`FathomLatentConfig`: the encoder, the denoiser and the decoder of a latent diffusion model, and its options."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig

from fathom.latents.codar import CoDAR
from fathom.models import lazy_configs, saved_files
from fathom.models.configuration import FathomConfig
from fathom.models.registry import check_type, filled, nearest
from fathom.version import __version__

STAGES = ("latent_diffusion", "contextual_decoder")
PLAIN = {"depth": "vanilla", "mixer": "none", "residual": "standard", "feed_forward": "dense", "diffusion": "none"}


class FathomLatentConfig(PreTrainedConfig):
    """Configuration of `FathomForLatentDiffusion`.

    Attributes:
        encoder: the config of the model whose states or embeddings are the vectors, with its `model_type`: a masked
            diffusion model of ours, or a BERT-style encoder of transformers.
        denoiser, decoder: fields of FathomConfig, the sizes of their blocks; what is left out is as in FathomConfig.
            A `decoder` with a `model_type` is an encoder-decoder of transformers (T5, BART), whose decoder is used.
        codar: options of `CoDAR`.
        length: the most tokens of a row, as in training.
        vocab_size, start_token_id, mask_token_id, pad_token_id, special_token_ids: of the tokenizer, which encoder and
            decoder share. The start token stands before the first token of a text. The mask token replaces inputs of
            the decoder that are dropped out, and tokens that the encoder must not know.
        trained: the stages that have trained the weights, of "latent_diffusion" and "contextual_decoder".

    Raises:
        ValueError: an unknown option, or parts that do not fit together.
    """

    model_type = "fathom_latent"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    encoder: Any = None
    denoiser: Any = None
    decoder: Any = None
    codar: Any = None
    length: int = 128
    vocab_size: int = 32000
    start_token_id: int = 0
    mask_token_id: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    special_token_ids: Any = ()
    trained: Any = ()

    def __post_init__(self, **kwargs: Any) -> None:
        given = {} if self.codar is None else dict(self.codar)
        known = {field.name: field.type for field in dataclasses.fields(CoDAR)}
        hints = inspect.get_annotations(CoDAR, eval_str=True)
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"codar option {name!r} does not exist{nearest(name, list(known))}; its options: "
                                 f"{', '.join(known)}")  # fmt: skip
            check_type(f"codar option {name}", value, hints[name])
        self.codar = dataclasses.asdict(CoDAR(**given))
        self.encoder = self.encoder or {"model_type": FathomConfig.model_type}
        for part in ("encoder", "denoiser", "decoder"):
            value = getattr(self, part)
            setattr(self, part, {} if value is None else value.to_dict() if hasattr(value, "to_dict") else dict(value))
        self.special_token_ids = [int(token) for token in self.special_token_ids or ()]
        self.trained = list(self.trained or ())
        super().__post_init__(**kwargs)
        if self.length < 1:
            raise ValueError(f"length={self.length!r}: must be at least 1")
        for part in ("denoiser", "decoder"):
            config = getattr(self, f"{part}_config")
            if not isinstance(config, FathomConfig):
                continue
            for section, plain in PLAIN.items():
                if getattr(config, section)["name"] != plain:
                    name = getattr(config, section)["name"]
                    raise ValueError(f"{part}: {section}={name!r}: its blocks run with {section}={plain!r}")
            if config.parallel_residual:
                raise ValueError(f"{part}: parallel_residual=True: its blocks are not parallel; use another backbone")
        options, width = self.options, self.source_width
        if options.source != "learned" and options.bottleneck == "none" and self.latent_dim != width:
            raise ValueError(
                f"codar option latent_dim={options.latent_dim}: the encoder's vectors have {width}; give a bottleneck"
            )
        if self.latent_dim > width and options.source != "learned":
            raise ValueError(
                f"codar option latent_dim={self.latent_dim}: a bottleneck of {width} dimensions is narrower"
            )
        if self.encoder_config.vocab_size != self.vocab_size:
            raise ValueError(
                f"vocab_size={self.vocab_size}: the encoder has {self.encoder_config.vocab_size} tokens; encoder and "
                "decoder read one tokenizer"
            )
        if isinstance(options.layer, int) and options.layer > self.encoder_config.num_hidden_layers:
            raise ValueError(
                f"codar option layer={options.layer}: the encoder has {self.encoder_config.num_hidden_layers} layers"
            )

    @property
    def options(self) -> CoDAR:
        return CoDAR(**self.codar)

    @property
    def encoder_config(self) -> Any:
        return AutoConfig.for_model(**self.encoder)

    def _backbone(self, fields: dict[str, Any], **fixed: Any) -> FathomConfig:
        given = {"max_position_embeddings": self.length + 1, "vocab_size": self.vocab_size, **fields, **fixed}
        return FathomConfig(**{name: value for name, value in given.items() if name != "model_type"})

    @property
    def denoiser_config(self) -> FathomConfig:
        return self._backbone(self.denoiser, is_causal=False)

    @property
    def decoder_config(self) -> Any:
        kind = self.decoder.get("model_type", FathomConfig.model_type)
        if kind != FathomConfig.model_type:
            return AutoConfig.for_model(**self.decoder)
        return self._backbone(self.decoder)

    @property
    def source_width(self) -> int:
        """Width of the encoder's states."""
        return self.encoder_config.hidden_size

    @property
    def latent_dim(self) -> int:
        return self.options.latent_dim or self.source_width

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the decoder: the depth that reports name."""
        found = self.decoder_config
        return (
            getattr(found, "decoder_layers", None)
            or getattr(found, "num_decoder_layers", None)
            or (found.num_hidden_layers)
        )

    @property
    def max_position_embeddings(self) -> int:
        return self.length

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        """This config itself; transformers would otherwise return `decoder`, which is no config of a model."""
        return self

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers, plus the file by which Auto classes find Fathom in a process that has not imported it."""
        names = {"AutoConfig": type(self).__name__, "AutoModel": "FathomForLatentDiffusion"}
        self.auto_map = {key: f"{saved_files.CODE.stem}.{name}" for key, name in names.items()}
        saved_files.write_code(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; an error says so where a newer version of Fathom wrote the config."""
        with saved_files.naming_newer_versions(config_dict):
            return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, with the version that wrote it."""
        return {**super().to_dict(), "fathom_version": __version__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As in transformers; also registers the model with the Auto classes, which unpickling alone would not do."""
        filled()
        self.__dict__.update(state)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: transformers would copy this class's source into every checkpoint saved afterwards."""


lazy_configs.register(FathomLatentConfig)

"""`FathomForLatentDiffusion`: encoder, denoiser and contextual decoder in one checkpoint, trained one stage at a time.

    stage latent_diffusion      mean |D(x_t, t, x̂') − target|²;   half of the steps x̂' = D(x_t, t, 0), without
    gradient stage contextual_decoder    mean −log p(y_i | y_<i, z),   z = x₀ corrupted, without gradient

A stage trains its part alone; no gradient crosses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel
from transformers import initialization as init

from fathom.diffusion.base import check_tokens
from fathom.latents.configuration import STAGES, FathomLatentConfig
from fathom.latents.decoder import ContextualDecoder, Memory
from fathom.latents.denoiser import Denoiser
from fathom.latents.encoder import Latents, LatentSpace
from fathom.latents.process import Process
from fathom.latents.stock_decoder import StockDecoder
from fathom.models import registry
from fathom.models.checkpoints.stock import check_names
from fathom.models.configuration import FathomConfig
from fathom.models.device import device_of
from fathom.models.hf_versions import FathomOutput
from fathom.models.model_card import Published
from fathom.ops.cross_entropy import IGNORE


class FathomForLatentDiffusion(Published, PreTrainedModel):  # type: ignore[misc]
    """CoDAR: `encode` turns tokens into vectors, `denoise` estimates these from noised ones, `decode` writes the text,
    and `generate` does all of it from noise.

    `from_encoder` makes a new one on a trained encoder; `space.fit` then fits the norm of the vectors.
    """

    config_class = FathomLatentConfig
    config: FathomLatentConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block", "CrossBlock"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: FathomLatentConfig):
        super().__init__(config)
        options, width = config.options, config.latent_dim
        self.options, self.process = options, Process.of(options)
        self.space = LatentSpace(config)
        self.denoiser = Denoiser(config.denoiser_config, width, options)
        if options.ema:
            self.denoiser_mean = Denoiser(config.denoiser_config, width, options).requires_grad_(False)
        own = isinstance(config.decoder_config, FathomConfig)
        self.decoder: Any = (
            ContextualDecoder(config.decoder_config, width, options)
            if own
            else StockDecoder(config.decoder_config, width, options, config.length)
        )
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what no part fills by its own rule: the norm, tables, and the map to a stock decoder."""
        if isinstance(module, LatentSpace):
            module.initialize_parameters()
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight)
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, std=0.02)
            init.zeros_(module.bias)

    @classmethod
    def from_encoder(cls, encoder: str | Path | PreTrainedModel, config: FathomLatentConfig) -> Any:
        """A new model whose encoder has the weights of a checkpoint (folder or hub name) or of a model."""
        model = cls(config)
        if not isinstance(encoder, PreTrainedModel):
            encoder = load_encoder(encoder)
        model.space.encoder.load_state_dict(encoder.state_dict())
        if config.options.ema:
            model.denoiser_mean.load_state_dict(model.denoiser.state_dict())
        return model

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. Raises ValueError for a tensor that the files lack or that has no place."""
        wanted = kwargs.pop("output_loading_info", False)
        read: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        check_names(pretrained_model_name_or_path, read[1]["missing_keys"], read[1]["unexpected_keys"])
        return read if wanted else read[0]

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing: transformers would copy this class's source into every checkpoint saved afterwards."""

    # ---------------------------------------------------------------- the parts

    def encode(self, input_ids: Int[Tensor, "B L"], attention_mask: Tensor | None = None) -> Latents:
        """x₀ of texts. Raises ValueError for rows longer than those of training and for ids outside the vocabulary."""
        self.check_length(input_ids.shape[1])
        self.check_fitted()
        mask = None if attention_mask is None else attention_mask.bool()
        check_tokens(input_ids, torch.ones_like(input_ids, dtype=torch.bool), self.config.vocab_size)
        return Latents(self.space.encode(input_ids, mask), mask, self.space.fingerprint())

    def denoise(
        self,
        x: Float[Tensor, "B L k"],
        t: Float[Tensor, " B"],
        previous: Float[Tensor, "B L k"] | None = None,
        mask: Bool[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B L k"]:
        """x̂₀, outside training by the running mean of the weights if there is one. Raises ValueError for a time
        outside (0, 1], another width, and rows longer than in training.
        """
        self.process.check(t)
        self.check_width(x)
        self.check_length(x.shape[1])
        return self.estimate(x, t.to(x.device), previous, mask)

    def estimate(
        self, x: Tensor, t: Tensor, previous: Tensor | None = None, mask: Tensor | None = None, train: bool = False
    ) -> Tensor:
        """`denoise` without its checks."""
        seen = mask if self.options.padding == "masked" else None
        denoiser = self.denoiser if train or not self.options.ema else self.denoiser_mean
        previous = None if self.options.self_conditioning == "none" else previous
        return self.process.denoised(denoiser(x, t, previous, seen), x, t)

    def read(self, latents: Latents) -> Memory:
        """The memory that the decoder reads. Raises ValueError for vectors of another norm, width or length."""
        if latents.space != self.space.fingerprint():
            raise ValueError(
                f"space={latents.space}: these vectors have another norm than the decoder was trained with, "
                f"{self.space.fingerprint()}; take them from this model's encode() or generate()"
            )
        self.check_width(latents.values)
        self.check_length(latents.values.shape[1])
        mask = latents.mask
        if mask is not None and self.options.padding == "targets":
            mask = mask.int().cummax(1).values.bool()  # only padding on the left is not seen
        return self.decoder.read(latents.values, mask)

    def decode(self, latents: Latents, **options: Any) -> Tensor:
        """The text for vectors, as token ids [B, L]. Options are `temperature`, `top_p`, `seed` and `stop_at_eos` of
        `LatentGenerationConfig`."""
        from fathom.latents.sampling import decode

        return decode(self, latents, **options)

    @torch.no_grad()
    def generate(
        self, inputs: Tensor | None = None, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """New texts, continued texts or filled-in texts. Fields of `LatentGenerationConfig` may be given as keyword
        arguments."""
        from fathom.latents.sampling import generate

        return generate(self, inputs, attention_mask, *args, **kwargs)

    # ---------------------------------------------------------------- the stages

    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        stage: str = "contextual_decoder",
        attention_mask: Tensor | None = None,
        labels: Int[Tensor, "B L"] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        vectors: Callable[[Any, Tensor, Tensor | None], Tensor] | None = None,
        held_out: bool = False,
        **options: Any,
    ) -> FathomOutput:
        """The loss of a stage over labels other than −100, and for vectors with `padding="targets"` over padding;
        `options` are arguments of `diffusion_losses` or `decoder_output`. Without labels the decoder's logits, [:, i]
        of token i.

        All that a stage computes goes through here, as weights that are sharded over processes are whole only within.

        vectors: makes what the decoder reads, z of (this model, x₀, mask), without gradient and autocast.
        held_out: `held_out_errors` over labels in place of the denoiser's loss, without autocast.
        """
        mask = None if attention_mask is None else attention_mask.bool()
        if stage not in STAGES:
            raise ValueError(f"stage={stage!r}: must be one of {', '.join(STAGES)}")
        self.check_length(input_ids.shape[1])
        self.check_fitted()
        if stage == "contextual_decoder":
            # the decoder's own loss, which in training makes no [tokens, V] tensor of logits
            targets: dict[str, Any] = (
                {} if labels is None else {"shift_labels": labels, "num_items_in_batch": num_items_in_batch}
            )
            if vectors is not None:
                with torch.no_grad(), torch.autocast(input_ids.device.type, enabled=False):
                    options["z"] = vectors(self, self.space.encode(input_ids, mask), mask)
            out = self.decoder_output(input_ids, mask, **options, **targets)
            return FathomOutput(loss=out.loss, logits=out.logits)
        own = torch.ones_like(input_ids, dtype=torch.bool) if labels is None else labels != IGNORE
        learned = own
        if held_out:
            with torch.autocast(input_ids.device.type, enabled=False):
                each = self.held_out_errors(input_ids, mask, **options)
        else:
            each = self.diffusion_losses(input_ids, mask, **options)
        if not held_out and self.options.padding == "targets" and mask is not None:
            learned = own | ~mask  # that a text has ended is learned, too
        loss = (each * learned).sum() / learned.sum().clamp(min=1)
        if num_items_in_batch is not None:  # weighted by its labels among the batches of a step
            loss = loss * own.sum() / num_items_in_batch
        return FathomOutput(loss=loss)

    def diffusion_losses(
        self,
        input_ids: Int[Tensor, "B L"],
        mask: Bool[Tensor, "B L"] | None,
        t: Float[Tensor, " B"],
        noise: Float[Tensor, "B L k"] | None = None,
        self_condition: bool = False,
    ) -> Float[Tensor, "B L"]:
        """|D − target|² of every token, averaged over dimensions, in fp32 or wider. With learned embeddings, plus −log
        p(token) of rounding x̂₀ to the nearest embedding, without which all embeddings would become equal.

        self_condition: the model gets its own first estimate, without gradient, and makes a second one.
        """
        x0 = self.space.encode(input_ids, mask)
        if self.options.source != "learned":
            x0 = x0.detach()
        t = t.to(device=x0.device, dtype=x0.dtype)
        noise = torch.randn_like(x0) if noise is None else noise.to(x0)
        x = self.process.corrupt(x0, t, noise)
        seen = mask if self.options.padding == "masked" else None
        previous = None
        if self_condition and self.options.self_conditioning != "none":
            with torch.no_grad():
                previous = self.estimate(x.detach(), t, None, mask, train=True)
        said = self.denoiser(x, t, previous, seen)
        said = said.to(torch.promote_types(said.dtype, torch.float32))
        each = (said - self.process.target(x0, t, noise)).square().mean(-1)
        if self.options.source == "learned":
            table = F.normalize(self.space.table.weight, dim=-1) * x0.shape[-1] ** 0.5
            logits = self.process.denoised(said, x, t) @ table.T
            rounding = F.cross_entropy(logits.flatten(0, 1), input_ids.flatten(), reduction="none").view_as(each)
            each = each + (rounding if mask is None else rounding * mask)
        return each

    def held_out_errors(
        self, input_ids: Tensor, mask: Tensor | None, t: Float[Tensor, " B"], noise: Float[Tensor, "B L k"]
    ) -> Float[Tensor, "B L"]:
        """|x̂₀ − x₀|² of every token, averaged over dimensions, for any kind of prediction; from one estimate."""
        x0 = self.space.encode(input_ids, mask)
        t = t.to(device=x0.device, dtype=x0.dtype)
        x = self.process.corrupt(x0, t, noise.to(x0))
        return (self.estimate(x, t, None, mask) - x0).square().mean(-1)

    def decoder_logits(self, *args: Any, **kwargs: Any) -> Float[Tensor, "B L V"]:
        """The logits of `decoder_output`."""
        return self.decoder_output(*args, **kwargs).logits

    def decoder_output(
        self,
        input_ids: Int[Tensor, "B L"],
        mask: Bool[Tensor, "B L"] | None,
        z: Float[Tensor, "B L k"] | None = None,
        dropped: Bool[Tensor, "B L"] | None = None,
        use_memory: bool = True,
        **labels: Any,
    ) -> Any:
        """Teacher-forced output for every token given those before it and vectors z (None: x₀).

        dropped: mask of the tokens that are masked in the decoder's input. use_memory=False: a plain language model.
        """
        start = input_ids.new_full((len(input_ids), 1), self.config.start_token_id)
        seen = input_ids if dropped is None else input_ids.masked_fill(dropped, self.mask_token_id())
        inputs = torch.cat([start, seen[:, :-1]], dim=1)
        memory = None
        if use_memory:
            z = self.space.encode(input_ids, mask).detach() if z is None else z
            memory = self.decoder.read(z, mask if self.options.padding == "masked" else None)
        return self.decoder(input_ids=inputs, memory=memory, use_cache=False, **labels)

    def train_stage(self, stage: str) -> None:
        """Freeze all parameters but those of this stage's part."""
        self.requires_grad_(False)
        if stage == "latent_diffusion":
            self.denoiser.requires_grad_(True)
            if self.options.source == "learned":
                self.space.table.requires_grad_(True)
        else:
            self.decoder.requires_grad_(True)

    @torch.no_grad()
    def update_mean(self, step: int) -> None:
        """Update the running mean of the denoiser's weights after an optimiser step; its decay grows from 2/11 to
        `ema`.
        """
        if not self.options.ema:
            return
        share = 1 - min(self.options.ema, (1 + step) / (10 + step))
        for mean, weight in zip(self.denoiser_mean.parameters(), self.denoiser.parameters(), strict=True):
            mean.lerp_(weight, share)

    # ---------------------------------------------------------------- what is refused

    def mask_token_id(self) -> int:
        if self.config.mask_token_id is None:
            raise ValueError("mask_token_id=None: the tokenizer has no mask token; give one, or word_dropout=0")
        return self.config.mask_token_id

    def check_fitted(self) -> None:
        if not bool(self.space.fitted):
            raise ValueError("the norm of the vectors is not fitted: call space.fit(batches), or train a stage")

    def check_length(self, length: int) -> None:
        if length > self.config.length:
            raise ValueError(f"{length} tokens: the model was trained on rows of at most length={self.config.length}")

    def check_width(self, x: Tensor) -> None:
        if x.shape[-1] != self.config.latent_dim:
            raise ValueError(f"vectors of width {x.shape[-1]}: the model's have latent_dim={self.config.latent_dim}")

    def part_parameters(self) -> dict[str, int]:
        """The number of parameters of each part; the running mean is not counted."""
        parts = {"encoder": self.space, "denoiser": self.denoiser, "decoder": self.decoder}
        return {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}


def load_encoder(checkpoint: str | Path) -> PreTrainedModel:
    """A trained encoder: a masked diffusion model of ours, or a stock encoder without its head."""
    registry.filled()
    config = AutoConfig.from_pretrained(checkpoint)
    if isinstance(config, FathomConfig):
        from fathom.models.causal_lm import FathomForCausalLM
        from fathom.models.masked_diffusion import FathomForMaskedDiffusion

        kind: Any = FathomForCausalLM if config.diffusion["name"] == "none" else FathomForMaskedDiffusion
        return kind.from_pretrained(checkpoint, dtype=torch.float32)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{checkpoint}: an encoder-decoder ({config.model_type}); give an encoder, such as BERT")
    return AutoModel.from_pretrained(checkpoint, dtype=torch.float32)


def load(checkpoint: str | Path, device: str | None = None) -> tuple[Any, Any]:
    """A trained model, in eval mode, and its tokenizer. Raises OSError or ValueError for a folder without them."""
    model: Any = FathomForLatentDiffusion.from_pretrained(checkpoint, dtype="auto")
    return model.to(device_of(device)).eval(), AutoTokenizer.from_pretrained(checkpoint)


def new_config(encoder: str | Path | PreTrainedModel, tokenizer: Any, **fields: Any) -> FathomLatentConfig:
    """The config of a new model on an encoder, with the tokens of its tokenizer."""
    registry.filled()
    config = encoder.config if isinstance(encoder, PreTrainedModel) else AutoConfig.from_pretrained(encoder)
    written = {key: value for key, value in config.to_dict().items() if key not in ("auto_map", "architectures")}
    start = next(
        (t for t in (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id) if t is not None), None
    )
    if start is None:
        raise ValueError("the tokenizer has no BOS, CLS or EOS token to put before a text; set one")
    mask = tokenizer.mask_token_id
    if mask is None and isinstance(config, FathomConfig):
        mask = config.diffusion.get("mask_token_id")
    found = {
        "encoder": {**written, "model_type": config.model_type},
        "vocab_size": config.vocab_size,
        "start_token_id": start,
        "mask_token_id": mask,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "special_token_ids": sorted(set(tokenizer.all_special_ids)),
    }
    return FathomLatentConfig(**{**found, **fields})

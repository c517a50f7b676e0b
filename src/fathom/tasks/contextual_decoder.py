"""Stage two of CoDAR: a decoder learns to write a text from its corrupted vectors.

z = corrupt(x₀);   loss = mean −log p(y_i | y_<i, z)

Sampling gives the decoder imperfect vectors, so it learns on such: noised a little by the process, estimated by the
denoiser, with Gaussian noise added, or as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathom.data import PreparedData
from fathom.latents.cost import decoder_flops, denoiser_flops, encoder_flops
from fathom.latents.process import EARLIEST, row_generators, row_noise
from fathom.models.device import device_of
from fathom.models.method import check_choice, check_number, check_range
from fathom.tasks.base import Sample, Score, register_task
from fathom.tasks.causal_lm import SAMPLE_TEMPERATURE, bits_of_loss, unigram_of_blocks
from fathom.tasks.latents import LatentTask

CORRUPTIONS = ("forward", "denoiser", "gaussian", "none", "per_token")


@register_task("contextual_decoder")
@dataclass(frozen=True)
class ContextualDecoding(LatentTask):
    """Options:

    corrupt: what the decoder reads: "forward", x_t at t ~ U(t_min, t_max) a row; "per_token", a t for every token;
        "denoiser", the denoiser's estimate from x_t, t ~ U(0, t_max); "gaussian", x₀ + σ ε; "none", x₀.
    t_min, t_max: of t.
    sigma: σ of "gaussian".
    word_dropout: share of earlier tokens that are masked in the decoder's input, so that it must read the vectors.
    padding: "targets": the first padding token after a text is a target too, which ends it; "masked": none is.
    examples: held-out rows, from the first on, for the controls and the reconstruction.
    unwrapped: a document is a row, cut or padded to the block; otherwise rows are cut from running text.
    """

    corrupt: str = "forward"
    t_min: float = 0.001
    t_max: float = 0.15
    sigma: float = 0.2
    word_dropout: float = 0.0
    padding: str = "targets"
    examples: int = 32
    unwrapped: bool = False

    stage = "contextual_decoder"
    summary = "Write a text from its corrupted vectors: the second stage of CoDAR."
    scores = (
        Score(
            "decoder_bits_per_byte",
            "bits per byte given the vectors",
            "lower",
            "The decoder's loss on held-out text in bits over its bytes, each token given those before it and the "
            "corrupted vectors of the row, in separate blocks of {block_size} tokens.",
        ),
        Score(
            "memory_gap",
            "nats per token by the vectors",
            "higher",
            "Control iv: the loss with the vectors of another row of the held-out text minus that with its own. Near 0 "
            "the decoder ignores the vectors.",
        ),
        Score(
            "noise_gap",
            "nats per token over noise",
            "higher",
            "Control i: the loss with vectors of pure noise minus that with the row's own.",
        ),
        Score(
            "reconstruction",
            "of tokens from clean vectors",
            "higher",
            "Control iii: the share of tokens that greedy decoding of a text's vectors gets right.",
        ),
        Score(
            "reconstruction_corrupted",
            "of tokens from corrupted vectors",
            "higher",
            "Control iii: the same of its corrupted vectors.",
        ),
    )
    loss_unit = "nats per token"
    answer = "token of the decoder"
    cost_heading = "FLOPs per token"
    reference_note = "The unigram model knows only how often each token occurs."
    samples_note = f"Sampled from noise in 50 steps, decoded at temperature {SAMPLE_TEMPERATURE}"

    def __post_init__(self) -> None:
        where = "task contextual_decoder"
        check_choice(where, "corrupt", self.corrupt, CORRUPTIONS)
        check_choice(where, "padding", self.padding, ("targets", "masked"))
        for name in ("t_min", "t_max", "word_dropout"):
            check_number(where, name, getattr(self, name), 0, 1)
        check_number(where, "sigma", self.sigma, 0)
        check_range(where, "examples", self.examples, 2)
        if not 0 < self.t_min <= self.t_max:
            raise ValueError(f"{where} option t_min={self.t_min!r}: must be above 0 and at most t_max={self.t_max}")

    def check_stages(self, model: Any) -> None:
        if self.corrupt == "denoiser" and "latent_diffusion" not in model.config.trained:
            raise ValueError(
                "task contextual_decoder option corrupt='denoiser': the denoiser has not been trained; start from the "
                "checkpoint of task 'latent_diffusion', or use 'forward'"
            )
        if self.word_dropout:
            model.mask_token_id()

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = super().collate(examples)
        if self.padding == "targets" and "t" in batch and "attention_mask" in batch:
            ends = batch["attention_mask"].sum(1, keepdim=True)
            first = torch.arange(batch["labels"].shape[1]) == ends
            batch["labels"] = torch.where(first, batch["input_ids"], batch["labels"])
        return batch

    def training_flops(self, config: Any, block_size: int, checkpointing: bool, ran: Any = None) -> float:
        """Forward and backward of the decoder, and the passes that make its vectors."""
        made = encoder_flops(config, block_size)
        if self.corrupt == "denoiser":
            made += denoiser_flops(config, block_size, previous=False)
        return (4 if checkpointing else 3) * decoder_flops(config, block_size) + made

    def corrupted(
        self, model: Any, x0: Tensor, mask: Tensor | None, t: Tensor | None = None,
        generators: list[torch.Generator] | None = None,
    ) -> Tensor:  # fmt: skip
        """z of vectors [B, L, k]. `t` in [0, 1) by row; `generators` draw it, and the noise, of each row its own."""
        rows, length, width = x0.shape
        if generators is None:
            noise = torch.randn_like(x0)
            t = torch.rand(rows, device=x0.device) if t is None else t.to(x0)
            each = torch.rand(rows, length, device=x0.device) if self.corrupt == "per_token" else None
        else:
            t = torch.stack([torch.rand((), generator=g) for g in generators]).to(x0)
            each = torch.stack([torch.rand(length, generator=g) for g in generators]).to(x0)
            noise = row_noise(generators, length, width).to(x0)
        if self.corrupt == "none":
            return x0
        if self.corrupt == "gaussian":
            return x0 + self.sigma * noise
        if self.corrupt == "denoiser":
            at = (t * self.t_max).clamp(min=EARLIEST)
            with torch.no_grad():
                return model.estimate(model.process.corrupt(x0, at, noise), at, None, mask).detach()
        drawn = t if self.corrupt == "forward" else each
        assert drawn is not None
        return model.process.corrupt(x0, self.t_min + (self.t_max - self.t_min) * drawn, noise)

    def forward(self, model: Any, **batch: Any) -> Any:
        ids, items = batch["input_ids"], batch.pop("num_items_in_batch", None)
        given = {name: batch[name] for name in ("attention_mask",) if name in batch}
        generators = None if "t" in batch else row_generators(ids)
        vectors = functools.partial(self.corrupted, t=batch.get("t"), generators=generators)
        dropped = None
        if self.word_dropout and "t" in batch:
            dropped = torch.rand(ids.shape, device=ids.device) < self.word_dropout
        return model(
            ids, stage=self.stage, labels=batch["labels"], num_items_in_batch=items, vectors=vectors, dropped=dropped,
            **given,
        )  # fmt: skip

    def score(self, data: PreparedData, loss: float | None, checkpoint: Path) -> dict[str, float | None]:
        from fathom.latents.controls import controls

        found: dict[str, float | None] = {"decoder_bits_per_byte": bits_of_loss(data, loss)}
        if data.validation is None:
            return {**found, **dict.fromkeys(score.name for score in self.scores[1:])}
        model = self.model_class.from_pretrained(checkpoint).eval()
        model.to(device_of())
        rows = [data.validation[i] for i in range(min(self.examples, len(data.validation)))]
        batch = self.collate(rows)
        said = controls(model, batch["input_ids"].to(model.device), batch.get("attention_mask"), self)
        return {**found, **{score.name: said[score.name] for score in self.scores[1:]}}

    def remarks(self, scores: Mapping[str, float | None]) -> list[str]:
        from fathom.latents.controls import IGNORED_BELOW

        gap = scores.get("memory_gap")
        if gap is not None and gap < IGNORED_BELOW:
            return [f"the latents are ignored: another row's vectors cost {gap:.3f} nats per token (control iv)"]
        return []

    def reference(self, data: PreparedData, sequences: int) -> float:
        return unigram_of_blocks(data, sequences)

    def samples(self, model: Any, data: PreparedData, room: int) -> list[Sample]:
        if "latent_diffusion" not in model.config.trained:
            return []
        ids = model.generate(rows=2, temperature=SAMPLE_TEMPERATURE)
        return [Sample("", str(data.tokenizer.decode(row, skip_special_tokens=True))) for row in ids]

    def answer_flops(
        self, config: Any, data: PreparedData, block_size: int, ran: Sequence[float] | None = None
    ) -> float:
        return decoder_flops(config, block_size)

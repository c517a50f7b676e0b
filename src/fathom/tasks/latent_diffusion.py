"""Stage one of CoDAR: a denoiser learns to estimate the vectors of texts from noised ones.

t ~ U(ε, 1) a row;   x_t = α_t x₀ + σ_t ε;   loss = mean |D(x_t, t, x̂') − target|² over tokens and dimensions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from transformers import TrainerCallback

from fathom.data import PreparedData
from fathom.latents.cost import denoiser_flops, encoder_flops
from fathom.latents.process import EARLIEST, row_generators, row_noise
from fathom.models.hf_versions import FathomOutput
from fathom.models.method import check_number, check_range
from fathom.tasks.base import Sample, Score, register_task
from fathom.tasks.latents import LatentTask


@register_task("latent_diffusion")
@dataclass(frozen=True)
class LatentDiffusion(LatentTask):
    """Options:

    self_condition: share of the steps in which the model gets its own first estimate and makes a second one.
    draws: noise levels of a held-out row, (k + ½)/draws.
    unwrapped: a document is a row, cut or padded to the block; otherwise rows are cut from running text.
    """

    self_condition: float = 0.5
    draws: int = 8
    unwrapped: bool = False

    stage = "latent_diffusion"
    alternates = True  # what reads the first estimate takes no part in a step without one
    summary = "Estimate the vectors of a text from noised ones: the first stage of CoDAR."
    scores = (
        Score(
            "denoising_error",
            "of the vectors' variance",
            "lower",
            "The squared error of one estimate of the held-out vectors, the mean over tokens, dimensions and evenly "
            "spread noise levels. The normalised vectors have variance 1.",
        ),
    )
    loss_unit = "squared error"
    answer = "pass of the denoiser"
    cost_heading = "FLOPs per pass"
    reference_name = "mean"
    reference_note = "The mean of the training set's vectors, which knows nothing of a text, has error 1."
    samples_note = "None: the next stage writes texts"

    def __post_init__(self) -> None:
        check_number("task latent_diffusion", "self_condition", self.self_condition, 0, 1)
        check_range("task latent_diffusion", "draws", self.draws, 1)

    def training_flops(self, config: Any, block_size: int, checkpointing: bool, ran: Any = None) -> float:
        """FLOPs of forward and backward, of the first estimate in a share of the steps, and of the encoder's pass."""
        given = self.self_condition if config.options.self_conditioning != "none" else 0.0
        plain, after = (denoiser_flops(config, block_size, previous) for previous in (False, True))
        times = 4 if checkpointing else 3
        return times * (given * after + (1 - given) * plain) + given * plain + encoder_flops(config, block_size)

    def callbacks(self) -> list[TrainerCallback]:
        return [RunningMean()]

    def forward(self, model: Any, **batch: Any) -> Any:
        items, ids = batch.pop("num_items_in_batch", None), batch["input_ids"]
        given = {name: batch[name] for name in ("attention_mask",) if name in batch}
        given |= {"stage": self.stage, "labels": batch["labels"], "num_items_in_batch": items}
        if "t" in batch:
            t = EARLIEST + (1 - EARLIEST) * batch["t"]
            # one draw for all processes: they run the same collectives
            twice = bool(broadcast(torch.rand(()).to(ids.device)) < self.self_condition)
            return model(ids, t=t, self_condition=twice, **given)
        generators, total = row_generators(ids), torch.zeros((), device=ids.device)
        for draw in range(self.draws):
            t = torch.full((len(ids),), (draw + 0.5) / self.draws, device=ids.device)
            noise = row_noise(generators, ids.shape[1], getattr(model, "module", model).config.latent_dim)
            total = total + model(ids, t=t, noise=noise, held_out=True, **given).loss / self.draws
        return FathomOutput(loss=total)

    def score(self, data: PreparedData, loss: float | None, checkpoint: Path) -> dict[str, float | None]:
        return {"denoising_error": loss}

    def reference(self, data: PreparedData, sequences: int) -> float:
        return 1.0

    def samples(self, model: Any, data: PreparedData, room: int) -> list[Sample]:
        return []

    def answer_flops(
        self, config: Any, data: PreparedData, block_size: int, ran: Sequence[float] | None = None
    ) -> float:
        return block_size * denoiser_flops(config, block_size)


class RunningMean(TrainerCallback):
    """A callback that updates the running mean of the denoiser's weights after every optimiser step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.update_mean(state.global_step)

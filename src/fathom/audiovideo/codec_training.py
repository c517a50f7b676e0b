"""Training of the codecs on generated clips: `AutoencoderKLWan` on pictures, the DAC on sound.

    pictures   L = |x̂ − x| + 5 (x̂ − x)² + β KL
    sound      L = 4 |x̂ − x| / |x| + Σ_w ( |Ŝ_w − S_w| / |S_w| + ½ |log Ŝ_w − log S_w| ) + β KL,   S_w: spectra
    KL of N(μ, σ²) from N(0, 1), per latent; x̂ is decoded from a sample

One loop for both, through accelerate: several GPUs and mixed precision as it launches them. Sound stays in float32.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.data import DataLoader, Dataset, Subset

from fathom.audiovideo.clips import Clip
from fathom.audiovideo.generator import Generator
from fathom.recorded import recorded
from fathom.writing import write_text

WINDOWS = (64, 256, 1024)  # samples of the spectra that are compared
TRIED = 20  # steps by which a step's time is judged
LOSSES = "losses.json"  # in the folder of a run's state
PLACES = 4  # of a crop, of which the most eventful is taken


@dataclasses.dataclass(frozen=True)
class Training:
    """Options of a codec's training.

    steps: of the optimiser.
    batch: crops of a step in each process.
    lr: highest learning rate, after a warm-up of a twentieth of the steps; it falls along a cosine.
    kl: β.
    minutes: time limit; if steps are too slow, there are fewer than `steps`. None: no limit.
    precision: accelerate's mixed_precision: "no" or "bf16".
    seed: of weights and latents' noise.
    workers: processes that make clips.
    graph: record the step as a CUDA graph, which saves the launches of a codec's many small kernels; needs one process
        on a GPU.
    """

    steps: int = 2000
    batch: int = 8
    lr: float = 2e-3
    kl: float = 1e-6
    minutes: float | None = None
    precision: str = "no"
    seed: int = 0
    workers: int = 0
    graph: bool = False

    def __post_init__(self) -> None:
        if self.steps <= TRIED:
            raise ValueError(f"steps={self.steps}: use more than {TRIED}")


class Crops(Dataset):
    """Crop n is cut from clip n of a generator: `frames` pictures of `side` × `side`, or as many samples.

    Of a few random places the one that changes the most is taken, as walls and silence teach little.
    """

    def __init__(self, generator: Generator, cut: Callable[[Clip, np.random.Generator], Tensor], count: int) -> None:
        self.generator, self.cut, self.count = generator, cut, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, n: int) -> Tensor:
        return self.cut(self.generator.clip(n), np.random.default_rng([self.generator.seed, n, 1]))


@dataclasses.dataclass(frozen=True)
class PictureCrop:
    """Cuts the window of a clip's pictures in which most moves, of a few drawn ones, to [−1, 1]."""

    frames: int = 17
    side: int = 64

    def __call__(self, clip: Clip, draw: np.random.Generator) -> Float[Tensor, "3 F h w"]:
        total, height, width, _ = clip.frames.shape
        begins = draw.integers(0, total - self.frames + 1, PLACES)
        tops, lefts = (draw.integers(0, room - self.side + 1, PLACES) for room in (height, width))
        crops = [
            clip.frames[b : b + self.frames, t : t + self.side, l : l + self.side]
            for b, t, l in zip(begins, tops, lefts)
        ]
        chosen = max(crops, key=lambda crop: float(crop.std()))
        return torch.from_numpy(chosen.astype(np.float32) / 127.5 - 1).permute(3, 0, 1, 2)


@dataclasses.dataclass(frozen=True)
class SoundCrop:
    """Cuts the loudest of a few drawn windows of a clip's sound."""

    samples: int = 4800

    def __call__(self, clip: Clip, draw: np.random.Generator) -> Float[Tensor, "1 n"]:
        begins = draw.integers(0, len(clip.audio) - self.samples + 1, PLACES)
        crops = [clip.audio[begin : begin + self.samples] for begin in begins]
        return torch.from_numpy(max(crops, key=lambda crop: float(np.square(crop).sum())))[None]


class PictureLoss(nn.Module):
    """The loss of pictures through an `AutoencoderKLWan`."""

    def __init__(self, codec: Any, kl: float) -> None:
        super().__init__()
        self.codec, self.kl = codec, kl

    def forward(self, pictures: Float[Tensor, "B 3 F h w"]) -> Float[Tensor, ""]:
        latents = self.codec.encode(pictures).latent_dist
        error = self.codec.decode(latents.sample(), return_dict=False)[0].float() - pictures
        return error.abs().mean() + 5 * error.square().mean() + self.kl * _divergence(latents.mean, latents.logvar)


class SoundLoss(nn.Module):
    """The loss of sound through a `Dac`."""

    def __init__(self, codec: Any, kl: float) -> None:
        super().__init__()
        self.codec, self.kl = codec, kl

    def forward(self, sound: Float[Tensor, "B 1 n"]) -> Float[Tensor, ""]:
        mean, log_variance = self.codec.moments(sound)
        latents = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        decoded = self.codec.decode(latents)[..., : sound.shape[-1]]
        loss = 4 * (decoded - sound).abs().mean() / sound.abs().mean().clamp(min=1e-3)
        loss = loss + self.kl * _divergence(mean, log_variance)
        for window in WINDOWS:
            made, true = _spectrum(decoded, window), _spectrum(sound, window)
            loss = loss + (made - true).abs().mean() / true.mean().clamp(min=1e-3)
            loss = loss + 0.5 * (torch.log(made + 1e-2) - torch.log(true + 1e-2)).abs().mean()
        return loss


@torch.no_grad()
def start(codec: Any) -> None:
    """Initialise a `Dac` of any width for training: each convolution keeps the size of its signal, the second one of a
    residual unit a fifth of it, and latents start almost without noise.

    The release's rule, standard deviations of 0.02, suits its widths: with it a narrow codec would start and stay
    silent.
    """
    for name, module in codec.named_modules():
        if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            taps, stride = module.kernel_size[0], module.stride[0]
            inputs = module.in_channels * (taps / stride if isinstance(module, nn.ConvTranspose1d) else taps)
            second = name.endswith("block.3") and taps == 1
            weight = torch.randn(module.weight.shape) * (0.2 if second else 1.0) / math.sqrt(inputs)
            if is_parametrized(module):
                module.weight = weight  # weight norm takes it apart
            else:
                module.weight.copy_(weight)
    codec.decoder.model[-2].weight = 0.2 * codec.decoder.model[-2].weight  # sound is less loud than unit variance
    codec.quant_conv.bias[codec.config.latent_dim :] = -6.0


def _divergence(mean: Tensor, log_variance: Tensor) -> Float[Tensor, ""]:
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).float().mean()


def _spectrum(sound: Float[Tensor, "B 1 n"], window: int) -> Float[Tensor, "B bins l"]:
    hann = torch.hann_window(window, device=sound.device)
    both = torch.stft(sound[:, 0], window, window // 4, window=hann, return_complex=True)
    return (both.real.square() + both.imag.square() + 1e-8).sqrt()  # |z| has no gradient at 0


def train(
    loss: PictureLoss | SoundLoss,
    crops: Crops,
    training: Training,
    say: Callable[[str], None] = print,
    state: Path | None = None,
) -> list[float]:
    """Train the codec of `loss` in place; returns the loss of every step. Crops are taken in order, once each.

    With `state`, a folder, the run is saved there twenty times, and another call resumes it. Raises ValueError for
    fewer crops than the steps need, for `state` together with `minutes`, and for `graph` on a CPU or with several
    processes.
    """
    accelerator = Accelerator(mixed_precision=training.precision)
    each = training.batch * accelerator.num_processes
    if len(crops) < training.steps * each:
        raise ValueError(f"crops: {len(crops)}, and {training.steps} steps need {training.steps * each}")
    if state is not None and training.minutes is not None:
        raise ValueError(
            f"minutes={training.minutes}: a run that can be resumed has a fixed number of steps; leave it out"
        )
    graph = training.graph
    if graph and (accelerator.device.type != "cuda" or accelerator.num_processes > 1):
        where = f"{accelerator.num_processes} processes on {accelerator.device.type}"
        raise ValueError(f"graph=True: CUDA graphs need one process on a GPU, and these are {where}; leave it out")
    lr: Any = torch.tensor(training.lr, device=accelerator.device) if graph else training.lr
    optimizer = torch.optim.AdamW(loss.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=1e-4, capturable=graph)
    model, optimizer = accelerator.prepare(loss, optimizer)
    losses: list[float] = []
    if state is not None and (state / LOSSES).is_file():
        accelerator.load_state(str(state))
        losses = json.loads((state / LOSSES).read_text(encoding="utf-8"))
        say(f"resumes after step {len(losses)}")
    left = Subset(crops, range(len(losses) * each, len(crops)))
    loader = accelerator.prepare(DataLoader(left, training.batch, num_workers=training.workers))
    model.train()

    def update(batch: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with accelerator.autocast():
            value = model(batch)
        accelerator.backward(value)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return value.detach()

    run: Callable[[Tensor], Tensor] | None = None if graph else update
    steps, done = training.steps, len(losses)
    began = warmed_up = time.perf_counter()
    for step, batch in enumerate(loader, start=done):
        if run is None:
            run = _replayed(update, batch, optimizer)
        if step in (TRIED // 2, TRIED) and batch.is_cuda:
            torch.cuda.synchronize()
        if step == TRIED // 2:
            warmed_up = time.perf_counter()
        if step == TRIED and training.minutes is not None:
            now = time.perf_counter()
            long, rest = (now - warmed_up) / (step - TRIED // 2), training.minutes * 60 - (now - began)
            fits = broadcast(torch.tensor(step + rest / long, device=batch.device))
            steps = min(steps, max(TRIED + 1, int(fits)))
            say(f"{steps} steps of {long:.3f} s")
        if step >= steps:
            break
        warm = max(1, steps // 20)
        share = (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))
        value = training.lr * max(share, 0.01)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"].fill_(value) if graph else value
        noise = np.random.SeedSequence([training.seed, accelerator.process_index, step])  # so that a run can go on
        torch.manual_seed(int(noise.generate_state(1)[0]))
        losses.append(run(batch))  # type: ignore[arg-type]  # numbers at the end: asking for one waits for the GPU
        if (step + 1) % warm == 0 or step == steps - 1:
            losses = [float(value) for value in losses]
            say(f"step {step + 1} of {steps}: loss {losses[-1]:.4f}, {time.perf_counter() - began:.0f} s")
            if state is not None:
                accelerator.save_state(str(state))
                if accelerator.is_main_process:
                    write_text(state / LOSSES, json.dumps(losses))
    accelerator.wait_for_everyone()
    model.eval()
    return losses


def _replayed(
    update: Callable[[Tensor], Tensor], batch: Tensor, optimizer: torch.optim.Optimizer
) -> Callable[[Tensor], Tensor]:
    """`update` as a CUDA graph that reads every batch where it has read this one."""
    held, found = batch.clone(), torch.zeros((), device=batch.device)
    replay = recorded(lambda: found.copy_(update(held)), optimizer)

    def run(batch: Tensor) -> Tensor:
        held.copy_(batch)
        replay()
        return found.clone()

    return run


@torch.no_grad()
def set_statistics(video: Any, generator: Generator, count: int = 32, first: int = 0) -> None:
    """Write mean and deviation of the latents of these clips into the autoencoder's config, for `NeuralCodec`."""
    parts = []
    for clip in generator.clips(count, first):
        pictures = torch.from_numpy(clip.frames.astype(np.float32) / 127.5 - 1).permute(3, 0, 1, 2)[None]
        parts.append(
            video.encode(pictures.to(video.device, video.dtype)).latent_dist.mode().float().cpu()[0].flatten(1)
        )
    latents = torch.cat(parts, dim=1)
    mean, deviation = latents.mean(dim=1), latents.std(dim=1).clamp(min=1e-3)
    video.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())

"""A rival with compressed latents, as in LD4LG (arXiv 2212.09462): a text of any length is m vectors.

    z = l2(W · perceiver(f(y)))   m learned queries read the encoder's states;  √k per vector
    y ~ p(y_i | y_<i, z)          CoDAR's decoder, learned positions of the m vectors;  both learn together
    then D(z_t, t) with v-prediction, as CoDAR's denoiser, on vectors of mean 0 and variance 1 by dimension

Training loops are short and plain: the rival is only made for a table beside a trained CoDAR (writers.py).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fathom.latents.decoder import ContextualDecoder
from fathom.latents.denoiser import Denoiser
from fathom.latents.process import EARLIEST, Process
from fathom.latents.recovery import RecoveryConfig, share_of_peak
from fathom.latents.sampling import stepped
from fathom.models.decoder import make_norm


class Compressed(nn.Module):
    """The autoencoder and the denoiser of its latents."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, model: Any, count: int, width: int):
        super().__init__()
        backbone, d = model.config.decoder_config, model.config.decoder_config.hidden_size
        self.count, self.width, self.space, self.start = count, width, [model.space], model.config.start_token_id
        self.queries = nn.Parameter(torch.randn(count, d) * 0.02)
        self.states = nn.Linear(model.config.source_width, d)
        self.norms = nn.ModuleList(make_norm(backbone, d) for _ in range(4))
        self.attend = nn.ModuleList(
            nn.MultiheadAttention(d, backbone.num_attention_heads, batch_first=True) for _ in range(2)
        )
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)) for _ in range(2))
        self.compress = nn.Linear(d, width)
        options = dataclasses.replace(model.options, memory_positions="learned", diagonal=False)
        self.decoder = ContextualDecoder(backbone, width, options)
        self.process = dataclasses.replace(Process.of(model.options), prediction="v")
        self.denoiser = Denoiser(model.config.denoiser_config, width, options)
        self.self_conditioned = options.self_conditioning != "none"
        self.register_buffer("mean", torch.zeros(count, width))
        self.register_buffer("deviation", torch.ones(count, width))

    def encode(self, input_ids: Int[Tensor, "B L"]) -> Float[Tensor, "B m k"]:
        """z of texts."""
        read = self.states(self.space[0].features(input_ids, None).float())
        x = self.queries.expand(len(read), -1, -1)
        for layer, (attend, mlp) in enumerate(zip(self.attend, self.mlps, strict=True)):
            seen = torch.cat([read, x], dim=1)  # as a Perceiver: queries read the text and each other
            x = x + attend(self.norms[2 * layer](x), seen, seen, need_weights=False)[0]
            x = x + mlp(self.norms[2 * layer + 1](x))
        return F.normalize(self.compress(x), dim=-1) * self.width**0.5

    def autoencoder_loss(self, text: Int[Tensor, "B L"]) -> Tensor:
        memory = self.decoder.read(self.encode(text))
        inputs = F.pad(text[:, :-1], (1, 0), value=self.start)
        return self.decoder(input_ids=inputs, memory=memory, shift_labels=text, use_cache=False).loss

    def diffusion_loss(self, text: Int[Tensor, "B L"]) -> Tensor:
        with torch.no_grad():
            x0 = (self.encode(text) - self.mean) / self.deviation
        t = EARLIEST + (1 - EARLIEST) * torch.rand(len(text), device=text.device)
        noise = torch.randn_like(x0)
        x, previous = self.process.corrupt(x0, t, noise), None
        if self.self_conditioned and torch.rand(()) < 0.5:
            with torch.no_grad():
                previous = self.process.denoised(self.denoiser(x, t), x, t)
        return (self.denoiser(x, t, previous).float() - self.process.target(x0, t, noise)).square().mean()

    @torch.no_grad()
    def latents(self, rows: int, steps: int, solver: str, seed: int) -> Float[Tensor, "B m k"]:
        """Sampled z."""
        device = self.queries.device
        generator = torch.Generator(device).manual_seed(seed)

        def noise() -> Tensor:
            return torch.randn(rows, self.count, self.width, device=device, generator=generator)

        x, estimate = noise(), None
        times = torch.linspace(1, 0.01, steps + 1, device=device)
        for t, s in zip(times[:-1].unbind(), times[1:].unbind(), strict=True):
            at = t.expand(rows)
            given = estimate if self.self_conditioned else None
            estimate = self.process.denoised(self.denoiser(x, at, given), x, at)
            x = stepped(self.process, solver, x, estimate, t, s, noise)
        assert estimate is not None
        return estimate * self.deviation + self.mean

    @torch.no_grad()
    def write(self, z: Float[Tensor, "B m k"], length: int, temperature: float) -> Int[Tensor, "B L"]:
        start = torch.full((len(z), 1), self.start, device=z.device)
        options: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            options.update(temperature=temperature, top_k=0, top_p=1.0)
        with self.decoder.reading(self.decoder.read(z)):
            ids = self.decoder.generate(
                input_ids=start, attention_mask=torch.ones_like(start), max_new_tokens=length, pad_token_id=self.start,
                **options,
            )  # fmt: skip
        return ids[:, 1:]


def trained_compressed(
    model: Any, train: Int[Tensor, "N L"], config: RecoveryConfig, denoiser_steps: int | None = None,
    count: int | None = None, width: int = 64,
) -> Compressed:  # fmt: skip
    """The rival, trained for `config.steps` steps of the autoencoder and `denoiser_steps` (default: as many) of the
    denoiser. m is `count`, by default a quarter of the length, as LD4LG's 32 of 128."""
    torch.manual_seed(config.seed)
    made = Compressed(model, count or max(1, model.config.length // 4), width).to(model.device)
    for stage, steps in (("autoencoder_loss", config.steps), ("diffusion_loss", denoiser_steps or config.steps)):
        own = list(made.denoiser.parameters())
        chosen = own if stage == "diffusion_loss" else [p for p in made.parameters() if all(p is not q for q in own)]
        optimizer = torch.optim.AdamW(chosen, lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(share_of_peak, steps=steps))
        generator = torch.Generator().manual_seed(config.seed)
        made.train()
        for _ in range(steps):
            rows = torch.randint(len(train), (config.rows,), generator=generator)
            text = train[rows].to(model.device)
            with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
                loss = getattr(made, stage)(text)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(chosen, 1.0)
            optimizer.step()
            schedule.step()
        made.eval()
        if stage == "autoencoder_loss":
            with torch.no_grad():
                found = torch.cat([made.encode(some.to(model.device)) for some in train[:1024].split(64)])
            made.mean.copy_(found.mean(0))
            made.deviation.copy_(found.std(0).clamp(min=1e-3))
    return made

"""HuRef's CNN extractor (arXiv 2312.04828, section 4.2): six invariant terms as a picture with six channels → 512
numbers.

    4 × [Conv2d(kernel k, stride 4) → ReLU → BatchNorm]   (no ReLU in the last)   → mean over the map

It is trained on synthetic products of Gaussian matrices, never on a language model: perturbed factors must give
near vectors,
fresh ones orthogonal vectors, and a discriminator makes the vectors look like N(0, I), which a picture generator
expects.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from fathom.lineage.huref import VECTOR, Term
from fathom.writing import naming


class Encoder(nn.Module):
    """[batch, 6, n, n] standardised maps → [batch, 512], mean 0 and deviation 1 for each row.

    The paper's: kernel 48, padding 22, channels 8, 64, 256, 512 (341,031,384 parameters; n = 4096). Smaller for tests.
    """

    def __init__(self, kernel: int = 48, channels: tuple[int, ...] = (8, 64, 256, VECTOR)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, (inner, outer) in enumerate(zip((6, *channels), channels)):
            layers.append(nn.Conv2d(inner, outer, kernel, stride=4, padding=(kernel - 4) // 2))
            if i < len(channels) - 1:
                layers.append(nn.ReLU())
            layers.append(nn.BatchNorm2d(outer))
        self.layers = nn.Sequential(*layers)

    def forward(self, maps: Tensor) -> Tensor:
        return self.layers(maps).mean((2, 3))


def z_normalise(vectors: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 along the last axis."""
    return (vectors - vectors.mean(-1, keepdim=True)) / vectors.std(-1, keepdim=True)


def encode(encoder: Encoder, terms: list[Term]) -> Tensor:
    """The 512-vector of a model from its six terms."""
    maps = torch.stack([term.dense() for term in terms])[None]
    encoder.eval()
    with torch.no_grad():
        return z_normalise(encoder(maps))[0]


@dataclass(frozen=True)
class EncoderTraining:
    """Published values; `size`, `kernel` and `channels` shrink for a dry run.

    published_bug: the released data set multiplies the anchor by an independent matrix instead of xᵀ, which leaves
    anchor
    and positive unrelated; True reproduces that.
    """

    size: int = 4096
    width: int = 4096
    epochs: int = 17
    steps: int = 10
    batch: int = 10
    lr: float = 1e-4
    noise_x: float = 0.4
    noise_weights: float = 0.1
    positive_weight: float = 1.3
    seed: int = 100
    kernel: int = 48
    channels: tuple[int, ...] = (8, 64, 256, VECTOR)
    published_bug: bool = False


def triples(config: EncoderTraining, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(anchor, positive, negative), each [batch, 6, n, n]: x·q·k·xᵀ, the same with noisy factors, and a fresh
    product."""
    shape = (config.batch, 6)

    def normal(*tail: int) -> Tensor:
        return torch.randn(*shape, *tail, generator=generator).to(device)

    def product(x: Tensor, q: Tensor, k: Tensor, right: Tensor | None = None) -> Tensor:
        maps = (x @ q) @ (k @ (x if right is None else right).mT)
        return (maps - maps.mean((2, 3), keepdim=True)) / maps.std((2, 3), keepdim=True)

    n, d = config.size, config.width
    x, q, k = normal(n, d), normal(d, d), normal(d, d)
    anchor = product(x, q, k, normal(n, d) if config.published_bug else None)
    noisy = (
        x + config.noise_x * normal(n, d),
        q + config.noise_weights * normal(d, d),
        k + config.noise_weights * normal(d, d),
    )
    return anchor, product(*noisy), product(normal(n, d), normal(d, d), normal(d, d))


def train_encoder(
    config: EncoderTraining, device: str = "cpu", progress: Callable[[int, int, float], None] | None = None
) -> Encoder:
    """Alternate discriminator and encoder steps; `progress(done, total, contrastive loss)` after each epoch.

    L_C = mean(ρ(1 − cos(a, p)) + (2 − ρ)|cos(a, n)|)      L_E = L_C + ½·BCE(D(z(a)), 1)
    L_D = BCE(D(N(0, I)), 1) + BCE(D(z(a)), 0)
    """
    torch.manual_seed(config.seed)
    generator, place = torch.Generator().manual_seed(config.seed), torch.device(device)
    encoder = Encoder(config.kernel, config.channels).to(place)
    width = config.channels[-1]
    critic = nn.Sequential(
        nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
    ).to(place)  # fmt: skip
    optimisers = [torch.optim.Adam(m.parameters(), lr=config.lr) for m in (critic, encoder)]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=1500, eta_min=5e-6) for o in optimisers]

    def judged(vectors: Tensor, real: float) -> Tensor:
        logits = critic(vectors)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))

    contrastive = torch.zeros(())
    for epoch in range(config.epochs):
        encoder.eval(), critic.train()
        for _ in range(config.steps):
            anchor, _, _ = triples(config, generator, place)
            with torch.no_grad():
                fake = z_normalise(encoder(anchor))
            real = torch.randn(fake.shape, generator=generator).to(place)
            _step(judged(real, 1.0) + judged(fake, 0.0), optimisers[0], schedules[0])
        encoder.train(), critic.eval()
        for _ in range(config.steps):
            a, p, n = (encoder(maps) for maps in triples(config, generator, place))
            rho = config.positive_weight
            contrastive = (rho * (1 - F.cosine_similarity(a, p)) + (2 - rho) * F.cosine_similarity(a, n).abs()).mean()
            _step(contrastive + 0.5 * judged(z_normalise(a), 1.0), optimisers[1], schedules[1])
        if progress:
            progress(epoch + 1, config.epochs, contrastive.item())
    return encoder.eval()


def _step(loss: Tensor, optimiser: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    schedule.step()


def save_encoder(encoder: Encoder, path: str | Path) -> None:
    """Weights as safetensors."""
    with naming(path):
        save_file({n: t.contiguous() for n, t in encoder.state_dict().items()}, path)


def load_encoder(path: str | Path, kernel: int = 48, channels: tuple[int, ...] = (8, 64, 256, VECTOR)) -> Encoder:
    """An encoder saved by `save_encoder`; never unpickles."""
    encoder = Encoder(kernel, channels)
    encoder.load_state_dict(load_file(path))
    return encoder.eval()

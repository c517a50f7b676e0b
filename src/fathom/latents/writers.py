"""CoDAR and its rivals as writers: texts without a prompt, scored by an outside judge and by counts of words.

    codar        noise → denoiser → the contextual decoder
    linear, mlp  the same estimates, each token by its own vector
    factorised   the same estimates, by blocks that see them all: TEncDM
    language     the decoder without vectors: an autoregressive model of its size
    masked       the encoder as a masked diffusion model, where it is one: the twin of the same backbone
    compressed   a text as a quarter as many vectors, autoencoded: LD4LG (rivals.py)
    noise        control i: the decoder given pure noise for vectors

All draw tokens at several temperatures τ. Fluency is the judge's perplexity, which favours texts of few different
words, so
compare it only at equal entropy: `at_entropy` interpolates a writer's values over τ.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from fathom.evaluate.samples import entropy
from fathom.latents.encoder import Latents
from fathom.latents.heads import Contextual
from fathom.latents.recovery import RecoveryConfig, trained_head
from fathom.latents.rivals import trained_compressed
from fathom.latents.sampling import LatentGenerationConfig, decode, denoised
from fathom.models.method import check_number, check_range

WRITERS = ("codar", "noise", "linear", "mlp", "factorised", "language", "masked", "compressed")
TOGETHER = 64  # rows at once
JUDGED = 16  # texts that a judge reads at once: its logits are what takes memory
OVERLAP = 8  # tokens of a stretch that may stand in the training text


@dataclasses.dataclass(frozen=True)
class WritersConfig:
    """Options of the table of writers, and of the training of the rivals' heads.

    Attributes:
        writers: names of `WRITERS`.
        samples: number of texts for each writer and temperature.
        temperatures: τ at which tokens are drawn.
        steps, solver: of the denoiser.
        head_steps, rows, lr, t_max: of the training of heads, on x_t with t ~ U(0, t_max), the decoder's range.
        denoiser_steps: of the training of the compressed rival's denoiser; None: `head_steps`.
        seed: of all random numbers.
    """

    writers: tuple[str, ...] = WRITERS
    samples: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.5, 0.7, 0.9, 1.0)
    steps: int = 50
    solver: str = "ddim"
    head_steps: int = 400
    rows: int = 32
    lr: float = 2e-3
    t_max: float = 0.15
    denoiser_steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("writers", "samples", self.samples, 1)
        check_range("writers", "head_steps", self.head_steps, 1)
        if self.denoiser_steps is not None:
            check_range("writers", "denoiser_steps", self.denoiser_steps, 1)
        for temperature in self.temperatures:
            check_number("writers", "temperatures", temperature, 0)
        unknown = [name for name in self.writers if name not in WRITERS]
        if unknown:
            raise ValueError(f"writers option writers={unknown[0]!r}: must be some of {', '.join(WRITERS)}")
        LatentGenerationConfig(steps=self.steps, solver=self.solver)

    @property
    def heads(self) -> RecoveryConfig:
        return RecoveryConfig(
            steps=self.head_steps, rows=self.rows, lr=self.lr, t_max=self.t_max, seed=self.seed, levels=(0.0,)
        )


Judge = Callable[[list[str]], tuple[float, int]]


def table(
    model: Any,
    tokenizer: Any,
    train: Int[Tensor, "N L"],
    held_out: Int[Tensor, "M L"],
    config: WritersConfig,
    judge: Judge | None = None,
    say: Callable[[str], None] = print,
    keep: Callable[[list[dict[str, Any]], list[str]], None] | None = None,
    made: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """A row for every writer and temperature, and one of held-out text ("data").

    `judge` gives −Σ log p in nats and the number of tokens of texts. Rows have writer, temperature, perplexity (None
    without a judge), entropy (of a text's words, nats, mean over texts), distinct_2 (different pairs of tokens / all
    pairs), overlap (runs of 8 tokens that the training text has / all such runs), nfe, decoder_steps, and a `text`.
    After each row `keep` gets the rows so far and the last texts. Heads in `made`, by name, are not trained again.
    """
    seen, rows = np.unique(stretches(train)), []

    def add(name: str, temperature: float | None, ids: Tensor, nfe: int, steps: int) -> None:
        row, texts = measured(name, temperature, ids, tokenizer, seen, judge, nfe=nfe, decoder_steps=steps)
        rows.append(row)
        said = "" if row["perplexity"] is None else f"perplexity {row['perplexity']:.1f}, "
        say(f"{name} τ={temperature}: {said}entropy {row['entropy']:.2f}, overlap {row['overlap']:.3f}")
        if keep is not None:
            keep(rows, texts)

    add("data", None, held_out[: config.samples], 0, 0)
    vectors = estimates(model, config)
    for name in config.writers:
        for found in written(model, name, vectors, train, config, made or {}):
            add(name, *found)
    return rows


@torch.no_grad()
def estimates(model: Any, config: WritersConfig) -> Tensor:
    """The memory of `samples` texts, [samples, L, k], which all writers from vectors share."""
    length, found = model.config.length, []
    for start in range(0, config.samples, TOGETHER):
        count = min(TOGETHER, config.samples - start)
        canvas = torch.zeros(count, length, dtype=torch.long, device=model.device)
        real = torch.ones_like(canvas, dtype=torch.bool)
        seeds = [config.seed + 1_000_003 * (start + row) for row in range(count)]
        given = LatentGenerationConfig(steps=config.steps, solver=config.solver, seed=seeds)
        found.append(denoised(model, canvas, real, ~real, given)[0])
    return torch.cat(found)


@torch.no_grad()
def written(
    model: Any, name: str, vectors: Tensor, train: Tensor, config: WritersConfig, made: Mapping[str, Any]
) -> Iterable[tuple[float, Tensor, int, int]]:
    """(temperature, token ids, passes of denoiser or encoder, tokens written one by one) of a writer."""
    length = vectors.shape[1]
    if name in ("codar", "noise"):
        z = vectors
        if name == "noise":
            z = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(config.seed)).to(vectors)
        for temperature in config.temperatures:
            parts = [
                decode(model, Latents(some, None, model.space.fingerprint()), temperature=temperature, seed=number)
                for number, some in enumerate(z.split(TOGETHER))
            ]
            yield temperature, torch.cat(parts), config.steps if name == "codar" else 0, length
        return
    if name == "masked":
        yield from masked(model, config)
        return
    if name == "compressed":
        with torch.enable_grad():
            rival = made.get(name) or trained_compressed(model, train, config.heads, config.denoiser_steps)
        z = rival.latents(len(vectors), config.steps, config.solver, config.seed)
        for temperature in config.temperatures:
            torch.manual_seed(config.seed)
            parts = [rival.write(some, length, temperature) for some in z.split(TOGETHER)]
            yield temperature, torch.cat(parts), config.steps, length
        return
    with torch.enable_grad():
        head = made.get(name) or trained_head(model, name, train, config.heads)
    clean = (vectors.new_ones(1, 1, 1), vectors.new_zeros(1, 1, 1))
    costs = (0, length) if isinstance(head, Contextual) else (config.steps, 0)
    for temperature in config.temperatures:
        torch.manual_seed(config.seed)
        yield temperature, torch.cat([head.write(z, clean, temperature) for z in vectors.split(TOGETHER)]), *costs


def masked(model: Any, config: WritersConfig) -> Iterable[tuple[float, Tensor, int, int]]:
    """The encoder as a masked diffusion model: as many passes as the denoiser has, at most one a token, in random
    order, after the start token."""
    encoder, length = model.space.encoder, model.config.length
    if not hasattr(encoder, "objective"):
        return
    steps = min(config.steps, length)
    for temperature in config.temperatures:
        found = []
        for start in range(0, config.samples, TOGETHER):
            count = min(TOGETHER, config.samples - start)
            prompt = torch.full((count, 1), model.config.start_token_id, device=model.device)
            ids = encoder.generate(
                prompt, max_new_tokens=length, block_length=None, steps=steps, temperature=temperature,
                policy="random", seed=config.seed + start,
            )  # fmt: skip
            found.append(ids[:, 1:])
        yield temperature, torch.cat(found), steps, 0


def measured(
    writer: str, temperature: float | None, ids: Int[Tensor, "n L"], tokenizer: Any, seen: np.ndarray,
    judge: Judge | None, **costs: int,
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """A row of the table, and the texts."""
    rows = ids.tolist()
    texts = [str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]
    perplexity = None
    if judge is not None:
        nats, tokens = judge(texts)
        perplexity = math.exp(nats / max(1, tokens))
    pairs = [pair for row in rows for pair in pairwise(row)]
    found = np.isin(stretches(ids), seen)
    row = {
        "writer": writer, "temperature": temperature, "samples": len(rows), "perplexity": perplexity,
        "entropy": statistics.fmean(entropy(row) for row in rows), "distinct_2": len(set(pairs)) / max(1, len(pairs)),
        "overlap": float(found.mean()) if len(found) else 0.0, **costs, "text": texts[0],
    }  # fmt: skip
    return row, texts


def stretches(rows: Int[Tensor, "N L"]) -> np.ndarray:
    """A 64-bit hash of every run of 8 tokens within a row, [N · (L − 7)]: equal for equal tokens, and for others only
    with a chance of about 2⁻⁶⁴.
    """
    if rows.shape[1] < OVERLAP:
        return np.zeros(0, dtype=np.uint64)
    drawn = np.random.default_rng(0).integers(2**63, size=OVERLAP, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    tokens, places = rows.cpu().numpy().astype(np.uint64), rows.shape[1] - OVERLAP + 1
    found = np.zeros((len(tokens), places), dtype=np.uint64)
    for place, factor in enumerate(drawn):  # modulo 2⁶⁴
        mixed = (tokens[:, place : place + places] + np.uint64(1)) * factor
        found += mixed ^ (mixed >> np.uint64(29))
    return found.ravel()


def at_entropy(rows: Sequence[dict[str, Any]], writer: str, wanted: float) -> float | None:
    """A writer's perplexity at this entropy, interpolated between two temperatures (linearly in its logarithm); None if
    the entropy is outside their range."""
    points = sorted(
        (r["entropy"], math.log(r["perplexity"])) for r in rows if r["writer"] == writer and r["perplexity"]
    )
    for (a, low), (b, high) in pairwise(points):
        if a <= wanted <= b:
            share = 0.0 if b == a else (wanted - a) / (b - a)
            return math.exp(low + share * (high - low))
    return None


def judged_by(model: Any, tokenizer: Any, window: int = 1024) -> Judge:
    """The judge: a causal language model with its own tokenizer, each text after its BOS or EOS token."""

    def judge(texts: list[str]) -> tuple[float, int]:
        each = nats_of_texts(model, tokenizer, texts, window)
        return sum(nats for nats, _ in each), sum(count for _, count in each)

    return judge


@torch.no_grad()
def nats_of_texts(model: Any, tokenizer: Any, texts: Sequence[str], window: int = 1024) -> list[tuple[float, int]]:
    """(−Σ log p, tokens scored) of each text. Those within the window are read many at a time, padded behind."""
    from fathom.evaluate.text import is_diffusion, text_loss, with_prefix

    if is_diffusion(model):
        raise ValueError(f"judge: a {type(model).__name__} has no exact loss of a text; use a causal language model")
    window = min(window, getattr(model.config, "max_position_embeddings", None) or window)
    rows = [with_prefix(tokenizer, text) for text in texts]
    found = [(0.0, 0)] * len(rows)
    short = sorted((n for n, row in enumerate(rows) if 1 < len(row) <= window + 1), key=lambda n: len(rows[n]))
    for start in range(0, len(short), JUDGED):
        some = short[start : start + JUDGED]
        ids = torch.nn.utils.rnn.pad_sequence([rows[n] for n in some], batch_first=True, padding_value=-1)
        targets = ids[:, 1:].to(model.device)
        logits = model(ids[:, :-1].clamp(min=0).to(model.device), use_cache=False).logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        each = F.cross_entropy(wide.transpose(1, 2), targets, ignore_index=-1, reduction="none").double().sum(1)
        for n, nats in zip(some, each.tolist(), strict=True):
            found[n] = nats, len(rows[n]) - 1
    for n, row in enumerate(rows):
        if len(row) > window + 1:
            found[n] = text_loss(model, row, window=window, stride=max(1, window // 2))
    return found

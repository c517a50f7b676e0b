"""Sampling a text from noise: N steps of a solver from t = 1 (0.95 if ε is predicted) to `t_end`, then the decoder.

    x ~ N(0, I);   for t → s:   x̂₀ = D(x, t, x̂₀ of the step before)
      ddim        x ← α_s x̂₀ + σ_s ε̂
      ancestral   x ← α_s x̂₀ + √(σ_s² − η²) ε̂ + η·noise,   η² = (σ_s/σ_t)² (σ_t² − (α_t σ_s/α_s)² )  ≥ 0
      ode         x ← x + (α' x̂₀ + σ' ε̂) (s − t)                                     Euler
      sde         x ← x + (f x − g² score) (s − t) + g √(t − s)·noise                Euler and Maruyama
    memory = the last x̂₀;   y_1 … y_L by the decoder

At t_end σ is not 0, so the last state is not x₀, and the memory is the last estimate. Euler's SDE needs thousands of
steps for the right variance; `ancestral` has it at any number. The decoder's tokens are counted separately from passes.

Known tokens (of a prompt, or of a text with mask tokens) are kept by replacement. In every step their rows of x are α_t
x₀ + σ_t ε, with vectors that the encoder makes while the other tokens are masked; the decoder gets the tokens
themselves.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from fathom.diffusion.base import check_tokens
from fathom.diffusion.generation_config import check_kinds, configured
from fathom.diffusion.sampling import seeds
from fathom.latents.encoder import Latents
from fathom.latents.process import LATEST, Process

SOLVERS = ("ddim", "ancestral", "ode", "sde")


@dataclasses.dataclass(frozen=True)
class LatentGenerationConfig:
    """Options of sampling.

    Attributes:
        max_new_tokens: tokens after the prompt; None: as many as the model's rows have left. 0 with `infill`.
        steps: N, passes of the denoiser.
        solver: "ddim", "ancestral", "ode" or "sde".
        t_end: the time at which the last step ends.
        temperature: τ of the decoder; 0 takes the likeliest token.
        top_p: the decoder samples among the likeliest tokens of this mass.
        restandardise: scale the memory's dimensions to mean 0 and variance 1, as estimates vary less than vectors do.
            Mean and variance are over all rows, so a text then depends on the others of its batch.
        infill: fill the mask tokens within the inputs instead.
        rows: number of texts if there are no inputs.
        stop_at_eos: a row ends with the first EOS that it writes and is padded after it; decoding stops once all rows
            have ended. A text that is filled in does not end before its last known token.
        seed: of the noise; a list gives each row its own. The decoder's draws follow from the first.
        return_dict_in_generate: a `LatentGenerationOutput` instead of the ids alone.

    Raises ValueError for options out of range.
    """

    max_new_tokens: int | None = None
    steps: int = 50
    solver: str = "ddim"
    t_end: float = 0.01
    temperature: float = 1.0
    top_p: float | None = None
    restandardise: bool = False
    infill: bool = False
    rows: int = 1
    stop_at_eos: bool = False
    seed: int | Sequence[int] = 0
    return_dict_in_generate: bool = False

    def __post_init__(self) -> None:
        check_kinds(self, ("max_new_tokens", "steps", "rows"), ("t_end", "temperature", "top_p"))
        for name, fine, rule in (
            ("max_new_tokens", self.max_new_tokens is None or self.max_new_tokens >= (0 if self.infill else 1),
             "must be at least 1"),
            ("max_new_tokens", not (self.infill and self.max_new_tokens), "infill=True fills masks; give 0"),
            ("steps", self.steps >= 1, "must be at least 1"),
            ("solver", self.solver in SOLVERS, f"must be one of {', '.join(SOLVERS)}"),
            ("t_end", 0 < self.t_end < 1, "must be above 0 and below 1"),
            ("temperature", 0 <= self.temperature < math.inf, "must be finite and at least 0"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "must be above 0 and at most 1"),
            ("rows", self.rows >= 1, "must be at least 1"),
        ):  # fmt: skip
            if not fine:
                raise ValueError(f"{name}={getattr(self, name)!r}: {rule}")


@dataclasses.dataclass(frozen=True)
class LatentGenerationOutput:
    """Sampled texts, and the passes that they took.

    Attributes:
        sequences: prompt and answer, [B, P + G].
        latents: the memory that the decoder read.
        nfe: passes of the denoiser.
        decoder_steps: number of tokens that the decoder wrote for the longest row.
    """

    sequences: Int[Tensor, "B L"]
    latents: Latents
    nfe: int
    decoder_steps: int


@torch.no_grad()
def generate(
    model: Any,
    inputs: Int[Tensor, "B P"] | None = None,
    attention_mask: Int[Tensor, "B P"] | None = None,
    generation_config: LatentGenerationConfig | None = None,
    **options: Any,
) -> Tensor | LatentGenerationOutput:
    """Texts from noise. `inputs` are prompts, padded on the left where `attention_mask` is 0, or with `infill` texts
    with mask tokens; None: texts without a prompt. Raises ValueError for arguments that do not fit together.
    """
    config = configured(generation_config, options, LatentGenerationConfig, elsewhere={})
    training = model.training
    model.eval()
    try:
        output = _run(model, inputs, attention_mask, config)
    finally:
        model.train(training)
    return output if config.return_dict_in_generate else output.sequences


def _run(model: Any, inputs: Any, attention_mask: Any, config: LatentGenerationConfig) -> LatentGenerationOutput:
    device, most = model.device, model.config.length
    missing = [stage for stage in ("latent_diffusion", "contextual_decoder") if stage not in model.config.trained]
    if missing:
        raise ValueError(f"stage {missing[0]!r} has not been trained yet; train it from this checkpoint first")
    if inputs is None:
        if config.infill:
            raise ValueError("infill=True: give inputs with mask tokens")
        inputs = torch.zeros(config.rows, 0, dtype=torch.long, device=device)
    if not isinstance(inputs, Tensor) or inputs.ndim != 2 or not len(inputs):
        raise ValueError("inputs: give token ids [rows, tokens]")
    real = torch.ones_like(inputs, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if real.shape != inputs.shape:
        raise ValueError(f"attention_mask of shape {list(real.shape)}: must be that of inputs, {list(inputs.shape)}")
    check_tokens(inputs, real, model.config.vocab_size)
    if (real[:, :-1] & ~real[:, 1:]).any():
        raise ValueError("attention_mask: a row is padded on the right; pad on the left")
    new = 0 if config.infill else config.max_new_tokens
    new = most - inputs.shape[1] if new is None else new
    length = inputs.shape[1] + new
    if length > most or new < int(not config.infill):
        raise ValueError(
            f"max_new_tokens={config.max_new_tokens}: with {inputs.shape[1]} tokens of the prompt that is {length}; "
            f"the model was trained on rows of at most length={most}"
        )
    known = real.clone()
    if config.infill:
        known &= inputs != model.mask_token_id()
        if not (real & ~known).any():
            raise ValueError(f"infill=True: no row holds the mask token {model.mask_token_id()}")
    pad = torch.ones(len(inputs), new, dtype=torch.bool, device=device)
    canvas = torch.cat([inputs, inputs.new_zeros(len(inputs), new)], dim=1)
    real, known = torch.cat([real, pad], dim=1), torch.cat([known, ~pad], dim=1)
    values, nfe = denoised(model, canvas, real, known, config)
    mask = None if bool(real.all()) else real
    latents = Latents(values, mask, model.space.fingerprint())
    text = decode(
        model, latents, temperature=config.temperature, top_p=config.top_p, stop_at_eos=config.stop_at_eos,
        seed=seeds(config.seed, len(canvas))[0], known=known, canvas=canvas,
    )  # fmt: skip
    given = known.cumprod(1).bool() | ~real  # the prompt, and what pads it
    return LatentGenerationOutput(text, latents, nfe, int((~given).sum(1).max()))


def denoised(
    model: Any, canvas: Int[Tensor, "B L"], real: Bool[Tensor, "B L"], known: Bool[Tensor, "B L"],
    config: LatentGenerationConfig,
) -> tuple[Float[Tensor, "B L k"], int]:  # fmt: skip
    """The last x̂₀, and the passes of the denoiser."""
    process, k = model.process, model.config.latent_dim
    dtype = torch.promote_types(model.denoiser.dtype, torch.float32)
    generators = [torch.Generator(device=canvas.device).manual_seed(s) for s in seeds(config.seed, len(canvas))]
    lengths = real.sum(1).tolist()

    def noise() -> Float[Tensor, "B L k"]:
        """Noise from each row's own generator, the same whatever pads the row."""
        out = torch.zeros(*canvas.shape, k, dtype=dtype, device=canvas.device)
        for row, (length, generator) in enumerate(zip(lengths, generators, strict=True)):
            out[row, canvas.shape[1] - length :] = torch.randn(
                length, k, dtype=dtype, device=canvas.device, generator=generator
            )
        return out

    x0_known = None
    if known.any():
        x0_known = known_vectors(model, canvas, real, known).to(dtype)
        held = noise()
    x = noise()
    mask = None if bool(real.all()) else real
    # at t = 1 the noise says nothing of x₀: an estimate of ε would be divided by α = 0
    first = max(LATEST, config.t_end) if process.prediction == "eps" else 1.0
    times = torch.linspace(first, config.t_end, config.steps + 1, dtype=dtype).to(canvas.device)
    previous = None
    for t, s in itertools.pairwise(times):
        at = t.expand(len(x))
        if x0_known is not None:
            x = torch.where(known[..., None], process.corrupt(x0_known, at, held), x)
        # with padding among rows that are otherwise targets, the mask hides it all the same
        previous = passed(model, x, at, previous, mask)
        x = stepped(process, config.solver, x, previous, t, s, noise)
    assert previous is not None
    if x0_known is not None:
        previous = torch.where(known[..., None], x0_known, previous)
    if config.restandardise:
        kept = previous[real]
        if len(kept) < 2:
            raise ValueError("restandardise=True: one token has no variance; leave it out")
        previous = (previous - kept.mean(0)) / kept.std(0).clamp(min=1e-6)
    return previous * real[..., None], config.steps


def passed(model: Any, x: Tensor, t: Tensor, previous: Tensor | None, mask: Tensor | None) -> Tensor:
    """x̂₀ of one pass, in which left padding is masked."""
    denoiser = model.denoiser_mean if model.options.ema else model.denoiser
    previous = None if model.options.self_conditioning == "none" else previous
    return model.process.denoised(denoiser(x, t, previous, mask), x, t)


def stepped(
    process: Process, solver: str, x: Tensor, x0: Tensor, t: Tensor, s: Tensor, noise: Callable[[], Tensor]
) -> Tensor:
    """The state at s < t, from that at t and its estimate (equations: this module's docstring)."""
    alpha, sigma = process.alpha_sigma(t)
    said = (x - alpha * x0) / sigma
    if solver in ("ddim", "ancestral"):
        to_alpha, to_sigma = process.alpha_sigma(s)
        if solver == "ddim":
            return to_alpha * x0 + to_sigma * said
        square = (to_sigma / sigma) ** 2 * (sigma**2 - (alpha * to_sigma / to_alpha) ** 2).clamp(min=0)
        return to_alpha * x0 + (to_sigma**2 - square).clamp(min=0).sqrt() * said + square.sqrt() * noise()
    if solver == "ode":
        of_alpha, of_sigma = process.rates(t)
        return x + (of_alpha * x0 + of_sigma * said) * (s - t)
    f, square = process.drift(t)
    score = (alpha * x0 - x) / sigma**2
    return x + (f * x - square * score) * (s - t) + (square * (t - s)).sqrt() * noise()


def known_vectors(model: Any, canvas: Tensor, real: Tensor, known: Tensor) -> Float[Tensor, "B L k"]:
    """x₀ of the known tokens. The encoder reads the others as mask tokens, or not at all if there is none."""
    token = model.config.mask_token_id
    seen = real if token is not None else known
    ids = canvas.masked_fill(~known, model.config.start_token_id if token is None else token)
    return model.space.encode(ids, None if bool(seen.all()) else seen)


class Known(LogitsProcessor):
    """A logits processor that makes the decoder write known tokens in their places."""

    def __init__(self, canvas: Tensor, known: Tensor):
        self.canvas, self.known = canvas, known

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        column = input_ids.shape[1] - 1  # of the text, before which the start token stands
        other = torch.arange(scores.shape[-1], device=scores.device) != self.canvas[:, column, None]
        return scores.masked_fill(other & self.known[:, column, None], -torch.inf)


class Ended(StoppingCriteria):
    """A stopping criterion for rows that wrote EOS. A known EOS, or one before a known token, does not count."""

    def __init__(self, eos: int, known: Tensor):
        self.eos_token_id = eos  # by this name transformers knows that rows which end are padded
        self.more = known.flip(1).cummax(1).values.flip(1)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, -1] == self.eos_token_id) & ~self.more[:, input_ids.shape[1] - 2]


@torch.no_grad()
def decode(
    model: Any, latents: Latents, *, temperature: float = 0.0, top_p: float | None = None, stop_at_eos: bool = False,
    seed: int = 0, known: Bool[Tensor, "B L"] | None = None, canvas: Int[Tensor, "B L"] | None = None,
) -> Int[Tensor, "B L"]:  # fmt: skip
    """Token ids decoded from vectors, one for each vector. `known` tokens, and padding, keep their ids of `canvas`.

    Draws follow from `seed` and leave torch's random state unchanged.
    """
    values = latents.values
    rows, length = values.shape[:2]
    real = values.new_ones(rows, length, dtype=torch.bool) if latents.mask is None else latents.mask
    if known is None or canvas is None:
        canvas = torch.zeros(rows, length, dtype=torch.long, device=values.device)
        known = torch.zeros_like(real)
    begun = real.int().cummax(1).values.bool()  # no padding on the left
    prefix = int((known | ~begun).long().cumprod(1).sum(1).min())  # columns that all rows know, or that pad them
    start = canvas.new_full((rows, 1), model.config.start_token_id)
    pad = model.config.pad_token_id if model.config.pad_token_id is not None else model.config.start_token_id
    decoder = model.decoder
    # the start token stands in the last column of padding before a text, so that texts of all lengths end together
    ids = torch.cat([start, torch.where(real, canvas, pad)[:, :prefix]], dim=1)  # padding may have any id
    first = (~begun).sum(1)
    ids.scatter_(1, first[:, None].clamp(max=prefix), model.config.start_token_id)
    columns = torch.arange(prefix + 1, device=ids.device)
    attention_mask = (columns >= first[:, None]).long()
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        options.update(temperature=temperature, top_k=0, top_p=1.0 if top_p is None else top_p)
    if stop_at_eos:
        if model.config.eos_token_id is None:
            raise ValueError("stop_at_eos=True: the tokenizer has no EOS token")
        options["stopping_criteria"] = StoppingCriteriaList([Ended(model.config.eos_token_id, known)])
    forced = [Known(canvas, known)] if bool(known[:, prefix:].any()) else []
    memory = model.read(latents)
    with torch.random.fork_rng(devices=[values.device] if values.is_cuda else []), decoder.reading(memory):
        torch.manual_seed(seed)
        if prefix < length:
            ids = decoder.generate(
                input_ids=ids, attention_mask=attention_mask, max_new_tokens=length - prefix, pad_token_id=pad,
                logits_processor=LogitsProcessorList(forced), **options,
            )  # fmt: skip
    text = ids[:, 1:]
    if text.shape[1] < length:  # all rows have ended
        text = torch.nn.functional.pad(text, (0, length - text.shape[1]), value=pad)
    return torch.where(real, text, canvas)

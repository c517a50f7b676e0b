"""LongLLaDA (arXiv 2506.14429): a diffusion model reads longer texts when its rotary base grows, without training.

d channels of a head, β₀ the rotary base, T tokens a row in training, t the target length:

    d_ext = 2 ⌈d/2 · log_β₀(T/2π)⌉          channels below it saw a full period in training
    λ = (t/2π)^(d/d_ext) / β₀                rounded up;  β = λ β₀;  positions stay as they are
    t(λ) = 2π (λ β₀)^(d_ext/d)               the length that a given λ reaches

`span` "bidirectional" counts distances of both signs, with 2T and 2t in place of T and t (UltraLLaDA, arXiv
2510.10481). For t within t(1) the base is left alone. Unlike transformers' "dynamic" type the base does not change with
the running length.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from fathom.diffusion.base import check_option
from fathom.diffusion.passes import NAME as SAMPLING
from fathom.models.method import check_choice


@dataclasses.dataclass(frozen=True)
class LongLLaDA:
    """Multiplies the rotary base of a model.

    target: t, the length to reach in tokens; or else
    factor: λ itself.
    trained: T, tokens a row in training; None: the model's max_position_embeddings.
    rounding: of λ computed from a target: "ceil" to the next whole number, as in the authors' code, or "none".
    span: "causal", or "bidirectional".
    """

    target: int | None = None
    factor: float | None = None
    trained: int | None = None
    rounding: str = "ceil"
    span: str = "causal"

    name = "longllada"
    registry = "rope"
    paper = "2506.14429"
    summary = "Multiply the rotary base by λ, so that a model reads texts longer than those of its training."
    equation = "λ = (t/2π)^(d/d_ext) / β₀;  d_ext = 2 ⌈d/2 · log_β₀(T/2π)⌉"

    def __post_init__(self):
        one = (self.target is None) != (self.factor is None)
        check_option(self.name, "target", self.target, one, "given, or else factor")
        fine = self.target is None or self.target >= 1
        check_option(self.name, "target", self.target, fine, "at least 1")
        fine = self.factor is None or 0 < self.factor < math.inf
        check_option(self.name, "factor", self.factor, fine, "above 0 and finite")
        check_option(self.name, "trained", self.trained, self.trained is None or self.trained >= 7, "at least 7")
        check_choice(self.name, "rounding", self.rounding, ("ceil", "none"))
        check_choice(self.name, "span", self.span, ("causal", "bidirectional"))

    def apply(self, model: Any) -> float:
        """Rescale a model in place, ours or a stock one; returns λ. `reset` undoes it."""
        base, width, trained = rotary(model)
        factor = self.factor
        if factor is None:
            assert self.target is not None
            factor = scale(base, width, self.trained or trained, self.target, self.rounding, self.span)
        rescale(model, factor)
        if self.target is not None:
            model.config.max_position_embeddings = max(trained, self.target)
        return factor


def critical_dimension(base: float, width: int, trained: int, span: str = "causal") -> int:
    """d_ext: channels below it saw a full period of their rotation in training."""
    seen = trained * (2 if span == "bidirectional" else 1)
    return 2 * math.ceil(width / 2 * math.log(seen / (2 * math.pi)) / math.log(base))


def scale(base: float, width: int, trained: int, target: int, rounding: str = "ceil", span: str = "causal") -> float:
    """λ, at least 1."""
    wanted = target * (2 if span == "bidirectional" else 1)
    found = (wanted / (2 * math.pi)) ** (width / critical_dimension(base, width, trained, span)) / base
    return max(1, math.ceil(found) if rounding == "ceil" else found)


def reach(base: float, width: int, trained: int, factor: float, span: str = "causal") -> float:
    """t(λ), the length that a factor supports."""
    length = 2 * math.pi * (factor * base) ** (critical_dimension(base, width, trained, span) / width)
    return length / (2 if span == "bidirectional" else 1)


def rotary(model: Any) -> tuple[float, int, int]:
    """(rotary base, channels of a head that turn, max_position_embeddings). Raises ValueError for learned positions
    and for types of RoPE that change the base themselves."""
    config = model.config
    rope = getattr(config, "rope_parameters", None)
    module = getattr(model.get_decoder(), "rotary_emb", None)
    if not rope or module is None:
        raise ValueError(f"{type(model).__name__}: positions are not rotary, so there is no base to rescale")
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters={rope!r}: only rope_type='default' is rescaled")
    return rope["rope_theta"], 2 * len(module.inv_freq), config.max_position_embeddings


@torch.no_grad()
def rescale(model: Any, factor: float) -> None:
    """Multiply the base by λ, in the config and in the table of frequencies. Repeated factors multiply; a factor of 1
    changes no bit. Raises ValueError within the model's `generate`."""
    base, width, _ = rotary(model)
    config, module = model.config, model.get_decoder().rotary_emb
    if config._attn_implementation == SAMPLING:
        raise ValueError(
            f"{type(model).__name__}: its generate() runs, whose block cache may hold keys of the present base; "
            "rescale before it, or when it has ended"
        )
    rope = dict(config.rope_parameters)
    rope.setdefault("unscaled_rope_theta", base)
    rope["rope_theta"] = base * factor
    config.rope_parameters = rope
    if factor == 1:
        return
    wide = torch.promote_types(module.inv_freq.dtype, torch.float32)
    exponent = torch.arange(0, width, 2, dtype=wide) / width
    frequencies = rope["rope_theta"] ** -exponent
    for name in ("inv_freq", "original_inv_freq"):
        getattr(module, name).copy_(frequencies)


def reset(model: Any) -> None:
    """Restore the original base of a rescaled model."""
    rope = dict(model.config.rope_parameters)
    own = rope.pop("unscaled_rope_theta", rope["rope_theta"])
    rescale(model, own / rope["rope_theta"])
    model.config.rope_parameters = {**rope, "rope_theta": own}

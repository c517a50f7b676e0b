"""Shortening, as `fourier` and its controls do it: between two layers the sequence becomes K ≤ T tokens, Y = A X.

    K = ⌈ρT⌉;   every layer from there on works on K tokens

A [K, T] is a fixed map along the sequence, without parameters: a low-pass filter, means, every n-th token, or the first
K. A method is one `resample`, that is A. All else (layers, rows, residuals) is here once for all methods.

    post-norm (BART):   x ← layer(A x)
    pre-norm (ours):    S = A norm₁(x);   x ← R + attention(S),  R = S, or A x under `residual` "filtered"

With the global residual the output has the source's length again: x₀ + Σ_j up(x_j) before the last norm, where x₀,
x₁, … are the inputs of the shortening layers and the last layer's output.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fathom.encoders.base import Encoder
from fathom.models.method import check_choice

# Where the layer lies if the options do not say: the sheets' settings, after two layers of BART and in the first of a
# classifier, and whether the output is of full length.
PLACES = {"bart": (2,), "decoder": (0,)}
GLOBAL_RESIDUAL = {"bart": True, "decoder": False}


@dataclasses.dataclass(frozen=True)
class Cut:
    """One shortening of a batch. Rows are first aligned to the left, without their padding.

    Attributes:
        method: the method whose map this is.
        first: leading tokens that stay as they are.
        lengths, kept: tokens of each row before and after, without the first ones [B], or [1] where rows are alike.
        longest, most: maxima of `lengths` and of `kept`.
        order: source index of each token of an aligned row, real ones first; None: no token moved.
    """

    method: Shortening
    first: int
    lengths: Int[Tensor, " R"]
    kept: Int[Tensor, " R"]
    longest: int
    most: int
    order: Int[Tensor, "B T"] | None

    @property
    def mask(self) -> Bool[Tensor, "B K"] | None:
        """The mask of real tokens after the shortening; None: all are real."""
        if self.order is None:
            return None
        return torch.arange(self.first + self.most, device=self.kept.device) < (self.first + self.kept)[:, None]

    def down(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, "B K d"]:
        """The shortened rows of x."""
        if self.order is not None:
            x = x.gather(1, self.order[..., None].expand_as(x))
        short = self.method.resample(x[:, self.first :], self)
        return torch.cat((x[:, : self.first], short), dim=1) if self.first else short

    def positions(self, positions: Tensor) -> Tensor:
        """Positions of the shortened tokens: each has the centre of the stretch of tokens that it replaces."""
        if self.order is not None:
            positions = positions.expand(len(self.order), -1).gather(1, self.order)
        positions = positions.to(torch.float64)
        centres = stretch(positions[:, self.first :, None], self.lengths, self.kept, self.most, "linear")[..., 0]
        return torch.cat((positions[:, : self.first].expand(len(centres), -1), centres), dim=1)


def stretch(
    x: Float[Tensor, "B S d"], lengths: Int[Tensor, " R"], wanted: Int[Tensor, " R"], longest: int, how: str
) -> Float[Tensor, "B longest d"]:
    """Rows of S = `lengths` tokens as rows of T = `wanted` tokens.

    how: "nearest" (token t is the old one at ⌊tS/T⌋) or "linear" (from the two around it, with tokens as the centres of
        equal cells).
    """
    t = torch.arange(longest, device=x.device)

    def pick(index: Tensor) -> Tensor:
        index = torch.minimum(index.clamp(min=0), lengths[:, None] - 1)
        if len(index) == 1:  # rows alike
            return x.index_select(1, index[0])
        return x.gather(1, index[..., None].expand(len(x), -1, x.shape[2]))

    if how == "nearest":
        return pick(t * lengths[:, None] // wanted[:, None])
    place = (t.double() + 0.5) * lengths[:, None] / wanted[:, None] - 0.5
    place = torch.minimum(place.clamp(min=0), lengths[:, None] - 1.0)
    below = place.floor()
    share = (place - below)[..., None].to(x.dtype)
    return pick(below.long()) * (1 - share) + pick(below.long() + 1) * share


class Shortening(Encoder):
    """Base of the methods that shorten. A subclass gives `resample`."""

    hosts: ClassVar[tuple[str, ...]] = ("decoder", "bart")
    options: Any

    def resample(self, x: Float[Tensor, "B T d"], cut: Cut) -> Float[Tensor, "B K d"]:
        """A x for left-aligned rows of `cut.lengths` tokens; outputs after a row's first `cut.kept` are masked."""
        raise NotImplementedError  # abstract

    def cut(self, mask: Bool[Tensor, "B T"] | None, length: int, device: Any, first: int) -> Cut:
        """The shortening of a batch with `length` columns; `mask` marks the real tokens."""
        order = None
        lengths = torch.tensor([length], device=device)
        if mask is not None:
            order = torch.argsort(~mask, dim=1, stable=True)
            lengths = mask.sum(1).clamp(min=first + 1)
        kept = kept_tokens(self.options, lengths, first)
        most = int(kept.max())
        return Cut(self, first, lengths - first, kept, length - first, most, order)

    def forward(self, x, mask, layers, first=0):
        options, places = self.options, filter_layers(self.options, self.host)
        mask = two_sided(mask)
        if options.padding == "leak" and mask is not None:
            x = x * mask[..., None].to(x.dtype)
        blocks: list[Tensor] = []  # the input of every shortening layer
        cuts: list[Cut] = []
        for index, layer in enumerate(layers):
            cut = finish = None
            if index in places and x.shape[1] > first:
                blocks.append(x)
                cut = self.cut(None if options.padding == "leak" else mask, x.shape[1], x.device, first)
                cuts.append(cut)
                mask = cut.mask
            if index == len(layers) - 1 and cuts and global_residual(options, self.host):

                def finish(y: Tensor) -> Tensor:
                    return self.restored([*blocks, y], cuts)

            x = layer(x, mask, cut=cut, finish=finish)
        return x

    def restored(self, blocks: list[Tensor], cuts: list[Cut]) -> Float[Tensor, "B T d"]:
        """x₀ + Σ_j up(x_j): the output at the source's length, with every token in its old place."""
        whole, source = blocks[0], cuts[0]
        lengths = [cut.lengths for cut in cuts[1:]] + [cuts[-1].kept]
        for x, length in zip(blocks[1:], lengths, strict=True):
            rest = stretch(x[:, source.first :], length, source.lengths, source.longest, self.options.upsample)
            longer = torch.cat((x[:, : source.first], rest), dim=1)
            if source.order is not None:
                index = source.order[..., None].expand_as(longer)
                longer = torch.zeros_like(longer).scatter(1, index, longer)
            whole = whole + longer
        return whole

    def memory_mask(self, mask, layers, first=0):
        mask = two_sided(mask)
        if mask is None or self.options.padding == "leak":
            return None
        if global_residual(self.options, self.host):
            return mask
        for _ in filter_layers(self.options, self.host):
            mask = self.cut(mask, mask.shape[1], mask.device, first).mask
        return mask

    def __init__(self, config: Any, options: Any):
        super().__init__(config, options)
        self.host: str = config.host

    @classmethod
    def lengths(cls, config: Any, options: Any, length: int) -> list[tuple[int, int]]:
        """For every layer, the number of tokens before and after its shortening, out of `length` unpadded ones."""
        layers, first = config.num_hidden_layers, getattr(config, "first", 0)
        found = []
        for index in range(layers):
            before = length
            if index in filter_layers(options, config.host):
                length = first + kept_tokens(options, length, first)
            found.append((before, length))
        return found

    @classmethod
    def flops(cls, config, options, length):
        """FLOPs of all layers, each at its own length, and of the maps between lengths."""
        total = 0.0
        for before, after in cls.lengths(config, options, length):
            total += config.layer_flops(after, after)
            if after < before:
                maps = 2 if config.host == "decoder" and options.residual == "filtered" else 1
                first = getattr(config, "first", 0)
                total += maps * cls.map_flops(options, before - first, after - first) * config.hidden_size
        return total

    @classmethod
    def map_flops(cls, options: Any, before: int, after: int) -> float:
        """FLOPs of A on one channel; 0 where it is no matrix product."""
        return 0.0

    @classmethod
    def memory(cls, config, options, length):
        return length if global_residual(options, config.host) else cls.lengths(config, options, length)[-1][1]

    @classmethod
    def unsupported(cls, config, options):
        reason = super().unsupported(config, options)
        if reason is None:
            last = config.num_hidden_layers - 1
            past = [layer for layer in filter_layers(options, config.host) if layer > last]
            if past:
                reason = (
                    f"filter_layers={list(filter_layers(options, config.host))}: the last layer is {last}; "
                    "give layers up to it"
                )
        return reason


def kept_tokens(options: Any, lengths: Any, first: int) -> Any:
    """K = ⌈ρT⌉ in exact arithmetic, for whole numbers or tensors of them. T excludes the `first` tokens unless
    `count_cls`; K is at most the number of tokens that there were."""
    ratio = Fraction(str(options.ratio))
    counted = lengths if options.count_cls else lengths - first
    kept = -(-counted * ratio.numerator // ratio.denominator)
    return torch.minimum(kept, lengths - first) if isinstance(kept, Tensor) else min(kept, lengths - first)


def filter_layers(options: Any, host: str) -> tuple[int, ...]:
    """The shortening layers: those of the options, or the host's default."""
    return PLACES[host] if options.filter_layers is None else options.filter_layers


def global_residual(options: Any, host: str) -> bool:
    """Whether the output has the source's length."""
    return GLOBAL_RESIDUAL[host] if options.global_residual is None else options.global_residual


def two_sided(mask: Tensor | None) -> Bool[Tensor, "B T"] | None:
    """The mask as bool, None where it hides nothing. Raises ValueError for a mask that is not [batch, tokens]."""
    if mask is None:
        return None
    if mask.ndim != 2:
        raise ValueError(f"attention_mask of shape {list(mask.shape)}: an encoder that shortens needs [batch, tokens]")
    mask = mask.bool()
    return None if bool(mask.all()) else mask


@dataclasses.dataclass(frozen=True)
class ShorteningOptions:
    """Options of all methods that shorten.

    ratio: ρ, the share of the tokens that is kept; in (0, 1].
    filter_layers: layers that read fewer tokens, from 0; None: 2 in BART (after two layers), 0 in a classifier.
    residual: in a classifier, what the layer's output is added to: "filtered_norm", the shortened norm of its input, as
        in the official code, or "filtered", the shortened input.
    global_residual: whether the output has the source's length; None: only in BART.
    upsample: how a shorter sequence is added to a longer one, "nearest" or "linear".
    padding: "per_sample" shortens every row by itself; "leak" the padded batch, whose padding counts from then on.
    count_cls: K counts a CLS token that is not filtered, as the official code does.
    """

    ratio: float = 0.5
    filter_layers: tuple[int, ...] | None = None
    residual: str = "filtered_norm"
    global_residual: bool | None = None
    upsample: str = "nearest"
    padding: str = "per_sample"
    count_cls: bool = False

    def __post_init__(self):
        if not 0 < self.ratio <= 1:
            raise ValueError(f"encoder option ratio={self.ratio!r}: must be above 0 and at most 1")
        if self.filter_layers is not None:
            layers = self.filter_layers
            fine = isinstance(layers, list | tuple) and all(type(layer) is int and layer >= 0 for layer in layers)
            if not fine or not layers or sorted(set(layers)) != list(layers):
                raise ValueError(
                    f"encoder option filter_layers={layers!r}: must be layers in rising order, counted from 0; "
                    "encoder='full' filters none"
                )
            object.__setattr__(self, "filter_layers", tuple(layers))
        check_choice("encoder", "residual", self.residual, ("filtered_norm", "filtered"))
        check_choice("encoder", "upsample", self.upsample, ("nearest", "linear"))
        check_choice("encoder", "padding", self.padding, ("per_sample", "leak"))

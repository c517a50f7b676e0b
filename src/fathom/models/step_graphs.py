"""Steps of few tokens without waiting: their layers as CUDA graphs, and how many tokens to make place for."""

from __future__ import annotations

import collections
import math
import statistics
from typing import Any

import torch
from torch import Tensor

from fathom.models.decoder import Decoder, LayerGroup


class Foresight:
    """How many tokens will run each step, as far as those of late tell: then no step waits for the number of the last.

    Of calls with as many tokens, the most or the mean and three deviations, whichever is above. Where more go on, the
    call is made again with all numbers waited for (`StepStack.settled`), and observation starts anew.
    """

    def __init__(self, least: int = 8, remembered: int = 16, occasions: int = 64):
        self.least, self.remembered, self.occasions, self.repeated = least, remembered, occasions, 0
        self.counts: dict[Any, collections.deque[list[int]]] = {}
        self.sizes: dict[Any, int] = {}  # by occasion and step

    def most(self, occasion: Any, step: int) -> int | None:
        """How many may go on after this step; None: not known yet."""
        seen = self.counts.get(occasion, ())
        if len(seen) < self.least:
            return None
        counts = [numbers[step] if step < len(numbers) else 0 for numbers in seen]
        deviation = statistics.stdev(counts) if len(counts) > 1 else 0.0
        return max(*counts, math.ceil(statistics.fmean(counts) + 3 * deviation))

    def kept(self, occasion: Any, step: int, least: int, most: int) -> int:
        """The size that the step had the last time if it is one of these, else the least: another size is another CUDA
        graph."""
        size = self.sizes.get((occasion, step), 0)
        self.sizes[occasion, step] = size = size if least <= size <= most else least
        return size

    def note(self, occasion: Any, counts: list[int]) -> None:
        """How many went on after each step."""
        self.counts.setdefault(occasion, collections.deque(maxlen=self.remembered)).append(counts)
        if len(self.counts) > self.occasions:
            oldest = next(iter(self.counts))
            self.counts.pop(oldest)
            self.sizes = {key: size for key, size in self.sizes.items() if key[0] != oldest}

    def forget(self, occasion: Any) -> None:
        """A call had to be made again."""
        self.counts.pop(occasion, None)
        self.repeated += 1


class StepGraphs:
    """A few layers at a time as CUDA graphs: a step of few tokens takes less time than the CPU needs to launch its
    kernels.

    A graph is recorded for every size, so sizes are multiples of a 128th of the tokens; and reads what it needs again
    in its backward pass where it lay when it was recorded, so what does not come from another graph is copied to a
    place of its own. Outputs last until the next forward: gradients must be used, and let go of, before it.
    """

    def __init__(self, decoder: Decoder, together: int = 4):
        torch._inductor.config.triton.cudagraph_dynamic_shape_warn_limit = None  # many sizes are what it is for
        layers: list[Any] = list(decoder.layers)
        together = max(number for number in range(1, together + 1) if len(layers) % number == 0)
        groups = [LayerGroup(layers[n : n + together]) for n in range(0, len(layers), together)]
        self.groups = [torch.compile(group, mode="reduce-overhead") for group in groups]
        self.places: dict[tuple[Any, ...], Tensor] = {}

    def place(self, x: Tensor, *name: Any, shared: bool = True) -> Tensor:
        """The same numbers where they were the last time that there were so many of this name; what all layers read is
        read there, and not copied for each."""
        numbers = 1 << max(x.numel() - 1, 0).bit_length()
        place = self.places.get((*name, numbers, x.dtype))
        if place is None:
            place = self.places[(*name, numbers, x.dtype)] = x.new_empty(numbers, requires_grad=False)
        placed = place.detach()[: x.numel()].view(x.shape).copy_(x)
        if shared:
            torch._dynamo.mark_static_address(placed, guard=False)
        return placed

"""Fast steps of few tokens: their layers as CUDA graphs, and a forecast of how many tokens run each step."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fathom.models.decoder import Decoder, LayerGroup
from fathom.ops.autocast import autocasts


class Foresight:
    """A forecast of each step's token count from recent calls, so that no step waits for the count of the last one.

    The forecast is the maximum of recent calls with as many tokens, or their mean plus three standard deviations if
    that is larger. If more tokens go on, the call runs again and waits for all counts (`StepStack.settled`). Counts far
    from recent ones, as after a change of threshold, restart the observation.
    """

    def __init__(self, least: int = 8, remembered: int = 16, occasions: int = 64):
        self.least, self.remembered, self.occasions, self.repeated = least, remembered, occasions, 0
        self.counts: dict[Any, collections.deque[list[int]]] = {}
        self.sizes: dict[Any, set[int]] = {}  # by occasion and step

    def seen(self, occasion: Any, step: int) -> tuple[int, float, float] | None:
        """Maximum, mean and standard deviation of recent counts after this step; None: too few calls so far."""
        calls = self.counts.get(occasion, ())
        if len(calls) < self.least:
            return None
        counts = [numbers[step] if step < len(numbers) else 0 for numbers in calls]
        mean = sum(counts) / len(counts)
        squares = sum((count - mean) ** 2 for count in counts)  # `statistics` takes longer than a step's launches
        return max(counts), mean, math.sqrt(squares / max(len(counts) - 1, 1))

    def most(self, occasion: Any, step: int) -> int | None:
        """The forecast number of tokens that go on after this step; None: not known yet."""
        seen = self.seen(occasion, step)
        return None if seen is None else max(seen[0], math.ceil(seen[1] + 3 * seen[2]))

    def size(self, occasion: Any, step: int, least: int, most: int) -> int:
        """The smallest size in `least` … `most` that this step has had, else `least`; a new size is a new graph."""
        had = self.sizes.setdefault((occasion, step), set())
        size = min((size for size in had if least <= size <= most), default=least)
        had.add(size)
        return size

    def note(self, occasion: Any, counts: list[int]) -> None:
        """Record how many tokens went on after each step."""
        for step, count in enumerate(counts):
            seen = self.seen(occasion, step)
            if seen is not None and abs(count - seen[1]) > 6 * max(seen[2], math.sqrt(seen[1])):
                del self.counts[occasion]
        self.counts.setdefault(occasion, collections.deque(maxlen=self.remembered)).append(counts)
        if len(self.counts) > self.occasions:
            oldest = next(iter(self.counts))
            self.counts.pop(oldest)
            self.sizes = {key: sizes for key, sizes in self.sizes.items() if key[0] != oldest}


def sums(parts: list[list[Tensor]], dtypes: list[torch.dtype]) -> list[Tensor]:
    """The sum of each list of tensors, in its dtype."""
    return [
        sum((part.to(dtype) for part in some[1:]), some[0].to(dtype)) for some, dtype in zip(parts, dtypes, strict=True)
    ]


class CastOnce(torch.autograd.Function):
    """Weights cast to another dtype once for several steps: one copy in `places`, which all steps share.

    The steps' gradients are summed in the weights' own dtype, by `sums` or that function compiled.
    """

    @staticmethod
    def forward(
        ctx: Any, places: list[Tensor], steps: int, sums: Callable[..., list[Tensor]], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        torch._foreach_copy_(places, weights)
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.dtypes = sums, [weight.dtype for weight in weights]
        copies = [place.detach() for _ in range(steps) for place in places]
        frozen = [not needed for needed in ctx.needs_input_grad[3:]] * steps
        ctx.mark_non_differentiable(*itertools.compress(copies, frozen))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None):  # type: ignore[override]
        number = len(ctx.dtypes)
        parts = [[part for part in gradients[n::number] if part is not None] for n in range(number)]
        some = [n for n in range(number) if parts[n]]
        found = dict(zip(some, ctx.sums([parts[n] for n in some], [ctx.dtypes[n] for n in some]), strict=True))
        return None, None, None, *(found.get(n) for n in range(number))


class StepGraphs:
    """Groups of a few layers as CUDA graphs, because a step of few tokens takes less time than launching its kernels.

    A graph is recorded for every size, so sizes are multiples of a 128th of the tokens. The backward pass of a graph
    reads its inputs at the addresses that they had in recording, so an input that does not come from another graph is
    copied to a fixed place. Outputs are valid until the next forward: use gradients, and drop them, before it.
    """

    def __init__(self, decoder: Decoder, together: int = 4):
        torch._inductor.config.triton.cudagraph_dynamic_shape_warn_limit = None  # many sizes are what it is for
        layers: list[Any] = list(decoder.layers)
        together = max(number for number in range(1, together + 1) if len(layers) % number == 0)
        groups = [LayerGroup(layers[n : n + together]) for n in range(0, len(layers), together)]
        self.layers = [group.layers for group in groups]
        self.groups = [torch.compile(group, mode="reduce-overhead") for group in groups]
        self.sums = torch.compile(sums, dynamic=False)
        self.places: dict[tuple[Any, ...], Tensor] = {}
        self.functions: dict[Callable[..., Any], Callable[..., Any]] = {}

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled for any sizes."""
        if function not in self.functions:
            self.functions[function] = torch.compile(function, dynamic=True)
        return self.functions[function]

    def of_step(self, step: int, steps: int, casts: dict[int, list[Any]]) -> list[Callable[..., Any]]:
        """The groups for one of `steps` steps. casts: `weights` of this forward's steps, which the first fills."""

        def run(number: int, *given: Any, **inputs: Any) -> Any:
            if number not in casts:  # while the device runs the groups before
                casts[number] = self.weights(number, steps)
            return self.groups[number](*given, weights=casts[number][step], **inputs)

        return [functools.partial(run, number) for number in range(len(self.groups))]

    def weights(self, number: int, steps: int) -> list[list[dict[str, Tensor]]]:
        """Under autocast, the cast matrices of a group's layers, for each step.

        Otherwise every step would cast all of them again, and add its gradients to the others' in separate calls.
        """
        layers = self.layers[number]
        found: list[list[dict[str, Tensor]]] = [[{} for _ in layers] for _ in range(steps)]
        device = next(layers.parameters()).device.type
        if not autocasts(device):
            return found
        dtype = torch.get_autocast_dtype(device)
        # A layer's names of a tensor that it has twice are one to `functional_call`. Autocast leaves fp64 alone.
        named = {
            (layer, id(tensor)): (f"{name}.{part}", tensor)
            for layer, block in enumerate(layers)
            for name, module in block.named_modules()
            if type(module) is nn.Linear
            for part, tensor in module.named_parameters()
            if tensor.dtype not in (dtype, torch.float64)
        }
        if not named:
            return found
        own = [tensor for _, tensor in named.values()]
        rooms = (self.room(("weight", number, n), x.numel(), dtype, x.device) for n, x in enumerate(own))
        places = [room.view(x.shape) for room, x in zip(rooms, own, strict=True)]
        copies = iter(CastOnce.apply(places, steps, self.sums, *own))
        for weights in found:
            for ((layer, _), (name, _)), copy in zip(named.items(), copies, strict=False):
                torch._dynamo.mark_static_address(copy, guard=False)
                weights[layer][name] = copy
        return found

    def room(self, name: tuple[Any, ...], numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of this name for `numbers` numbers, the same one in every call."""
        place = self.places.get((*name, numbers, dtype, device))
        if place is None:
            with torch.inference_mode(False):  # others write to it, too
                place = self.places[(*name, numbers, dtype, device)] = torch.empty(numbers, dtype=dtype, device=device)
        return place

    def place(self, x: Tensor, *name: Any) -> Tensor:
        """A copy of x at the address that it had in earlier calls with this name and size, where graphs read it."""
        place = self.room(name, 1 << max(x.numel() - 1, 0).bit_length(), x.dtype, x.device)
        placed = place.detach()[: x.numel()].view(x.shape).copy_(x)
        torch._dynamo.mark_static_address(placed, guard=False)
        return placed

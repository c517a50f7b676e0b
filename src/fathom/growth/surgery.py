"""Surgery on a feed-forward network: pure functions of its three matrices.

    F(x) = W_down (act(W_gate x) ⊙ W_up x)

A neuron i is row i of W_gate and W_up and column i of W_down; F is a sum over neurons, so any partition of them gives
networks whose sum is F.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Network(NamedTuple):
    """A gated feed-forward network: gate and up [I, d], down [d, I]."""

    gate: Tensor
    up: Tensor
    down: Tensor

    @property
    def width(self) -> int:
        return len(self.gate)

    def neurons(self, index: Tensor) -> Network:
        """The network of some neurons."""
        return Network(self.gate[index], self.up[index], self.down[:, index])


def split(network: Network, slices: int, order: Tensor | None = None) -> list[Network]:
    """`slices` networks of I / slices neurons each, in order or in the given one; their sum is the network.

    Raises ValueError where I is no multiple of `slices`.
    """
    if network.width % slices:
        raise ValueError(f"slices={slices}: does not divide the width {network.width} of the feed-forward network")
    order = torch.arange(network.width) if order is None else order
    return [network.neurons(part) for part in order.chunk(slices)]


def permutation(network: Network, generator: torch.Generator) -> Tensor:
    """A random order of the neurons."""
    return torch.randperm(network.width, generator=generator)


def clustered(fired: Tensor, slices: int, generator: torch.Generator, rounds: int = 20) -> Tensor:
    """An order of the neurons in which those of a slice fire on the same tokens: k-means of their columns, on the
    sphere, with slices of equal size. Neurons with the clearest preference choose first.

    fired: [N, I] whether a neuron fired on a token.   Raises ValueError where I is no multiple of `slices`.
    """
    width = fired.shape[1]
    if width % slices:
        raise ValueError(f"slices={slices}: does not divide the width {width} of the feed-forward network")
    neurons = torch.nn.functional.normalize(fired.T.float(), dim=-1)  # [I, N]
    # each further centre is the neuron least like those before it
    centres = neurons[torch.randint(width, (1,), generator=generator)]
    while len(centres) < slices:
        nearest = (neurons @ centres.T).amax(-1)
        centres = torch.cat((centres, neurons[nearest.argmin()][None]))
    belongs = torch.empty(0)
    for _ in range(rounds):
        likeness = neurons @ centres.T  # [I, G]
        best, others = likeness.sort(-1, descending=True)
        cares = (best[:, 0] - best[:, -1]).argsort(descending=True, stable=True).tolist()
        room, choices, now = [width // slices] * slices, others.tolist(), [0] * width
        for neuron in cares:
            now[neuron] = next(slice_ for slice_ in choices[neuron] if room[slice_])
            room[now[neuron]] -= 1
        before, belongs = belongs, torch.tensor(now)
        if torch.equal(before, belongs):
            break
        centres = torch.stack([neurons[belongs == slice_].mean(0) for slice_ in range(slices)])
        centres = torch.nn.functional.normalize(centres, dim=-1)
    return belongs.argsort(stable=True)


def scaled(network: Network, scale: float, mode: str) -> Network:
    """The network times a number. "down" multiplies only W_down and is exact; "cuberoot" multiplies all three matrices
    by the cube root, which is exact only for a homogeneous activation.
    """
    if mode == "down":
        return network._replace(down=network.down * scale)
    root = scale ** (1 / 3)
    return Network(*(matrix * root for matrix in network))


def reinitialised(network: Network, ratio: float, generator: torch.Generator) -> Network:
    """The network with a share of its neurons redrawn from a normal distribution with the mean and deviation of their
    old weights; the same neurons in all three matrices (Drop-Upcycling, arXiv 2502.19261).
    """
    count = round(ratio * network.width)
    if not count:
        return network
    chosen = torch.randperm(network.width, generator=generator)[:count]

    def drawn(old: Tensor) -> Tensor:
        wide = old.float() if old.dtype != torch.float64 else old
        return (wide.mean() + wide.std() * torch.randn(old.shape, generator=generator, dtype=wide.dtype)).to(old.dtype)

    gate, up, down = network.gate.clone(), network.up.clone(), network.down.clone()
    gate[chosen], up[chosen] = drawn(gate[chosen]), drawn(up[chosen])
    down[:, chosen] = drawn(down[:, chosen])
    return Network(gate, up, down)


def router(groups: int, slices: int, like: Network, generator: torch.Generator, how: str, std: float = 0.02) -> Tensor:
    """Rows of a router, [groups · slices, d]: "group_tied" draws one for each group and repeats it, "random" all."""
    rows = groups if how == "group_tied" else groups * slices
    drawn = std * torch.randn(rows, like.gate.shape[1], generator=generator)
    return drawn.repeat_interleave(groups * slices // rows, 0).to(like.gate.dtype)


def mixture(router: Tensor, experts: Sequence[Network], shared: Network | None = None) -> dict[str, Tensor]:
    """The tensors of `moe`, by their names in a layer's `mlp`."""
    tensors = {
        "gate.weight": router,
        "experts.gate_up_proj": torch.stack([torch.cat((expert.gate, expert.up)) for expert in experts]),
        "experts.down_proj": torch.stack([expert.down for expert in experts]),
    }
    if shared is not None:
        tensors.update({f"shared_expert.{name}": tensor for name, tensor in dense(shared).items()})
    return tensors


def dense(network: Network) -> dict[str, Tensor]:
    """The tensors of `dense`, by their names in a layer's `mlp`."""
    return {f"{part}_proj.weight": matrix for part, matrix in zip(Network._fields, network, strict=True)}

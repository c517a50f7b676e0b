"""mHC: manifold-constrained hyper-connections (arXiv 2512.24880).

n residual streams r_1 … r_n, at first copies of the embedding. Around every sublayer f, per token and in fp32:

    z      = W (γ ⊙ r / rms(r)),   r = all streams side by side, [n·d]
    h_pre  = σ(α_pre z_pre + b_pre)                                                     [n]    starts at 1/n
    h_post = 2σ(α_post z_post + b_post)                                                 [n]    starts at 1
    H      = Sinkhorn(exp(α_res z_res + b_res))                                         [n, n] starts at about 0.99·I
    x      = Σ_i h_pre,i r_i;     r_i ← Σ_j H_ij r_j + h_post,i f(norm x)

Sinkhorn divides columns, then rows, by their sums, `iterations` times, so that H mixes the streams without gain: its
rows sum to 1, its columns nearly. The final norm sees a learned convex mean of the streams (starts uniform). A new
model is the ordinary decoder up to the small α (starts at 0.01).
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import initialization as init

from fathom.models.adapted_layers import linear_matrix
from fathom.models.registry import register
from fathom.residuals.base import Counts, ResidualTopology, check_range

SCALE = 0.01  # α at the start
DIAGONAL = 0.99  # of H at the start


def sinkhorn(logits: Float[Tensor, "*B n n"], iterations: int) -> Float[Tensor, "*B n n"]:
    """exp(logits), its columns and then its rows divided by their sums, `iterations` times: rows sum to 1 exactly."""
    matrix = (logits - logits.amax(dim=(-2, -1), keepdim=True)).exp()
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix


def weighted_sum(weights: Float[Tensor, "*B n"], streams: tuple[Tensor, ...]) -> Float[Tensor, "B T d"]:
    """Σ_i w_i r_i in the streams' dtype; nothing is stacked."""
    weights = weights.to(streams[0].dtype)
    total = weights[..., 0, None] * streams[0]
    for i in range(1, len(streams)):
        total = total + weights[..., i, None] * streams[i]
    return total


class HyperConnection(nn.Module):
    """The weights h_pre, h_post and H of one sublayer, in fp32 or wider; static ones have no leading dimensions."""

    def __init__(self, width: int, eps: float, streams: int, iterations: int, dynamic: bool):
        super().__init__()
        self.width, self.eps, self.streams, self.iterations, self.dynamic = width, eps, streams, iterations, dynamic
        self.parts = (streams, streams, streams**2)  # logits of h_pre, h_post and H
        self.bias = nn.Parameter(torch.empty(sum(self.parts)))
        if dynamic:
            self.projection = nn.Linear(streams * width, sum(self.parts), bias=False)
            self.gain = nn.Parameter(torch.empty(streams * width))
            self.scale = nn.Parameter(torch.empty(3))  # α_pre, α_post, α_res

    def initialize_parameters(self):
        others = self.streams - 1
        mixing = torch.eye(self.streams) * math.log(DIAGONAL / (1 - DIAGONAL) * others)
        read, write = torch.full((self.streams,), -math.log(others)), torch.zeros(self.streams)
        init.copy_(self.bias, torch.cat((read, write, mixing.flatten())))
        if self.dynamic:
            init.ones_(self.gain)
            init.constant_(self.scale, SCALE)

    def forward(self, streams: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(streams[0].dtype, torch.float32)
        logits = self.bias.to(wide).split(self.parts)
        if self.dynamic:
            z = self.project(streams, wide).split(self.parts, dim=-1)
            logits = tuple(a * part + b for a, part, b in zip(self.scale.to(wide), z, logits, strict=True))
        pre, post, mixing = logits
        mixing = mixing.unflatten(-1, (self.streams, self.streams))
        return pre.sigmoid(), 2 * post.sigmoid(), sinkhorn(mixing, self.iterations)

    def project(self, streams: tuple[Tensor, ...], wide: torch.dtype) -> Float[Tensor, "B T z"]:
        """The projection z. γ is folded into W and 1/rms into its output, so that streams are never concatenated."""
        weight = linear_matrix(self.projection, streams[0].device) * self.gain
        parts = weight.split(self.width, dim=1)
        z, mean_square = F.linear(streams[0], parts[0]).to(wide), streams[0].to(wide).square().mean(-1, keepdim=True)
        for stream, part in zip(streams[1:], parts[1:], strict=True):
            z = z + F.linear(stream, part).to(wide)
            mean_square = mean_square + stream.to(wide).square().mean(-1, keepdim=True)
        return z * torch.rsqrt(mean_square / self.streams + self.eps)


@register("residual", "mhc")
class ManifoldHyperConnections(ResidualTopology):
    """Several residual streams; each sublayer reads, writes and mixes them with per-token weights."""

    summary = "Several residual streams that every sublayer reads, mixes (doubly stochastic) and writes per token."
    equation = "x = Σ_i h_pre,i r_i;  r_i ← Σ_j H_ij r_j + h_post,i f(norm x),  H = Sinkhorn(exp(α_res z_res + b_res))"
    paper = "2512.24880"
    variants = ({"streams": 3, "iterations": 4}, {"streams": 2, "dynamic": False})

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options; the defaults are the paper's.

        streams: n, at least 2.
        iterations: rounds of Sinkhorn's normalisation.
        dynamic: False leaves z out: the weights are learned, but the same for every token.
        """

        streams: int = 4
        iterations: int = 20
        dynamic: bool = True

        def __post_init__(self):
            check_range("mhc", "streams", self.streams, 2)
            check_range("mhc", "iterations", self.iterations, 1)

    def __init__(self, config, options):
        super().__init__(config, options)
        self.writes = 1 if config.parallel_residual else 2
        self.connections = nn.ModuleList(
            HyperConnection(config.hidden_size, config.norm_eps, options.streams, options.iterations, options.dynamic)
            for _ in range(self.writes * config.num_hidden_layers)
        )
        self.reduce_logits = nn.Parameter(torch.empty(options.streams))

    def initialize_parameters(self):
        init.zeros_(self.reduce_logits)

    # the stream: the n streams

    def start(self, hidden_states):
        return (hidden_states,) * self.options.streams

    def read(self, stream, sublayer):
        pre, post, mixing = self.connections[sublayer * self.writes // 2](stream)
        return weighted_sum(pre, stream), (post, mixing)

    def write(self, stream, sublayer, output, carry):
        post, mixing = carry
        post = post.to(output.dtype)
        return tuple(
            weighted_sum(mixing[..., i, :], stream) + post[..., i, None] * output for i in range(self.options.streams)
        )

    def finish(self, stream):
        return self(stream)  # a call: accelerate loads offloaded parameters of a module for its forward only

    def forward(self, stream):
        wide = torch.promote_types(stream[0].dtype, torch.float32)
        return weighted_sum(self.reduce_logits.to(wide).softmax(-1), stream)

    @classmethod
    def counts(cls, config, options) -> Counts:
        n, d = options.streams, config.hidden_size
        logits = n * (n + 2)
        sublayers = config.num_hidden_layers * (1 if config.parallel_residual else 2)
        mix = (2 * n - 1) * d  # a weighted sum of the streams
        work, matmul, parameters = mix + n * (mix + 2 * d), 0, logits
        if options.dynamic:
            root = n * (2 * d + 1) + (n - 1) + 3
            maps = (n - 1) * logits + root + 3 * logits  # sum of products; 1/rms; times it, times α, plus bias
            work += maps + 3 * n + (2 + 4 * options.iterations) * n**2  # sigmoids and the 2; Sinkhorn
            matmul = 2 * n * d * logits
            parameters += n * d * (logits + 1) + 3
        return Counts(
            matmul=sublayers * matmul,
            elementwise=sublayers * work + mix,
            recomputed_outputs=config.num_hidden_layers,
            mixing=sublayers * (matmul + 2 * n * (n + 2) * d),
            traffic=(sublayers * ((n + 1) + (2 * n + 1)) + n + 1) * d,
            parameters=sublayers * parameters + n,
        )

"""Fine-to-coarse attention: a block of queries reads its surroundings at a resolution that falls with the distance.

    level 0 of the tree: the S blocks of L tokens;   level p, node j: blocks j … j + 2^p − 1 as L means of 2^p tokens
    y_b = softmax(q_b K_bᵀ + bias + mask) V_b,   K_b, V_b the nodes that block b reads, in order (`nodes.py`)

The bias is T5's, of the distance in slots: L · (slots between the node and the own block) + r_k − r_q.

Two equal forms: with gathered nodes and all scores (`plain.py`), and kernels that read every node where it lies
(`kernel.py`): on a GPU, in 16 bits, without dropout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from fathom.ops.fovea_attention import plain
from fathom.ops.fovea_attention.nodes import Nodes, Reads, levels_of, mean_nodes, nodes, reads
from fathom.ops.fovea_attention.plain import Tree, grow
from fathom.ops.kernels import has_kernel

__all__ = ["Nodes", "Reads", "Tree", "fovea_attention", "grow", "levels_of", "mean_nodes", "nodes", "reads"]


def fovea_attention(
    query: Float[Tensor, "B N h d"],
    key: Float[Tensor, "B N h d"],
    value: Float[Tensor, "B N h d"],
    real: Bool[Tensor, "B N"] | None,
    bias: Float[Tensor, "h 2*D+1"],
    *,
    block_len: int,
    wing_size: int = 1,
    stop_level: int = 20,
    boundary: str = "drop",
    steps: str = "gradual",
    pool: str = "count",
    preserve_mass: bool = False,
    dropout: float = 0.0,
    lists: Reads | None = None,
) -> Float[Tensor, "B N h d"]:
    """Attention without scaling, softmax in fp32 or wider.

    Args:
        real: which tokens are real; None: all. A row's nodes are those of its own number of blocks, up to its last
            real token, whatever stands beside it in the batch.
        bias: by distance −D … D in slots; farther keys have the outermost.
        preserve_mass: a vector of n tokens weighs as n: its score is log n higher.
        lists: `reads` of these tokens, where somebody has made them before.
    """
    length = query.shape[1]
    if lists is None:
        lists = reads(
            real, length, query.device, block_len=block_len, wing_size=wing_size, stop_level=stop_level,
            boundary=boundary, steps=steps,
        )  # fmt: skip
    if length % block_len:
        query, key, value = (F.pad(x, (0, 0, 0, 0, 0, -length % block_len)) for x in (query, key, value))
    form: Any = plain.fovea_attention
    options: dict[str, Any] = {"block_len": block_len, "stop_level": stop_level, "pool": pool}
    if serves(query, key, value, block_len) and not dropout:
        from fathom.ops.fovea_attention import kernel

        form = kernel.fovea_attention
    else:
        options["dropout"] = dropout
    return form(query, key, value, bias, lists, preserve_mass=preserve_mass, **options)[:, :length]


def serves(query: Tensor, key: Tensor, value: Tensor, block_len: int) -> bool:
    """Whether the kernels do: blocks of 16 to 128 tokens and heads of 16 to 128 channels, powers of two, in 16 bits."""
    short = query.dtype == key.dtype == value.dtype and query.dtype in (torch.bfloat16, torch.float16)
    fits = all(16 <= size <= 128 and size & (size - 1) == 0 for size in (block_len, query.shape[3]))
    return short and fits and has_kernel(query.device.type)

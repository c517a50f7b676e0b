"""Small integers packed into bytes along the last axis, lowest bit first: N codes of b bits take ⌈N·b/8⌉ bytes."""

from __future__ import annotations

import torch
from jaxtyping import Int, UInt8
from torch import Tensor


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of one packed row of `count` codes."""
    return -(-count * bits // 8)


def pack(codes: Int[Tensor, "*rows N"], bits: int) -> UInt8[Tensor, "*rows bytes"]:
    """Codes 0 … 2^bits − 1, 1 ≤ bits ≤ 16. Rows that do not fill the last byte end in zero bits."""
    _check(bits)
    if bits == 8:
        return codes.to(torch.uint8)
    place = torch.arange(bits, device=codes.device)
    stream = ((codes.to(torch.int32).unsqueeze(-1) >> place) & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (stream << torch.arange(8, device=codes.device)).sum(-1).to(torch.uint8)


def unpack(packed: UInt8[Tensor, "*rows bytes"], bits: int, count: int) -> Int[Tensor, "*rows N"]:
    """The `count` codes of every row, as int32."""
    _check(bits)
    if bits == 8:
        return packed[..., :count].to(torch.int32)
    if bits in (1, 2, 4):
        shift = torch.arange(0, 8, bits, device=packed.device, dtype=torch.uint8)
        return ((packed.unsqueeze(-1) >> shift) & (2**bits - 1)).flatten(-2)[..., :count].to(torch.int32)
    stream = (packed.unsqueeze(-1) >> torch.arange(8, device=packed.device, dtype=torch.uint8)) & 1
    stream = stream.flatten(-2)[..., : count * bits].unflatten(-1, (count, bits)).to(torch.int32)
    return (stream << torch.arange(bits, device=packed.device, dtype=torch.int32)).sum(-1).to(torch.int32)


def _check(bits: int) -> None:
    if not 1 <= bits <= 16:
        raise ValueError(f"bits={bits}: codes have 1 to 16 bits")

"""Slots of several banks and layers into one place, in one launch: a Triton kernel.

As one `gather` along the slots for each tensor, its banks joined. Needs the package `triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.kernels import wants_gradient

BLOCK = 64  # slots of a program
WORD = 8  # bytes that are copied as one number


@triton.jit
def _gather(sources, index, target, slots, groups, WORDS: tl.constexpr, LANES: tl.constexpr, BANKS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    pair, tensor = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, group = pair // groups, pair % groups
    to_slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = to_slot < slots
    from_slot = tl.load(index + row * slots + to_slot, mask=exists, other=0)
    address = tl.zeros((BLOCK,), tl.int64)
    for bank in tl.static_range(BANKS):
        source = sources + (tensor * BANKS + bank) * 5
        first = tl.load(source + 4)
        start = tl.load(source) + row * tl.load(source + 1) + group * tl.load(source + 2)
        address = tl.where(from_slot >= first, start + (from_slot - first) * tl.load(source + 3), address)
    lane = tl.arange(0, LANES)[None, :]
    mask = exists[:, None] & (lane < WORDS)
    x = tl.load(address.to(tl.pointer_type(tl.int64))[:, None] + lane, mask=mask)
    tl.store(target + ((tensor * tl.num_programs(1) + pair) * slots + to_slot)[:, None] * WORDS + lane, x, mask=mask)


def serves(banks: list[list[Tensor]]) -> bool:
    """Whether the kernel takes these: alike but for their slots, channels in order and whole words, no gradient."""
    like = banks[0][0]
    if like.shape[-1] * like.element_size() % WORD:
        return False
    every = [x for bank in banks for x in bank]
    alike = all(x.dtype == like.dtype and x.shape[1] == like.shape[1] and x.shape[3] == like.shape[3] for x in every)
    whole = all(
        x.stride(3) == 1 and not (x.data_ptr() | like.element_size() * (x.stride(0) | x.stride(1) | x.stride(2))) % WORD
        for x in every
    )
    return alike and whole and not wants_gradient(*every)


def gather_slots(banks: list[list[Tensor]], index: Int[Tensor, "B m"]) -> Float[Tensor, "tensors B G m D"]:
    """Of each tensor, the slots at these places (int64, contiguous), where those of the first bank come first, then
    those of the next.

    Args:
        banks: of every bank as many tensors, [B, G, n, D] or one row for all, [1, G, n, D].
        index: of each row.
    """
    rows, slots = index.shape
    (_, groups, _, width), size = banks[0][0].shape, banks[0][0].element_size()
    entries, first = [], 0
    for bank in banks:
        entries.append(
            [(x.data_ptr(), *((x.stride(0) * size if len(x) > 1 else 0), x.stride(1) * size, x.stride(2) * size), first)
             for x in bank]
        )  # fmt: skip
        first += bank[0].shape[2]
    found = banks[0][0].new_empty(len(banks[0]), rows, groups, slots, width)
    sources = torch.tensor(list(zip(*entries, strict=True)), pin_memory=index.is_cuda)
    words = width * size // WORD
    with torch.cuda.device_of(index):
        _gather[(triton.cdiv(slots, BLOCK), rows * groups, len(found))](
            sources.to(index.device, non_blocking=True), index, found.view(torch.int64), slots, groups,
            WORDS=words, LANES=triton.next_power_of_2(words), BANKS=len(banks), BLOCK=BLOCK,
        )  # fmt: skip
    return found

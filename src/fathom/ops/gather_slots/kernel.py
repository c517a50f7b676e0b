"""Slots of several tensors and banks in one launch: a Triton kernel, given where they lie."""

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
def _gather(sources, index, target, slots, rows, groups, WORDS: tl.constexpr, LANES: tl.constexpr, BANKS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    blocks, tensor = tl.cdiv(slots, BLOCK), tl.program_id(1).to(tl.int64)
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    row, group = pair // groups, pair % groups
    to_slot = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
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
    tl.store(target + ((tensor * rows * groups + pair) * slots + to_slot)[:, None] * WORDS + lane, x, mask=mask)


def addresses(banks: list[list[Tensor]]) -> Int[Tensor, "tensors banks 5"] | None:
    """Where the tensors of every bank lie, on their device and without waiting for it. None: the kernel does not take
    these, as they are not alike but for banks having other slots, their channels are not in order and whole words, or
    a gradient is wanted.

    Args:
        banks: of every bank as many tensors, [B, G, n, D] or one row for all, [1, G, n, D]; B as of the index later.
    """
    like, every = banks[0][0], [x for bank in banks for x in bank]
    size = like.element_size()
    kinds = {(x.dtype, x.device, x.shape[1], x.shape[3]) for x in every}
    if len(kinds) > 1 or any(len({x.shape for x in bank}) > 1 for bank in banks) or wants_gradient(*every):
        return None
    table = torch.tensor([[(x.data_ptr(), *x.stride()) for x in bank] for bank in banks])  # (start, rows, heads, slots)
    table[..., 1:] *= size
    in_order = bool((table[..., 4] == size).all()) and not like.shape[3] * size % WORD
    first = 0
    for entries, bank in zip(table, banks, strict=True):
        rows, _, slots, _ = bank[0].shape
        if rows == 1:
            entries[:, 1] = 0
        entries[:, 4] = first
        first += slots
    if not in_order or bool((table[..., :4] % WORD).any()):
        return None
    table = table.transpose(0, 1).contiguous()
    return table.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else table


def gather_slots(
    addresses: Int[Tensor, "tensors banks 5"], like: Float[Tensor, "_ G _ D"], index: Int[Tensor, "B m"]
) -> Float[Tensor, "tensors B G m D"]:
    """The slots at these places (int64, contiguous, for each row) of each tensor at these addresses, all like the one
    given. Places count the slots of the first bank, then those of the next. The tensors must be there still."""
    (rows, slots), words = index.shape, like.shape[3] * like.element_size() // WORD
    found = like.new_empty(len(addresses), rows, like.shape[1], slots, like.shape[3])
    with torch.cuda.device_of(index):
        _gather[(triton.cdiv(slots, BLOCK) * rows * like.shape[1], len(found))](
            addresses, index, found.view(torch.int64), slots, rows, like.shape[1],
            WORDS=words, LANES=triton.next_power_of_2(words), BANKS=addresses.shape[1], BLOCK=BLOCK,
        )  # fmt: skip
    return found

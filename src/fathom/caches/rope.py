"""Rotary positions by slot: keys are stored unrotated and turned, when attended to, by the slot they stand in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fathom.caches import versions
from fathom.ops.rotary_slots import rotate_slots

# Frequencies of these types depend on the longest position of the call: a table serves calls of its own length only.
LENGTH_DEPENDENT = ("dynamic", "longrope")


class SlotRope:
    """Rotation with the model's own rotary module: its frequencies, scaling and rotary width."""

    def __init__(self, rotary: nn.Module, rope_type: str = "default"):
        self.rotary = rotary
        self.keep = rope_type not in LENGTH_DEPENDENT
        self.tables: dict[Any, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, start: int = 0) -> Tensor:
        """x [B, heads, n, D] rotated at positions start … start + n − 1."""
        cos, sin = self.table(start + x.shape[2], x)
        return rotate_slots(x, cos, sin, start)

    def table(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [1, ≥ length, R] in the dtype and on the device of `like`."""
        place = (like.device, like.dtype)
        held = self.tables.get(place)
        if held is not None and (held[0].shape[1] >= length if self.keep else held[0].shape[1] == length):
            return held
        size, rotary = length, self.rotary
        if self.keep:
            size = max(256, 1 << (length - 1).bit_length())
        else:  # the model's own module remembers the longest position of any row ("dynamic"): slots know only theirs
            rotary = type(rotary)(rotary.config).to(like.device)
        with torch.inference_mode(False), torch.no_grad():  # kept, and training may come after inference
            positions = torch.arange(size, device=like.device).unsqueeze(0)
            made = versions.rotary_tables(rotary, like, positions)
            made = made[0].to(like.device), made[1].to(like.device)  # the layers of a model may be on several
        self.tables[place] = made  # not read again: another thread may have put its own there
        return made

"""torch.autocast in this library: attention runs in its dtype; products promised in fp32 or wider do not."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def autocasts(device: str) -> bool:
    """Whether autocast is on for this type of device. On meta there is none, and asking would raise."""
    return device != "meta" and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> contextlib.AbstractContextManager:
    """A context without autocast. Where it is off, as in every captured or compiled step, nothing is entered."""
    return torch.autocast(device, enabled=False) if autocasts(device) else contextlib.nullcontext()


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products and attention would take x: autocast's where it is on (fp64 stays), else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if x.dtype != torch.float64 and autocasts(device) else x.dtype


def product_spacing(x: Tensor) -> float:
    """The relative spacing of the numbers that a matrix product with x multiplies: coarser than those of x under
    autocast, or where fp32 products may be shortened (TF32 has 10 bits behind the point, bf16 7)."""
    dtype = product_dtype(x)
    shortened = {"high": 2.0**-10, "medium": 2.0**-7} if dtype == torch.float32 else {}
    return max(torch.finfo(dtype).eps, shortened.get(torch.get_float32_matmul_precision(), 0.0))

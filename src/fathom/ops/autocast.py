"""What torch.autocast may do here: attention in its dtype; and what not: products promised in fp32 or wider."""

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

"""Where a model runs."""

from __future__ import annotations

import torch


def device_of(name: str | None = None) -> torch.device:
    """The device of that name; without one the GPU, or the CPU where there is none.

    Raises ValueError for a device that this machine does not have.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={name!r}: not on this machine ({str(error).splitlines()[0]})") from error
    return device

"""Whether Triton kernels run on a device, and what all of them require of their tensors.

An op that has a kernel is a folder: `__init__.py` holds its equation and chooses, `plain.py` is the reference in
PyTorch, `kernel.py` what Triton runs, imported when it is chosen. Callers use the op's name and do not ask. `TRITON` is
the one switch: set it to False, and every op takes its plain form.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what they read and write; fp64 stays with the reference
# Found here, as what is asked inside a compiled graph must not look for packages.
TRITON, INTERPRETED = find_spec("triton") is not None, os.environ.get("TRITON_INTERPRET") == "1"


def has_kernel(device: str) -> bool:
    """Whether Triton's kernels run on this type of device; TRITON_INTERPRET=1 (tests) runs them on a CPU."""
    return TRITON and (device == "cuda" or INTERPRETED)


def missing(device: torch.device) -> str:
    """Why kernels do not run on this device, in words; "" if they do."""
    if has_kernel(device.type):
        return ""
    installed = "installed" if TRITON else "missing"
    return f"it needs a CUDA device and the package triton; the model is on {device}, triton is {installed}"


def wants_gradient(*tensors: Tensor) -> bool:
    """Whether a gradient is to reach one of these: kernels without a backward pass leave them to the reference."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

"""Where the Triton kernels of this folder run, and what all of them ask of their tensors."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what they read and write; fp64 stays with the reference
# Found here, as what is asked inside a compiled graph must not look for packages.
_TRITON, _INTERPRETED = find_spec("triton") is not None, os.environ.get("TRITON_INTERPRET") == "1"


def has_kernel(device: str) -> bool:
    """Whether Triton's kernels run on this type of device; TRITON_INTERPRET=1 (tests) runs them on a CPU."""
    return _TRITON and (device == "cuda" or _INTERPRETED)


def wants_gradient(*tensors: Tensor) -> bool:
    """Whether a gradient is to reach one of these: kernels without a backward pass leave them to the reference."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

"""Where the Triton kernels of this folder run."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec


@functools.cache
def has_kernel(device: str) -> bool:
    """Whether Triton's kernels run on this type of device; TRITON_INTERPRET=1 (tests) runs them on a CPU."""
    return find_spec("triton") is not None and (device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")

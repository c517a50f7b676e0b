"""A fault of cuDNN's attention, and training without it.

Its backward pass on Hopper, up to cuDNN 9.25.1, makes NaN of the gradient of the queries where a mask is given, the
number of keys leaves 64 when divided by 128, and a query's log-sum-exp lies below −ln(largest fp32) = −88.7, as that of
padding does, which sees nothing (pytorch issue 196678; torch prefers cuDNN from 2.11 on). Losses look right until then.
Tasks without padding keep it: their training would lose speed for nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

SOUND = 92600  # torch.backends.cudnn.version() of 9.26.0


def is_faulty() -> bool:
    """Whether this machine's cuDNN has the fault."""
    if not torch.cuda.is_available():
        return False
    version = torch.backends.cudnn.version()
    return version is not None and version < SOUND


@contextlib.contextmanager
def sound_attention() -> Iterator[None]:
    """A context in which scaled_dot_product_attention uses no kernel with the fault: flash and the memory-efficient one
    instead, also where a graph is compiled. Where cuDNN is sound nothing changes."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and not is_faulty())
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)

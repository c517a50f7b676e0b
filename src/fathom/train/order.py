"""The order in which blocks are read: a function of the seed alone.

The Trainer sees one long epoch. So every step has its full number of tokens, all methods read the same blocks in the
same steps on any number of devices, and a resumed run only skips what was read.
"""

from __future__ import annotations

from dataclasses import replace

from fathom.data import StreamingBlocks
from fathom.data.mixing import ShuffledBlocks

__all__ = ["ShuffledBlocks", "reseeded"]


def reseeded(stream: StreamingBlocks, seed: int) -> StreamingBlocks:
    """The endless stream in the order of this seed."""
    return StreamingBlocks(stream.source, stream.tokenizer, replace(stream.config, seed=seed))

"""The switches of fast decoding.

FAST: our loop, with prompts in parts; False: transformers' own loop runs everything, each prompt in one piece.
GRAPHS: steps on a GPU are recorded as CUDA graphs where the model and its cache allow it.
"""

from __future__ import annotations

import functools
import logging

FAST = True
GRAPHS = True
logger = logging.getLogger("fathom.decoding")


@functools.lru_cache(maxsize=256)
def say(reason: str) -> None:
    """Log once, at debug level, why a call or a step is not fast."""
    logger.debug(reason)

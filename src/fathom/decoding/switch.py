"""The one switch of this room: with `FAST = False` transformers' own loop runs everything, each prompt in one piece."""

from __future__ import annotations

import functools
import logging

FAST = True
logger = logging.getLogger("fathom.decoding")


@functools.lru_cache(maxsize=256)
def say(reason: str) -> None:
    """Once, at debug level: why a call or a step takes the ordinary way."""
    logger.debug(reason)

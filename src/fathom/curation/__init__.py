"""The curation wing: papers and texts → a cleaned corpus, and the account of what was dropped.

Its steps need packages of the extra `curate`; the config does not.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from fathom.curation.config import Curation

if TYPE_CHECKING:
    from fathom.curation.run import curate

__all__ = ["METHODS", "Curation", "curate"]
METHODS = {Curation.name: Curation}
_NEEDED = ("datatrove", "datasketch", "py3langid", "simplemma", "lxml")


def __getattr__(name: str) -> Any:
    if name != "curate":
        raise AttributeError(f"module 'fathom.curation' has no attribute {name!r}")
    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(f"curation needs {', '.join(missing)}: pip install 'fathom-lm[curate]'")
    from fathom.curation.run import curate

    return curate

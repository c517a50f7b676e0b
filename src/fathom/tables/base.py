"""The seams of the wing.

`Relations` is the seam of the section `relations` of T5's config: what encoder self-attention knows about every pair of
tokens. `TableMethod` is the base of all other methods, frozen dataclasses whose fields are their options.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from fathom.models.method import Method


class Relations(Method):
    """A method of the section `relations`."""

    wing: ClassVar[str] = "tables"

    def tables(self) -> tuple[Tensor, Tensor] | None:
        """(E_K, E_V), each [ids, d_kv]; None: attention has no relations."""
        return None

    @classmethod
    def ids(cls, options: Any) -> Mapping[str, int] | None:
        """The id of each relation; None: there are none."""
        return None

    @classmethod
    def numbering(cls, options: Any) -> list[int] | None:
        """The id of every relation of the preprocessing (`fathom.tables.relations`), by its number there."""
        return None


@dataclasses.dataclass(frozen=True)
class TableMethod:
    """Base of the wing's methods that are no section of a config."""

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    registry: ClassVar[str] = "tables"
    summary: ClassVar[str]  # one line for `fathom methods`, which reads the sources: write literals
    equation: ClassVar[str]
    role: ClassVar[str] = "method"  # or "baseline"

    def to_dict(self) -> dict[str, Any]:
        """`{"name": …, options}`."""
        return {"name": self.name, **dataclasses.asdict(self)}


def require(what: str, *packages: str) -> None:
    """Raise ImportError with the pip command if a package of the extra is not installed."""
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    if absent:
        raise ImportError(f"{what} needs {', '.join(absent)}: pip install 'fathom-lm[tables]'")

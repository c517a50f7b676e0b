"""The seam of the growth wing: what a method makes of one layer's feed-forward network."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fathom.growth.surgery import Network

if TYPE_CHECKING:
    from fathom.growth.sample import Seen


@dataclasses.dataclass(frozen=True)
class GrowthMethod:
    """Base of the methods. The fields of a subclass are its options, checked in `__post_init__`.

    A method sees one layer at a time, so that a model larger than memory can grow.

    Attributes:
        branches: whether it takes further checkpoints, each trained from the base on a text.
        changes: which weights of the branches may differ from the base's.
        fresh: whether no weight of the base is kept, and all are drawn by the config's rule.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    equation: ClassVar[str]
    paper: ClassVar[str] = ""
    branches: ClassVar[str] = "none"  # or "some", "needed"
    changes: ClassVar[str] = "feed-forward networks"  # or "everything"
    fresh: ClassVar[bool] = False

    @property
    def reads(self) -> int | None:
        """The number of texts that the method runs through the base: 0 for none, None for any number from 1."""
        return 0

    def section(self, config: Any, branches: int) -> dict[str, Any]:
        """The `feed_forward` section of the grown model. Raises ValueError where the sizes do not fit."""
        raise NotImplementedError  # abstract

    def network(
        self,
        base: Network,
        branches: Sequence[Network],
        generator: torch.Generator,
        config: Any,
        seen: Seen | None = None,
    ) -> dict[str, Tensor]:
        """The tensors of the grown layer's feed-forward network, by their names in it.

        base, branches: the dense networks of this layer.   config: the grown model's.   seen: what a sample of texts
        says about this layer of the base, where the method `reads` some.
        """
        raise NotImplementedError  # abstract

    def other(self, base: Tensor, branches: Sequence[Tensor]) -> Tensor:
        """The grown model's value of a tensor outside the feed-forward networks."""
        return base

    def start(self, branches: int) -> str:
        """Words for the function of the grown model before it trains: "the dense model" if it equals that."""
        raise NotImplementedError  # abstract


DENSE = "the dense model"

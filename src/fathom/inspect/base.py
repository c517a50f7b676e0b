"""What a picture is: measured by one function, kept as plain numbers, shown as a PNG, as HTML and in words."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

from jaxtyping import Int
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class Picture:
    """Base of the pictures. A subclass's fields are what was measured, in types that JSON has.

    Attributes:
        name: of the picture and of its PNG.
        title: heading on a page.
        shows: which checkpoints offer it, in words, for the error of one that offers none.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    shows: ClassVar[str]

    @classmethod
    def offered(cls, config: Any) -> bool:
        """Whether a checkpoint with this config has something to show."""
        raise NotImplementedError  # abstract

    @classmethod
    def measure(
        cls,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        token_ids: Int[Tensor, " n"],
        window: int,
        batch_size: int = 8,
    ) -> Self:
        """Read a token sequence, of which the first token is context only, in windows of at most `window` tokens.

        Raises ValueError for fewer than two tokens.
        """
        raise NotImplementedError  # abstract

    def summary(self) -> list[str]:
        """A few lines for a terminal."""
        raise NotImplementedError  # abstract

    def figure(self, colours: dict[str, str]) -> Figure:
        """The picture in the colours "ink", "muted", "grid", "page" and "accent" of a page."""
        raise NotImplementedError  # abstract

    def html(self) -> str:
        """What a page shows below the picture, as HTML on the page's CSS variables; "" for nothing."""
        return ""


def token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Int[Tensor, " n"]) -> list[str]:
    """The text of every token."""
    texts = {int(i): str(tokenizer.decode([int(i)])) for i in token_ids.unique()}
    return [texts[i] for i in token_ids.tolist()]

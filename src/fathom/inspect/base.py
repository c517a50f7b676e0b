"""The seam of a picture: measured by one function, kept as plain numbers, shown as a PNG, as HTML and in words."""

from __future__ import annotations

import dataclasses
import html
from itertools import takewhile
from typing import Any, ClassVar, Self

from jaxtyping import Int
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a decoder gives for the first bytes of a character
LONGEST_CHARACTER = 4  # bytes in UTF-8, so tokens at most
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | dict.fromkeys(
    range(127, 160), "\u2421"
)


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


def shaded(text: str, percent: int, title: str) -> str:
    """A token on a page: the higher `percent`, the more accent colour is behind it. The pointer shows `title`."""
    colour = f"color-mix(in srgb,var(--accent) {percent}%,transparent)"
    return f'<span style="background:{colour}" title="{title}">{html.escape(text)}</span>'


def token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Int[Tensor, " n"]) -> list[str]:
    """What every token adds to the text of those before it. A character of several tokens is the last one's, the others
    are empty; control characters, which could change a terminal or a page, are shown as the symbols of Unicode."""
    ids, texts, start, read = token_ids.tolist(), [], 0, 0
    for end in range(1, len(ids) + 1):
        known, text = (str(tokenizer.decode(ids[start:n], clean_up_tokenization_spaces=False)) for n in (read, end))
        if text.endswith(UNFINISHED) and end - read < LONGEST_CHARACTER and end < len(ids):
            texts.append("")
            continue
        # what is known may end in an unfinished character that this token completes
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, text, strict=False)))
        texts.append(text[shared:].translate(CONTROLS))
        start, read = read, end
    return texts

"""The config of training text and of its blocks: one typed, validated value."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from fathom.data.tokenizer import SCIENTIFIC

EMBEDDED = "embedded"
# GeoGalactica's shares of a domain, general text and code (arXiv 2401.00434); tables take the place of code or share.
RATIOS = {"domain": 8.0, "general": 1.0, "code": 1.0, "tables": 1.0}


@dataclass(frozen=True)
class NamedSource:
    """One text of a mixture. Its number among the sources is the domain of its blocks.

    Attributes:
        text: as `DataConfig.train` names one.
        weight: share of the blocks, relative to the other sources' weights; above 0. If no source has one, the names
            domain, general, code and tables have the weights of `RATIOS`, and sources with other names equal ones.
        max_epochs: the most passes over the text; None: as many as the weight takes.
    """

    text: str
    weight: float | None = None
    max_epochs: float | None = None


@dataclass(frozen=True)
class DataConfig:
    """Text, tokenizer and blocks of one experiment.

    `train` and `validation` each name a text: a file (`.txt`, `.md`, `.jsonl`, `.jsonl.gz`, `.jsonl.xz`, `.parquet`), a
    folder of such files, a Hugging Face data set (`name`, `name:subset`, `name@revision`), or `"embedded"`, the
    public-domain prose inside the package. A plain text file is one document, and so is a row. `validation` may be
    `None`. `train` may also be a mapping from names to sources with weights, which are mixed block by block;
    `validation` may be a mapping from names to texts, which are scored together and each by itself. The cache
    identifies files by their bytes but a data set of the hub by its name: pin its revision if it may change.
    """

    train: str | dict[str, NamedSource] = EMBEDDED
    validation: str | dict[str, str] | None = EMBEDDED
    text_field: str = "text"  # the field of JSONL, Parquet and hub rows that holds the text
    train_split: str = "train"  # splits of a hub data set
    validation_split: str = "validation"
    tokenizer: str | dict[str, int] = field(default_factory=lambda: {"bpe": 4096})  # folder, hub name or {"bpe": vocab}
    atoms: (
        tuple[str, ...] | Literal["scientific"]
    ) = ()  # one token each, wherever a text has them; model rows are added
    block_size: int = 512
    document_mask: bool = False  # position_ids that restart at every document
    keep_remainder: bool = False  # pad the last block of a text instead of dropping its tokens
    max_documents: int | None = None  # of the training text: read only so many
    max_tokens: int | None = None  # of the training text: keep only so many, in whole blocks
    max_validation_tokens: int | None = None
    streaming: bool = False  # tokenise the training text while training; nothing of it on disk
    shuffle_buffer: int = 1000  # documents, streaming only
    seed: int = 0  # document order when streaming; map-style blocks keep the text's order for the Trainer's sampler
    num_proc: int | None = None  # tokenising processes; None: one a usable core. Does not change the result

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("data.train is empty: name a file, a folder, a data set, or 'embedded'")
        if isinstance(self.train, dict):
            object.__setattr__(self, "train", _weighted(self.train))
            for name, source in self.train.items():
                for field_name, value in (("weight", source.weight), ("max_epochs", source.max_epochs)):
                    if value is not None and not 0 < value < float("inf"):
                        raise ValueError(f"data.train.{name}.{field_name}={value!r}: must be above 0")
            if self.streaming:
                raise ValueError("data.streaming=True: named sources are mixed from blocks on disk; leave it out")
        if isinstance(self.validation, dict) and not self.validation:
            raise ValueError("data.validation is empty: name texts, one text, or give null")
        if isinstance(self.tokenizer, dict):
            if set(self.tokenizer) != {"bpe"}:
                raise ValueError(
                    f"data.tokenizer={self.tokenizer!r}: give a folder, a hub name, or {{'bpe': vocabulary size}}"
                )
            # 256 bytes and the EOS token come before the first merge
            _require_at_least("tokenizer.bpe", self.tokenizer["bpe"], 257)
        elif not self.tokenizer:
            raise ValueError("data.tokenizer is empty: give a folder, a hub name, or {'bpe': vocabulary size}")
        if "" in self.atoms_named or len(set(self.atoms_named)) < len(self.atoms_named):
            raise ValueError(f"data.atoms={list(self.atoms)!r}: must not be empty texts or the same twice")
        _require_at_least("block_size", self.block_size, 2)
        _require_at_least("shuffle_buffer", self.shuffle_buffer, 1)
        if self.shuffle_buffer != type(self).shuffle_buffer and not self.streaming:
            raise ValueError(
                f"data.shuffle_buffer={self.shuffle_buffer}: blocks on disk are shuffled as a whole; leave it out, or "
                "set data.streaming"
            )
        for name, least in (
            ("max_documents", 1),
            ("max_tokens", self.block_size),
            ("max_validation_tokens", self.block_size),
            ("num_proc", 1),
        ):
            if getattr(self, name) is not None:
                _require_at_least(name, getattr(self, name), least)

    @property
    def atoms_named(self) -> tuple[str, ...]:
        """The atoms as a tuple, with named sets expanded."""
        return SCIENTIFIC if isinstance(self.atoms, str) else self.atoms


def _weighted(sources: dict[str, NamedSource]) -> dict[str, NamedSource]:
    """The sources, with default weights where none is given."""
    usual = "domain" in sources and set(sources) <= set(RATIOS) and all(s.weight is None for s in sources.values())
    weights = {name: RATIOS[name] if usual else 1.0 for name in sources}
    return {name: replace(s, weight=weights[name]) if s.weight is None else s for name, s in sources.items()}


def _require_at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"data.{name}={value!r}: needs a whole number of at least {least}")

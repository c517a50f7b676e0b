"""Data prepared from a `DataConfig`: blocks on disk or as a stream, the tokenizer, and the numbers that scores need."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import datasets
from filelock import FileLock
from transformers import PreTrainedTokenizerFast

from fathom.data.config import EMBEDDED, DataConfig
from fathom.data.mixing import MixedBlocks
from fathom.data.packing import StreamingBlocks, encode, pack, target_tokens, tokenise, too_short, write_blocks
from fathom.data.sources import Source
from fathom.data.tokenizer import add_atoms, load_tokenizer, token_byte_lengths, tokenizer_hash, train_bpe
from fathom.writing import naming

SAMPLED_CHARACTERS = 1_000_000  # of a source, to say how well a tokenizer fits it
_FORMAT = 1  # part of every cache key: raise it when the meaning of a cached file changes


@dataclass(frozen=True)
class PreparedData:
    """Blocks for the Trainer (`fathom.data.collate` batches them), and the numbers needed to score held-out text.

    bits per byte = (sum of the loss in nats over all `validation_targets`) / (ln 2 · `validation_bytes`). Targets are
    every token of a validation block but its first. EOS targets count in the loss and stand for no bytes.
    """

    train: datasets.Dataset | StreamingBlocks | MixedBlocks
    validation: datasets.Dataset | None
    tokenizer: PreTrainedTokenizerFast
    validation_targets: int
    validation_bytes: int
    examples_per_sequence: float = 1.0  # of the task, in a training block on average
    notes: tuple[str, ...] = ()  # what was done to the data that a reader of the results should know
    # of held-out texts with names: the size of each, in the order in which they lie in `validation`
    validation_parts: tuple[HeldOut, ...] = ()
    files: str = ""  # digest of what rows name and do not hold, such as pictures


class HeldOut(NamedTuple):
    """A held-out text by name."""

    name: str
    blocks: int
    targets: int
    bytes: int


def prepare(config: DataConfig, cache_dir: str | Path) -> PreparedData:
    """The texts of `config`, tokenised and packed, or loaded from `cache_dir`, whose entries are keyed by content.

    A cache entry appears by one rename when it is complete. So a killed run leaves none, and processes that start
    together (one for each GPU) wait for the first.

    Raises OSError or ValueError, naming the field, for text that is missing, unreadable, not UTF-8, empty or shorter
    than one block, and for a tokenizer that cannot be used.
    """
    cache = Path(cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    sources = {
        name: Source(text, config.train_split, config.text_field, where, config.max_documents)
        for name, text, where in named_texts(config)
    }
    held_out = {
        name: Source(text, config.validation_split, config.text_field, where)
        for name, text, where in named_held_out(config)
    }
    for text in held_out.values():
        for source in sources.values():
            require_disjoint(source, text)
    first = next(iter(sources.values()))

    def tokenizer_of(config: DataConfig) -> PreTrainedTokenizerFast:
        if not isinstance(config.train, dict):
            return make_tokenizer(config, first.documents, first.content_hash, cache)
        every = list(sources.values())
        return make_tokenizer(
            config,
            lambda: itertools.chain.from_iterable(source.documents() for source in every),
            lambda: cache_key(*(source.content_hash() for source in every)),
            cache,
        )

    tokenizer = tokenizer_of(config)

    train: datasets.Dataset | StreamingBlocks | MixedBlocks
    if isinstance(config.train, dict):
        blocks = {
            name: text_blocks(source, tokenizer, config, config.max_tokens, cache) for name, source in sources.items()
        }
        weights = {name: source.weight or 1.0 for name, source in config.train.items()}  # given, when there is a config
        caps = {name: source.max_epochs for name, source in config.train.items()}
        mixed = MixedBlocks(blocks, weights, config.seed, sum(map(len, blocks.values())))
        mixed.caps = caps  # of a whole training, whose length this order does not have
        train = mixed
    elif config.streaming:
        train = StreamingBlocks(first, tokenizer, config)
    else:
        train = text_blocks(first, tokenizer, config, config.max_tokens, cache)
    notes: tuple[str, ...] = ()
    if config.atoms:
        notes = _atoms_notes(sources, tokenizer, tokenizer_of(dataclasses.replace(config, atoms=())))
    held = [text_blocks(source, tokenizer, config, config.max_validation_tokens, cache) for source in held_out.values()]
    parts = tuple(
        HeldOut(name, len(blocks), *target_tokens(blocks, token_byte_lengths(tokenizer)))
        for name, blocks in zip(held_out, held, strict=True)
    )
    validation = None
    if held:
        validation = held[0] if len(held) == 1 else datasets.concatenate_datasets(held).with_format("torch")
    return PreparedData(
        train,
        validation,
        tokenizer,
        sum(part.targets for part in parts),
        sum(part.bytes for part in parts),
        notes=notes,
        validation_parts=parts if isinstance(config.validation, dict) else (),
    )


def _atoms_notes(
    sources: dict[str, Source], tokenizer: PreTrainedTokenizerFast, without: PreTrainedTokenizerFast
) -> tuple[str, ...]:
    """Sentences with bytes per token at the beginning of each source, with and without atoms that the
    tokenizer lacked.
    """
    added, said = len(tokenizer.get_vocab()) - len(without.get_vocab()), []
    if not added:
        return ()
    for name, source in sources.items():
        texts, room = [], SAMPLED_CHARACTERS
        for document in source.documents():
            texts.append(document[:room])
            room -= len(texts[-1])
            if not room:
                break
        size = sum(len(text.encode()) for text in texts)
        rates = [size / max(1, sum(map(len, encode(texts, one)))) for one in (tokenizer, without)]
        said.append(f"{name} {rates[0]:.3f}, without them {rates[1]:.3f}")
    return (f"Atoms: {added} tokens were added. Bytes a token: {'; '.join(said)}.",)


def named_texts(config: DataConfig) -> list[tuple[str, str, str]]:
    """(name, text, place in the recipe) of every training source."""
    if isinstance(config.train, str):
        return [("train", config.train, "data.train")]
    return [(name, source.text, f"data.train.{name}.text") for name, source in config.train.items()]


def named_held_out(config: DataConfig) -> list[tuple[str, str, str]]:
    """(name, text, place in the recipe) of every held-out text."""
    if config.validation is None:
        return []
    if isinstance(config.validation, str):
        return [("validation", config.validation, "data.validation")]
    return [(name, text, f"data.validation.{name}") for name, text in config.validation.items()]


def make_tokenizer(
    config: DataConfig, documents: Callable[[], Iterable[str]], content_hash: Callable[[], str], cache: Path
) -> PreTrainedTokenizerFast:
    """The config's tokenizer with its atoms. A new BPE learns from `documents`; `content_hash` is their digest."""
    if isinstance(config.tokenizer, str):
        tokenizer = load_tokenizer(config.tokenizer)
    else:
        vocab_size = config.tokenizer["bpe"]
        folder = cache / f"tokenizer-{cache_key('bpe', vocab_size, content_hash())}"
        build_once(folder, lambda work: train_bpe(documents(), vocab_size).save_pretrained(work))
        tokenizer = load_tokenizer(str(folder))
    add_atoms(tokenizer, config.atoms_named)
    return tokenizer


def text_blocks(
    source: Source, tokenizer: PreTrainedTokenizerFast, config: DataConfig, max_tokens: int | None, cache: Path
) -> datasets.Dataset:
    """Blocks of running text, made once: the documents concatenated and cut."""
    options = [config.block_size, config.document_mask, config.keep_remainder, max_tokens]
    folder = cache / f"blocks-{cache_key(source.content_hash(), tokenizer_hash(tokenizer), options)}"

    def build(work: Path) -> None:
        scratch = work / "scratch"
        scratch.mkdir()
        columns = pack(tokenise(source, tokenizer, scratch, config.num_proc), config, tokenizer.eos_token_id)
        if not write_blocks(columns, work / "blocks.arrow", max_tokens and max_tokens // config.block_size):
            raise too_short(source, config.block_size)
        shutil.rmtree(scratch, ignore_errors=True)  # a network file system keeps files that are still mapped

    build_once(folder, build)
    return datasets.Dataset.from_file(str(folder / "blocks.arrow")).with_format("torch")


def build_once(folder: Path, build: Callable[[Path], object]) -> None:
    """Let `build` fill a temporary folder, then rename it to `folder`. Does nothing if `folder` exists."""
    with FileLock(f"{folder}.lock"):
        if folder.exists():
            return
        work = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(work, ignore_errors=True)  # what a killed run left: the lock says that nobody works on it
        work.mkdir()
        try:
            with naming(work):
                build(work)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        os.replace(work, folder)


def require_disjoint(train: Source, validation: Source) -> None:
    """Raise ValueError for a file that is both trained on and held out."""
    if train.name == validation.name == EMBEDDED:
        return
    shared = {file.resolve() for file in train.files()} & {file.resolve() for file in validation.files()}
    if shared:
        raise ValueError(
            f"data.validation={validation.name!r}: {min(shared)} is also in data.train; "
            "held-out text must not be trained on"
        )


def cache_key(*parts: object) -> str:
    """The name of a cache entry, which differs for other parts and after a change of format."""
    return hashlib.sha256(json.dumps([_FORMAT, *parts]).encode()).hexdigest()[:32]

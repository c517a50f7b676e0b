"""Text to token ids: any Hugging Face tokenizer, or a byte-level BPE trained on the spot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Int
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fathom.models.local_paths import refuse_absent

EOS = "<|endoftext|>"
# What Galactica (arXiv 2211.09085) and the papers that `fathom curate` writes mark parts of a text with.
SCIENTIFIC = (
    *(f"[{side}_{part}]" for part in ("REF", "FIGURE", "TABLE", "FORMULA", "NOTE") for side in ("START", "END")),
    *(f"[{side}_{part}]" for part in ("DNA", "AMINO", "SMILES", "I_SMILES") for side in ("START", "END")),
    "<work>",
    "</work>",
)
BPE_TRAINING_CHARACTERS = 100_000_000  # merges of a longer text barely change; its beginning stands for it


def train_bpe(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE (GPT-2's splitting rule) of at most `vocab_size` tokens.

    Id 0 is the EOS token `<|endoftext|>`, which also pads, on the left.

    Deterministic: the same documents give the same merges. Learns from the first `BPE_TRAINING_CHARACTERS` characters.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginning(documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        padding_side="left",  # what `generate` needs of a batch
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer in a folder or under a hub name.

    Raises FileNotFoundError for a path that is not there; ValueError for no tokenizer, or one without EOS token.
    """
    refuse_absent(name, f"data.tokenizer={name!r}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the hub and the many tokenizer formats raise a wide range of types
        raise ValueError(f"data.tokenizer={name!r}: no tokenizer could be loaded ({error})") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"data.tokenizer={name!r}: has no tokenizer.json form (a fast tokenizer), which Fathom needs")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"data.tokenizer={name!r}: has no EOS token; set eos_token in its tokenizer_config.json")
    return tokenizer


def add_atoms(tokenizer: PreTrainedTokenizerFast, atoms: Iterable[str]) -> int:
    """Make each of `atoms` one token wherever it stands in a text. Returns the number of added tokens.

    They are ordinary tokens, not special ones: `fathom.data` splits special tokens that are written out in a text, and
    decoding would leave them out. Raises ValueError for an atom that the tokenizer still splits.
    """
    atoms = list(atoms)
    added = tokenizer.add_tokens([AddedToken(atom, normalized=False, special=False) for atom in atoms])
    for atom in atoms:
        index: Any = tokenizer.convert_tokens_to_ids(atom)
        ids = tokenizer(f"a{atom} b", add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if ids.count(index) != 1 or tokenizer.decode([index], skip_special_tokens=True) != atom:
            raise ValueError(
                f"data.atoms: {atom!r} does not stay one token in a text; is it a special token of the tokenizer, or "
                "part of another atom?"
            )
    return added


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, checkpoint: str = "the checkpoint") -> None:
    """Raise ValueError unless every token id has a row in an embedding table of `vocab_size` rows."""
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > vocab_size:
        raise ValueError(
            f"data.tokenizer: its {needed} token ids do not fit {checkpoint}, whose vocab_size is {vocab_size}: "
            "use the tokenizer saved with the checkpoint"
        )


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """Hex digest of everything that decides the token ids."""
    key = [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()


def is_byte_level(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether a token is a string of bytes written in GPT-2's alphabet of 256 characters."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    return any(kind == "ByteLevel" for part in ("pre_tokenizer", "decoder") for kind in _kinds(backend[part]))


def token_byte_lengths(tokenizer: PreTrainedTokenizerFast) -> Int[Tensor, " vocab"]:
    """The number of bytes of UTF-8 text of each token id; 0 for special tokens and ids without a token.

    Exact for byte-level BPE (GPT-2, Pythia, Llama 3, Qwen, `train_bpe`) and for SentencePiece-style BPE with byte
    fallback, where ▁ stands for a space. "Text" is what the tokenizer reads: after its normaliser (Qwen's NFC), with
    the space that some (Llama 2) put before a document. Raises ValueError for a tokenizer that can lose bytes
    (WordPiece, or SentencePiece without fallback).
    """
    byte_level = is_byte_level(tokenizer)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if not byte_level and not model.get("byte_fallback"):
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path!r} is neither byte-level nor has it byte fallback "
            f"(model {model['type']}): some text becomes the unknown token, so bytes per token are not known; "
            "use a byte-level tokenizer"
        )
    added = tokenizer.added_tokens_decoder
    vocabulary = tokenizer.get_vocab()
    lengths = torch.zeros(max(vocabulary.values()) + 1, dtype=torch.int64)
    for token, index in vocabulary.items():
        if index in added and added[index].special:
            lengths[index] = 0
        elif byte_level:  # GPT-2's alphabet has one character a byte; added tokens are plain text
            lengths[index] = len(token.encode()) if index in added else len(token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            lengths[index] = 1
        else:  # Gemma lists runs of ▁ among its added tokens too
            lengths[index] = len(token.replace("▁", " ").encode())
    return lengths


def _kinds(part: dict | None) -> Iterator[str]:
    """Type names of a tokenizer.json component and of those inside a Sequence."""
    if part:
        yield part["type"]
        for inner in [*part.get("pretokenizers", []), *part.get("decoders", [])]:
            yield from _kinds(inner)


def _beginning(documents: Iterable[str]) -> Iterator[str]:
    left = BPE_TRAINING_CHARACTERS
    for document in documents:
        yield document[:left]
        left -= len(document)
        if left <= 0:
            return

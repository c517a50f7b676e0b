"""Which row of an embedding table is which token, in a spelling that two tokenizers share.

Byte-level BPE writes a leading space as `Ġ` and every byte as a printable character; SentencePiece writes `▁` and raw
bytes as `<0x41>`. Both are decoded to the UTF-8 bytes that the token stands for, so that `Ġthe` and `▁the` meet.
"""

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path

from fathom.lineage.errors import CheckpointError
from fathom.lineage.store import GGUFStore

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 bytes keep their character, the rest follow from code point
    256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


_ALPHABET = _byte_alphabet()
_STAND_IN = {b: c for c, b in _ALPHABET.items()}


def token_bytes(piece: str, byte_level: bool) -> bytes:
    """The bytes one vocabulary entry stands for."""
    if byte_level:
        plain = piece.replace("Ġ", " ")
        if plain.isascii():  # most entries: every other ASCII character stands for itself
            return plain.encode()
        # Added tokens (<|im_end|>) are plain text inside a byte-level vocabulary; so is what holds any other character.
        try:
            return bytes(map(_ALPHABET.__getitem__, piece))
        except KeyError:
            return piece.encode("utf-8", "surrogatepass")
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace("▁", " ").encode("utf-8", "surrogatepass")


def spelled(token: bytes) -> str:
    """The byte-level spelling of any token: the inverse of `token_bytes(…, byte_level=True)`."""
    return "".join(_STAND_IN[b] for b in token)


def normalise(pieces: Mapping[str, int]) -> dict[bytes, int]:
    """{piece: id} → {bytes: id}. A whole piece wins over a `<0xNN>` byte piece with the same meaning."""
    byte_level = "Ġ" in pieces or sum(p.startswith("Ġ") for p in pieces) > len(pieces) // 100
    table: dict[bytes, int] = {}
    for piece, index in pieces.items():
        key = token_bytes(piece, byte_level)
        if key not in table or not _BYTE_PIECE.fullmatch(piece):
            table[key] = index
    return table


def read_vocabulary(folder: Path) -> dict[bytes, int] | None:
    """Token bytes → row of the embedding table, from the tokenizer files of a folder; None when there are none.

    Reads tokenizer.json (BPE, WordPiece, Unigram; added tokens included), vocab.json, tokenizer.model, *.tiktoken.
    Raises CheckpointError when a file is none of these.
    """
    try:
        return _vocabulary(folder)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder}: its tokenizer files cannot be read ({error!r}); restore them, or remove them to match tokens by"
            " their number"
        ) from error


def _vocabulary(folder: Path) -> dict[bytes, int] | None:
    if (file := folder / "tokenizer.json").is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        pieces = dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
        pieces |= {t["content"]: t["id"] for t in content.get("added_tokens", ())}
        return normalise(pieces)
    if (file := folder / "vocab.json").is_file():
        return normalise(json.loads(file.read_text(encoding="utf-8")))
    if (file := folder / "tokenizer.model").is_file():
        try:
            import sentencepiece
        except ImportError:
            return None
        model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        return normalise({model.id_to_piece(i): i for i in range(model.get_piece_size())})
    if files := sorted(folder.glob("*.tiktoken")):
        lines = (line.split() for line in files[0].read_bytes().splitlines() if line)
        return {base64.b64decode(token): int(rank) for token, rank in lines}
    return None


def gguf_vocabulary(store: GGUFStore) -> dict[bytes, int] | None:
    """The vocabulary inside a GGUF file, or None."""
    tokens = store.metadata("tokenizer.ggml.tokens")
    return None if tokens is None else normalise({t: i for i, t in reversed(list(enumerate(tokens)))})


def shared_rows(
    a: Mapping[bytes, int] | None, b: Mapping[bytes, int] | None, rows_a: int, rows_b: int
) -> tuple[list[int], list[int]]:
    """Rows of the same token in two embedding tables, ordered by the row in a; ids beyond a table are left out.

    Without any tokenizer on one side, rows are matched by id as far as both tables go (the caller should say so).
    """
    if a is None or b is None:
        same = list(range(min(rows_a, rows_b)))
        return same, same
    if a == b:  # one tokenizer
        same = sorted(i for i in a.values() if i < min(rows_a, rows_b))
        return same, same
    pairs = sorted((i, b[t]) for t, i in a.items() if t in b and i < rows_a and b[t] < rows_b)
    return [i for i, _ in pairs], [j for _, j in pairs]

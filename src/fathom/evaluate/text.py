"""Loss of a text under any causal language model: perplexity and bits per byte with a sliding window.

    perplexity = exp(nats / tokens)        bits per byte = nats / (ln 2 · bytes)

Windows of W tokens slide by S ≤ W over the sequence. The first window scores its W targets, every later one only the
targets that no earlier window has scored, at most S. So each token is scored once, and after the first window with at
least W − S tokens of context. The last window is moved back to end with the text, so that it is full, too.

The text is preceded by the tokenizer's BOS token, or by its EOS token if it has no BOS (lm_eval's convention and, for
models trained on documents separated by EOS, what they have seen), so that the first token of the text is scored too.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fathom.data import token_byte_lengths
from fathom.data.packing import encode
from fathom.data.sources import Source, decode, is_table
from fathom.diffusion.base import is_diffusion
from fathom.evaluate.bound import DRAWS, text_bound


@dataclasses.dataclass(frozen=True)
class TextScore:
    """The loss of one text, or of several together.

    Attributes:
        nats: −Σ log p over the scored tokens.
        tokens: scored tokens: all of the text's.
        bytes: UTF-8 bytes of the text.
        window, stride: W and S.
        documents: number of texts, each scored by itself.
    """

    nats: float
    tokens: int
    bytes: int
    window: int
    stride: int
    documents: int = 1

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return bits_per_byte(self.nats, self.bytes)


@dataclasses.dataclass(frozen=True)
class TextBound(TextScore):
    """An upper bound on a text's loss under a diffusion model, by Monte Carlo with `draws` forward passes a window.

    nats_error: standard error of `nats`.
    """

    nats_error: float = 0.0
    draws: int = DRAWS

    @property
    def bits_per_byte_error(self) -> float:
        return bits_per_byte(self.nats_error, self.bytes)


def bits_per_byte(nats: float, bytes: int) -> float:
    """nats / (ln 2 · bytes): comparable between tokenizers, unlike perplexity."""
    return nats / (math.log(2) * bytes)


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, without a byte-order mark.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: it is empty, not UTF-8 or has NUL bytes (the message says at which byte and line).
    """
    text = decode(Path(path).read_bytes(), path)
    if not text.strip():
        raise ValueError(f"{path}: holds no text")
    return text


def read_documents(path: str | Path) -> list[str]:
    """The documents of a folder or of a `.jsonl`, `.jsonl.gz`, `.jsonl.xz` or `.parquet` file, read as training reads
    them (`fathom.data`); any other file is one document. Raises OSError and ValueError as `read_text` does."""
    path = Path(path)
    if path.is_dir():  # with a slash it is a path, whatever it is called
        documents = list(Source(f"{path}/", argument="--text").documents())
    elif path.is_file() and is_table(path):
        documents = list(Source(str(path), argument="--text").documents())
    else:
        return [read_text(path)]
    if not documents:
        raise ValueError(f"{path}: holds no text")
    return documents


def evaluate_text(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Sequence[str],
    window: int = 1024,
    stride: int | None = None,
    batch_size: int = 8,
) -> TextScore:
    """Score `text` with a sliding window (this module's docstring says how, and what precedes the text).

    Several texts are scored one by one, and the loss is that of all their tokens. For a diffusion model the score is a
    `TextBound` over the same windows and targets.

    Special tokens written out in the text ("<|endoftext|>") are read as ordinary characters.

    Args:
        window: W; longer than the model's positions, it is cut to them.
        stride: S; None is W // 2.

    Raises:
        ValueError: no text; a tokenizer with neither BOS nor EOS, or one that loses bytes (an unknown token); window,
            stride or batch_size out of range.
    """
    texts = [text] if isinstance(text, str) else text
    if not texts or not all(texts):
        raise ValueError("text is empty: give at least one character")
    token_byte_lengths(tokenizer)  # type: ignore[arg-type]  # refuses a tokenizer that can lose bytes
    window = min(window, positions(model) or window)
    stride = max(1, window // 2) if stride is None else stride
    if is_diffusion(model):
        return _bound(model, [with_prefix(tokenizer, one) for one in texts], texts, window, stride, batch_size)
    nats, tokens = 0.0, 0
    for one in texts:
        its_nats, its_tokens = text_loss(model, with_prefix(tokenizer, one), window, stride, batch_size)
        nats, tokens = nats + its_nats, tokens + its_tokens
    return TextScore(nats, tokens, sum(len(one.encode()) for one in texts), window, stride, len(texts))


def _bound(
    model: Any, sequences: list[Tensor], texts: Sequence[str], window: int, stride: int, batch_size: int
) -> TextBound:
    """The score of a diffusion model."""
    nats = variance = 0.0
    for ids in sequences:
        seen = min(window, len(ids) - 1)
        spans = list(scored_spans(len(ids) - 1, seen, stride))
        its_nats, its_variance = text_bound(model, ids, spans, seen, batch_size)
        nats, variance = nats + its_nats, variance + its_variance
    tokens, size = sum(len(ids) - 1 for ids in sequences), sum(len(one.encode()) for one in texts)
    return TextBound(nats, tokens, size, window, stride, len(texts), math.sqrt(variance))


def with_prefix(tokenizer: PreTrainedTokenizerBase, text: str) -> Int[Tensor, " n"]:
    """The text's tokens after BOS, or EOS if there is no BOS. Raises ValueError if there is neither."""
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if prefix is None:
        raise ValueError("the tokenizer has neither a BOS nor an EOS token to put before the text; set one of them")
    return torch.tensor([prefix, *encode([text], tokenizer)[0]])  # type: ignore[arg-type]


@torch.no_grad()
def text_loss(
    model: Any, token_ids: Sequence[int] | Int[Tensor, " n"], window: int, stride: int, batch_size: int = 8
) -> tuple[float, int]:
    """(−Σ log p in nats, number of scored tokens) of a token sequence under a causal language model of transformers.

    The first token is context only; every other one is scored once, as this module's docstring says. Log-probabilities
    in fp32 or wider, their sum in float64. The model is put in eval mode meanwhile.

    Args:
        window: W, tokens that the model reads at once.
        stride: S, tokens by which the window moves.
        batch_size: windows in a batch.

    Raises:
        ValueError: fewer than two tokens; not 1 ≤ stride ≤ window ≤ the model's positions; batch_size below 1.
    """
    if is_diffusion(model):
        raise ValueError(f"{type(model).__name__} has no exact loss of a text; evaluate_text gives an upper bound")
    ids = torch.as_tensor(token_ids, dtype=torch.int64)
    if len(ids) < 2:
        raise ValueError(f"token_ids has {len(ids)} tokens: at least 2 are needed, the first is context only")
    limit = positions(model)
    if window < 1 or (limit is not None and window > limit):
        raise ValueError(f"window={window}: must be at least 1 and at most the model's {limit} positions")
    if not 1 <= stride <= window:
        raise ValueError(f"stride={stride}: must be at least 1 and at most window={window}")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: must be at least 1")

    inputs, targets = ids[:-1].to(model.device), ids[1:].to(model.device)
    window = min(window, len(inputs))
    spans = list(scored_spans(len(inputs), window, stride))
    keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
    nats, training = 0.0, model.training
    model.eval()
    try:
        for at in range(0, len(spans), batch_size):
            batch = spans[at : at + batch_size]
            keep = max(stop - start for start, stop in batch)
            rows = torch.stack([inputs[stop - window : stop] for _, stop in batch])
            logits = model(rows, use_cache=False, **({"logits_to_keep": keep} if keeps_logits else {})).logits
            wide = torch.promote_types(logits.dtype, torch.float32)
            for row, (start, stop) in zip(logits, batch, strict=True):
                scored = row[-(stop - start) :].to(wide)
                nats += float(F.cross_entropy(scored, targets[start:stop], reduction="none").double().sum())
    finally:
        model.train(training)
    return nats, len(targets)


def scored_spans(length: int, window: int, stride: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the positions that each window scores; the window itself is [stop − window, stop)."""
    yield 0, window
    for start in range(window, length, stride):
        yield start, min(start + stride, length)


def positions(model: Any) -> int | None:
    """The most tokens that a model was made for; None where its config does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)

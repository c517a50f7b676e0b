"""Which background sentences a description may need: the retrievers of CTRLSciTab (arXiv 2312.05402).

    tsdae           cos(enc(q), enc(q <BKG> s)), an encoder trained by denoising (arXiv 2104.06979)
    tfidf           cosine of TF-IDF vectors without stop words, fitted on a record's own sentences
    cross_encoder   logits of [CLS] q [SEP] s [SEP]; evidence is the sentence nearest to the reference by TF-IDF (ours)
    random, oracle  by chance, and by TF-IDF with the reference as the query: what others are compared with

TSDAE deletes 60 % of a text's tokens, encodes the rest into the vector at [CLS], and decodes the text from that vector
alone, with a decoder that shares the encoder's weights.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from fathom.tables.text.ctrlscitab import BACKGROUND_MARK, query
from fathom.tables.text.encoder import batch, load_encoder, special
from fathom.tables.text.linearize import STOP_WORDS, Grid, words
from fathom.tables.text.stages import Stage, train

DELETED = 0.6
TOKENS = 512
NEGATIVES = 3


class Retriever:
    """Base: `scores` of sentences for a query."""

    dropped = 0  # training strings that are held-out texts, and were left out

    def scores(self, asked: str, sentences: Sequence[str]) -> list[float]:
        raise NotImplementedError  # abstract

    def top(self, asked: str, sentences: Sequence[str], count: int) -> list[str]:
        """The best sentences, best first, none twice; equal scores keep the text's order."""
        sentences = list(dict.fromkeys(sentences))
        if not sentences:
            return []
        found = self.scores(asked, sentences)
        order = sorted(range(len(sentences)), key=lambda i: -found[i])
        return [sentences[i] for i in order[:count]]


class TfIdf(Retriever):
    """idf = ln((1 + n) / (1 + df)) + 1 over a record's sentences; words of the query that none of them has count
    nothing."""

    def scores(self, asked, sentences):
        bags = [Counter(word for word in words(text) if word not in STOP_WORDS) for text in sentences]
        df = Counter(word for bag in bags for word in bag)
        idf = {word: math.log((1 + len(bags)) / (1 + count)) + 1 for word, count in df.items()}
        wanted = Counter(word for word in words(asked) if word in idf)

        def norm(bag: Counter[str]) -> float:
            return math.sqrt(math.fsum((count * idf[word]) ** 2 for word, count in bag.items())) or 1.0

        return [
            math.fsum(wanted[word] * count * idf[word] ** 2 for word, count in bag.items()) / norm(bag) / norm(wanted)
            for bag in bags
        ]


class Random(Retriever):
    """By chance; the same query finds the same sentences."""

    def __init__(self, seed: int = 0):
        self.seed = seed

    def scores(self, asked, sentences):
        return [zlib.crc32(f"{self.seed}\t{asked}\t{text}".encode()) / 2**32 for text in sentences]


class TSDAE(nn.Module, Retriever):
    """model: folder or hub name of a BERT, or the config of a new one; None: a small one from scratch."""

    def __init__(
        self, model: str | PreTrainedConfig | None = None, tokenizer: Any = None, deleted: float = DELETED,
        seed: int = 0, **small: int,
    ):  # fmt: skip
        super().__init__()
        if not 0 <= deleted < 1:
            raise ValueError(f"deleted={deleted!r}: use a share in [0, 1)")
        self.encoder, self.tokenizer = load_encoder(model, tokenizer, TOKENS, seed, **small)
        config = type(self.encoder.config).from_dict(self.encoder.config.to_dict())
        config.is_decoder, config.add_cross_attention, config.use_cache = True, True, False
        self.decoder: Any = AutoModelForCausalLM.from_config(config)
        tie(self.encoder, self.decoder.base_model)
        self.decoder.tie_weights()
        self.deleted = deleted
        self.draw = torch.Generator().manual_seed(seed)

    def ids(self, text: str) -> list[int]:
        found = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][: TOKENS - 2]
        return [special(self.tokenizer, "cls", "bos"), *found, special(self.tokenizer, "sep")]

    def corrupted(self, ids: Sequence[int]) -> list[int]:
        """Without a share of its tokens; the first and last stay, and one between them."""
        inner = ids[1:-1]
        keep = torch.rand(len(inner), generator=self.draw) >= self.deleted
        if len(inner) and not keep.any():
            keep[int(torch.randint(len(inner), (), generator=self.draw))] = True
        return [ids[0], *(token for token, kept in zip(inner, keep.tolist(), strict=True) if kept), ids[-1]]

    def encode(self, rows: Sequence[Sequence[int]]) -> Float[Tensor, "B d"]:
        given = batch(rows, special(self.tokenizer, "pad"))
        given = {name: value.to(self.encoder.device) for name, value in given.items()}
        return self.encoder(**given).last_hidden_state[:, 0]

    def reconstruction(self, vectors: Float[Tensor, "B d"], rows: Sequence[Sequence[int]]) -> Float[Tensor, ""]:
        """Cross-entropy of the rows' tokens, each of which sees those before it and the vector."""
        given = {name: value.to(vectors.device) for name, value in batch(rows, special(self.tokenizer, "pad")).items()}
        ids: Int[Tensor, "B T"] = given["input_ids"]
        labels = ids.masked_fill(given["attention_mask"] == 0, -100)[:, 1:]
        out = self.decoder(
            input_ids=ids[:, :-1],
            attention_mask=given["attention_mask"][:, :-1],
            encoder_hidden_states=vectors[:, None],
        )
        return F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def loss(self, texts: list[str]) -> Tensor:
        rows = [self.ids(text) for text in texts]
        return self.reconstruction(self.encode([self.corrupted(row) for row in rows]), rows)

    def fit(self, texts: Sequence[str], stage: Stage) -> list[float]:
        return train(self, texts, self.loss, stage)

    @torch.no_grad()
    def scores(self, asked, sentences):
        was = self.training
        self.eval()
        wanted = self.encode([self.ids(asked)])
        found = [self.encode([self.ids(f"{asked} {BACKGROUND_MARK} {text}")]) for text in sentences]
        self.train(was)
        return F.cosine_similarity(wanted, torch.cat(found)).tolist()


class CrossEncoder(nn.Module, Retriever):
    """CLS → linear → linear → 2 logits of "evidence" and "none", as in FinQA."""

    def __init__(self, model: str | PreTrainedConfig | None = None, tokenizer: Any = None, seed: int = 0, **small: int):
        super().__init__()
        self.encoder, self.tokenizer = load_encoder(model, tokenizer, TOKENS, seed, **small)
        width = self.encoder.config.hidden_size
        self.head = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2))

    def forward(self, asked: str, sentences: Sequence[str]) -> Float[Tensor, "n 2"]:
        def ids(text: str) -> list[int]:
            return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

        first = [special(self.tokenizer, "cls", "bos"), *ids(asked)[: TOKENS // 2], special(self.tokenizer, "sep")]
        seconds = [[*ids(text)[: TOKENS // 2 - 3], special(self.tokenizer, "sep")] for text in sentences]
        given = batch(
            [[*first, *second] for second in seconds], special(self.tokenizer, "pad"),
            [[0] * len(first) + [1] * len(second) for second in seconds],
        )  # fmt: skip
        given = {name: value.to(self.encoder.device) for name, value in given.items()}
        return self.head(self.encoder(**given).last_hidden_state[:, 0])

    def fit(self, examples: Sequence[tuple[str, str, Sequence[str]]], stage: Stage) -> list[float]:
        """Losses; examples are (query, evidence, other sentences), of which three are drawn."""
        draw = torch.Generator().manual_seed(stage.seed)

        def loss(some: list[tuple[str, str, Sequence[str]]]) -> Tensor:
            losses = []
            for asked, evidence, others in some:
                chosen = [others[i] for i in torch.randperm(len(others), generator=draw)[:NEGATIVES].tolist()]
                labels = torch.tensor([1] + [0] * len(chosen), device=self.encoder.device)
                losses.append(F.cross_entropy(self(asked, [evidence, *chosen]), labels))
            return torch.stack(losses).mean()

        return train(self, examples, loss, stage)

    @torch.no_grad()
    def scores(self, asked, sentences):
        was = self.training
        self.eval()
        logits = torch.cat([self(asked, [text]) for text in sentences])
        self.train(was)
        return (logits[:, 1] - logits[:, 0]).tolist()


def tie(encoder: nn.Module, decoder: nn.Module) -> None:
    """The decoder's parameters become the encoder's, wherever it has one of the name."""
    for path, module in encoder.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(decoder.get_submodule(path), name, parameter)


def digest(text: str) -> str:
    """The hash of a text's words."""
    return hashlib.sha256(" ".join(words(text)).encode()).hexdigest()


def strings(grids: Sequence[Grid], references: Sequence[str], held_out: Iterable[str] = ()) -> tuple[list[str], int]:
    """What TSDAE learns from: `query <BKG> sentence` of every sentence and of the reference; and how many were left out
    because their sentence is, by its hash, a text of `held_out`."""
    barred, found, dropped = {digest(text) for text in held_out}, [], 0
    for grid, reference in zip(grids, references, strict=True):
        asked = query(grid)
        for text in (*grid.background, reference):
            if digest(text) in barred:
                dropped += 1
            else:
                found.append(f"{asked} {BACKGROUND_MARK} {text}")
    return found, dropped


def make_retriever(
    kind: str, grids: Sequence[Grid], references: Sequence[str], tokenizer: Any, model: str | None = None,
    steps: int = 1000, query_for_train: str = "plain", held_out: Iterable[str] = (), seed: int = 0,
) -> Retriever:  # fmt: skip
    """A retriever, trained on these tables where it learns. Raises ValueError for an unknown one.

    held_out: texts that must not train it, found by their hashes.
    """
    if kind in ("tfidf", "oracle"):
        return TfIdf()
    if kind == "random":
        return Random(seed)
    texts, dropped = strings(grids, references, held_out)
    rate = 3e-5 if model is not None else 5e-4
    if kind == "tsdae":
        tsdae = TSDAE(model, tokenizer, seed=seed)
        tsdae.fit(texts, Stage(steps=steps, batch_size=8, lr=rate, schedule="constant", seed=seed))
        tsdae.dropped = dropped
        return tsdae
    if kind == "cross_encoder":
        barred = {digest(text) for text in held_out}
        examples = []
        for grid, reference in zip(grids, references, strict=True):
            known = [text for text in grid.background if digest(text) not in barred]
            if len(known) > 1:
                evidence = TfIdf().top(reference, known, 1)[0]
                asked = query(grid, reference if query_for_train == "oracle" else None)
                examples.append((asked, evidence, [text for text in known if text != evidence]))
        cross = CrossEncoder(model, tokenizer, seed=seed)
        cross.fit(examples, Stage(steps=steps, batch_size=4, lr=rate, seed=seed))
        cross.dropped = dropped
        return cross
    raise ValueError(f"retriever={kind!r}: use tsdae, tfidf, cross_encoder, random or oracle")

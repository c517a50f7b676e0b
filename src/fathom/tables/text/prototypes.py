"""Prototypes: sentences of an unlabelled corpus that look like the description of a table (P2G, arXiv 2108.12516).

    candidates    the 100 sentences nearest to the table's words, by BM25
    s(T, c)       linear(encoder([CLS] table [SEP] sentence [SEP]) at [CLS])
    L             mean_n max(0, δ − s(T, y) + s(T, c_n)),   c_n: five of the best fifty candidates

The first twenty candidates are sorted by s, and the generator reads the first three.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from fathom.data.bm25 import load_bm25s
from fathom.tables.text.encoder import batch, load_encoder, special
from fathom.tables.text.linearize import END, SEPARATOR, Table, plain_ids, words
from fathom.tables.text.stages import Stage, train

NEGATIVES, FROM, RERANKED = 5, 50, 20


class Candidates:
    """The sentences of a corpus, for tables. Sentences that come again are one."""

    def __init__(self, corpus: Iterable[str]):
        self.texts = list(dict.fromkeys(text.strip() for text in corpus if text.strip()))
        if not self.texts:
            raise ValueError("corpus=[]: prototypes are sentences of it; give at least one")
        try:
            bm25s = load_bm25s()
        except ImportError as error:
            raise ImportError("prototypes are found by bm25s: pip install 'fathom-lm[tables]'") from error
        self.known = {word for text in self.texts for word in words(text)}
        self.index = bm25s.BM25()
        self.index.index([words(text) or [""] for text in self.texts], show_progress=False)

    def find(self, table: Table, count: int = 100, without: Sequence[str] = ()) -> list[str]:
        """The `count` sentences with the highest BM25 of the values' words, ties in the corpus's order.

        without: sentences that are not to be found, such as the table's own references.
        """
        asked = [word for value in table.values for word in words(value) if word in self.known]
        scores = self.index.get_scores(asked) if asked else np.zeros(len(self.texts))
        barred = set(without)
        order = np.argsort(-scores, kind="stable")
        return [self.texts[i] for i in order[: count + len(barred)] if self.texts[i] not in barred][:count]


class PrototypeSelector(nn.Module):
    """s(T, c): how much a sentence looks like the description of a table.

    model: folder or hub name of a BERT or RoBERTa, or the config of a new one; None: a small one from scratch.
    dropped: keys that are left out of the table.
    margin: δ of the loss.
    """

    table_tokens, sentence_tokens = 250, 80

    def __init__(
        self, model: str | PreTrainedConfig | None = None, tokenizer: Any = None, dropped: Sequence[str] = (),
        margin: float = 0.05, seed: int = 0, **small: int,
    ):  # fmt: skip
        super().__init__()
        positions = self.table_tokens + self.sentence_tokens + 3
        self.encoder, self.tokenizer = load_encoder(model, tokenizer, positions, seed, **small)
        self.score = nn.Linear(self.encoder.config.hidden_size, 1)
        nn.init.xavier_uniform_(self.score.weight)
        nn.init.zeros_(self.score.bias)
        self.dropped, self.margin = frozenset(dropped), margin

    def rows(self, table: Table, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Ids and segments of `[CLS] table [SEP] sentence [SEP]`, one row for each sentence."""
        slots = [slot for slot in table.slots if slot[0] not in self.dropped]
        start, end = special(self.tokenizer, "cls", "bos"), special(self.tokenizer, "sep")

        said = []
        for number, (key, value) in enumerate(slots):  # a marker in a key or value is text like any other
            for text, marker in ((f" {key} " if number else f"{key} ", SEPARATOR), (f" {value} ", END)):
                said += [
                    *plain_ids(self.tokenizer, text),
                    *self.tokenizer(marker, add_special_tokens=False)["input_ids"],
                ]
        first = [start, *said[: self.table_tokens], end]
        found = []
        for text in texts:
            second = [*plain_ids(self.tokenizer, text)[: self.sentence_tokens], end]
            found.append(([*first, *second], [0] * len(first) + [1] * len(second)))
        return found

    def forward(self, table: Table, texts: Sequence[str]) -> Tensor:
        """s(T, c) of every sentence [n]."""
        ids, segments = zip(*self.rows(table, texts), strict=True)
        given = batch(ids, special(self.tokenizer, "pad"), segments)
        given = {name: value.to(self.score.weight.device) for name, value in given.items()}
        return self.score(self.encoder(**given).last_hidden_state[:, 0]).squeeze(-1)

    def loss(self, table: Table, reference: str, negatives: Sequence[str]) -> Tensor:
        scores = self(table, [reference, *negatives])
        return (self.margin - scores[0] + scores[1:]).clamp(min=0).mean()

    def fit(self, examples: Sequence[tuple[Table, str, Sequence[str]]], stage: Stage) -> list[float]:
        """Losses. Examples are (table, reference, candidates, best first); tables without any kept key are skipped."""
        usable = [one for one in examples if set(one[0].keys) - self.dropped and one[2]]
        draw = torch.Generator().manual_seed(stage.seed)

        def loss(some: list[tuple[Table, str, Sequence[str]]]) -> Tensor:
            total = []
            for table, reference, found in some:
                pool = found[:FROM]
                chosen = torch.randperm(len(pool), generator=draw)[:NEGATIVES].tolist()
                total.append(self.loss(table, reference, [pool[i] for i in chosen]))
            return torch.stack(total).mean()

        return train(self, usable, loss, stage)

    @torch.no_grad()
    def rank(self, table: Table, found: Sequence[str]) -> list[str]:
        """The first twenty candidates, best first; ties keep their order."""
        pool = list(found[:RERANKED])
        if not pool:
            return []
        was = self.training
        self.eval()
        order = torch.argsort(self(table, pool), descending=True, stable=True).tolist()
        self.train(was)
        return [pool[i] for i in order]

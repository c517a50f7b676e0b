"""Levels two and three of the quality control (Innovator, arXiv 2507.18671): filters by models.

    perplexity   exp(−1/n Σ log p(token | those before it)) lies in a band: neither boilerplate nor noise
    classes      a classifier's likeliest class is one of those that are kept
    judge        Σ_k k p(k) / Σ_k p(k) over the next-token probabilities p of "1" … "5", after a question that asks for
                 a score of correctness, completeness and reasoning, is at least `min_score`

Models come after the rules and the duplicates, so they read the fewest documents. They read the first
`model_characters` of one. The paper only names its levels; models, question and bounds are the user's and ours.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fathom.curation.config import MODELS, Curation
from fathom.evaluate.load_model import load_checkpoint
from fathom.evaluate.text import text_loss, with_prefix
from fathom.models.device import device_of

WINDOW = 1024  # tokens that a perplexity is computed over at a time
QUESTION = (
    "Here is the beginning of a document.\n\n{text}\n\nHow good is it as study material? Judge its correctness, its "
    "completeness and how much reasoning it holds, together, from 1 (useless) to 5 (excellent).\n"
)


class PerplexityFilter(BaseFilter):
    """A filter that drops documents whose perplexity is too low or too high."""

    name = "perplexity"
    type = "curation"

    def __init__(self, config: Curation):
        super().__init__()
        assert config.perplexity_model is not None
        self.config = config
        self.model, self.tokenizer = load_checkpoint(config.perplexity_model)

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        ids = with_prefix(self.tokenizer, doc.text[: self.config.model_characters])
        window = min(WINDOW, getattr(self.model.config, "max_position_embeddings", None) or WINDOW)
        nats, tokens = text_loss(self.model, ids, window, window // 2)
        found = doc.metadata["perplexity"] = math.exp(nats / tokens)
        low, high = self.config.min_perplexity or 0.0, self.config.max_perplexity or math.inf
        if low <= found <= high:
            return True
        doc.metadata["detail"] = f"{found:.4g} < {low:g}" if found < low else f"{found:.4g} > {high:g}"
        return False, "too low" if found < low else "too high"


class ClassFilter(BaseFilter):
    """A filter that drops documents of all classes but those named."""

    name = "classes"
    type = "curation"

    def __init__(self, config: Curation):
        super().__init__()
        assert config.classifier_model is not None
        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(config.classifier_model)
        model: Any = AutoModelForSequenceClassification.from_pretrained(config.classifier_model)
        self.model = model.to(device_of()).eval()
        known = list(self.model.config.id2label.values())
        if not set(config.classes) <= set(known):
            raise ValueError(f"classes={list(config.classes)!r}: {config.classifier_model} says {', '.join(known)}")

    @torch.no_grad()
    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        room = min(self.tokenizer.model_max_length, getattr(self.model.config, "max_position_embeddings", 512))
        inputs = self.tokenizer(
            doc.text[: self.config.model_characters], truncation=True, max_length=room, return_tensors="pt"
        )
        inputs = {name: inputs[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
        shares = self.model(**inputs).logits[0].float().softmax(-1)
        found = doc.metadata["class"] = self.model.config.id2label[int(shares.argmax())]
        if found in self.config.classes:
            return True
        doc.metadata["detail"] = f"{found}, {float(shares.max()):.2f}"
        return False, "class"


class JudgeFilter(BaseFilter):
    """A filter that drops documents to which the model gives a low score."""

    name = "judge"
    type = "curation"

    def __init__(self, config: Curation):
        super().__init__()
        assert config.judge_model is not None
        self.config = config
        self.model, self.tokenizer = load_checkpoint(config.judge_model)
        self.end, self.digits = self._digits()

    def _prompt(self, text: str) -> str:
        asked = QUESTION.format(text=text)
        if self.tokenizer.chat_template is None:
            return f"{asked}Score:"
        messages = [{"role": "user", "content": f"{asked}Answer with the number alone."}]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _digits(self) -> tuple[str, list[int]]:
        """The tokens between the prompt and a score, and the token of each score."""
        for between, before in (("", ""), ("", " "), (" ", "")):
            ids = self._ids(self._prompt("x") + between)
            full = [self._ids(f"{self._prompt('x')}{between}{before}{k}") for k in range(1, 6)]
            if all(one[:-1] == ids for one in full):
                return between, [one[-1] for one in full]
        raise ValueError(f"judge_model={self.config.judge_model!r}: its tokenizer has no one token for each of 1 to 5")

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=self.tokenizer.chat_template is None)["input_ids"]  # type: ignore[return-value]

    @torch.no_grad()
    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        ids = self._ids(self._prompt(doc.text[: self.config.model_characters]) + self.end)
        logits = self.model(input_ids=torch.tensor([ids], device=self.model.device)).logits[0, -1]
        shares = logits[self.digits].float().softmax(-1)
        score = doc.metadata["score"] = float((shares * torch.arange(1, 6, device=shares.device)).sum())
        if score >= self.config.min_score:
            return True
        doc.metadata["detail"] = f"{score:.2f} < {self.config.min_score:g}"
        return False, "score"


def filters(config: Curation) -> list[tuple[str, BaseFilter]]:
    """(step, filter) of the models that the config names."""
    kinds = {"perplexity": PerplexityFilter, "classes": ClassFilter, "judge": JudgeFilter}
    named = [(step, kind) for (step, kind), name in zip(kinds.items(), MODELS) if getattr(config, name)]
    return [(step, kind(config)) for step, kind in named]

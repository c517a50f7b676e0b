"""CTRLEval (arXiv 2204.00862): a description without a reference, by how likely an infilling model finds its parts.

    s(x, y)        mean log-likelihood of a token of y, where x has a mask in y's place
    score          Σ_i β_i s(x_i, y_i) / Σ_i β_i,   β_i = max_{w in y_i} ln(1 + |C|) / f_w
    coherence      every sentence masked in turn
    consistency    the given content masked before the description, and the description after the content
    attribute      share of the label's probability in that of all labels, where a prompt has a mask for it

f_w is how many of the |C| texts of a corpus have the word w. The paper's model is PEGASUS-large; any model of
transformers that fills one mask takes its place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fathom.models.local_paths import refuse_absent
from fathom.tables.text.linearize import sentences, words

MASKS = ("<mask_1>", "<extra_id_0>")  # of PEGASUS and T5, whose tokenizers name no mask


class CTRLEval:
    """model: folder of an infilling model with its tokenizer. corpus: texts that word frequencies are counted in."""

    def __init__(self, model: str, corpus: Iterable[str] = (), device: str | None = None):
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        refuse_absent(model, f"CTRLEval model={model!r}")
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        loaded: Any = AutoModelForSeq2SeqLM.from_pretrained(model)
        self.model = loaded.eval().to(device or "cpu")
        known = self.tokenizer.get_vocab()
        mask = next((name for name in MASKS if name in known), self.tokenizer.mask_token)
        if mask is None:
            raise ValueError(f"CTRLEval model={model!r}: its tokenizer has no mask; use a model that fills masks")
        self.mask: str = mask
        self.texts, self.frequency = 0, Counter[str]()
        for text in corpus:
            self.texts += 1
            self.frequency.update(set(words(text)))

    def weights(self, targets: Sequence[str]) -> list[float]:
        """β over its sum, of every target."""
        raw = [
            max((math.log1p(self.texts) / max(1, self.frequency[word]) for word in words(target)), default=0.0)
            for target in targets
        ]
        total = math.fsum(raw)
        return [value / total for value in raw] if total > 0 else [1 / len(raw)] * len(raw)

    @torch.no_grad()
    def likelihood(self, source: str, target: str) -> float:
        """Mean log-likelihood of a token of `target` for `source`, which has the mask in its place."""
        given = self.tokenizer(source, return_tensors="pt", truncation=True).to(self.model.device)
        labels = self.tokenizer(text_target=target, return_tensors="pt", truncation=True).to(self.model.device)
        taken = {name: given[name] for name in ("input_ids", "attention_mask")}
        return -float(self.model(**taken, labels=labels["input_ids"]).loss)

    def _mean(self, patterns: list[tuple[str, str]]) -> float:
        weights = self.weights([target for _, target in patterns])
        return math.fsum(w * self.likelihood(*pattern) for w, pattern in zip(weights, patterns, strict=True))

    def coherence(self, text: str) -> float:
        """The score of how well a text's sentences follow from one another; for one sentence, its likelihood."""
        parts = sentences(text)
        return self._mean([(" ".join([*parts[:i], self.mask, *parts[i + 1 :]]), part) for i, part in enumerate(parts)])

    def consistency(self, content: str, text: str) -> float:
        """The score of how well a description fits its given content, such as highlighted cells."""
        return self._mean([(f"{self.mask} {text}", content), (f"{content} {self.mask}", text)])

    def attribute(
        self, text: str, label: str, verbalisers: Mapping[str, Sequence[str]], prompts: Sequence[str]
    ) -> float:
        """The share of a label in the probability of all, over prompts such as "It was [mask] ." and verbalisers.

        Raises ValueError for a label without verbalisers, and for a prompt without "[mask]".
        """
        if label not in verbalisers:
            raise ValueError(f"label={label!r}: has no verbalisers; labels: {', '.join(verbalisers)}")
        for prompt in prompts:
            if "[mask]" not in prompt:
                raise ValueError(f"prompt={prompt!r}: write [mask] where the label stands")
        shares, weights = [], self.weights([verbalisers[label][0]] * len(prompts))
        for prompt in prompts:
            source = f"{text} {prompt.replace('[mask]', self.mask)}"
            each = {
                name: math.fsum(math.exp(self.likelihood(source, word)) for word in found) / len(found)
                for name, found in verbalisers.items()
            }
            shares.append(each[label] / math.fsum(each.values()))
        return math.fsum(w * share for w, share in zip(weights, shares, strict=True))

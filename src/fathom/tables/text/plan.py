"""Plans: which slots of a table a description tells, in which order (PromptMize, arXiv 2302.04415; PlanGen).

`gold_plan` reads the plan off a reference. A `ContentPlanner` learns to predict it: `PointerPlanner` here, for few
pairs, `CRFPlanner` in `crf.py`, `Seq2SeqPlanner` below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig

from fathom.tables.text.encoder import batch, load_encoder, special
from fathom.tables.text.linearize import Table, content_words, plain_ids, slot_text, words
from fathom.tables.text.stages import Stage, train

ALIGNED = 0.6  # share of a value's content words that a reference must have
Plan = list[str]


def place(value: str, text: str) -> int | None:
    """The first word of a text where a value stands: whole, or else 60 % of its content words. None: nowhere."""
    wanted, said = words(value), words(text)
    if not wanted:
        return None
    for start in range(len(said) - len(wanted) + 1):
        if said[start : start + len(wanted)] == wanted:
            return start
    content = set(content_words(value))
    found = [said.index(word) for word in content if word in said]
    return min(found) if content and len(found) >= ALIGNED * len(content) else None


def gold_plan(table: Table, text: str) -> Plan:
    """The keys whose values a text has, in the order in which they stand there; ties keep the table's order."""
    placed = [(place(value, text), index, key) for index, (key, value) in enumerate(table.slots)]
    return [key for where, _, key in sorted((p for p in placed if p[0] is not None), key=lambda p: (p[0], p[1]))]


class ContentPlanner(nn.Module):
    """Base of the planners: `fit` on (table, plan), `predict` plans of tables."""

    def loss(self, pairs: list[tuple[Table, Plan]]) -> Tensor:
        raise NotImplementedError  # abstract

    def plan(self, table: Table) -> Plan:
        """Keys of the table in order, none twice."""
        raise NotImplementedError  # abstract

    def fit(self, pairs: Sequence[tuple[Table, Plan]], stage: Stage) -> list[float]:
        """Losses of the steps. Raises ValueError for a plan with an item that is no key of its table."""
        for table, plan in pairs:
            for item in plan:
                if item not in table.keys:
                    raise ValueError(f"plan item {item!r}: no key of the table; keys: {', '.join(table.keys)}")
        return train(self, pairs, self.loss, stage)

    @torch.no_grad()
    def predict(self, tables: Sequence[Table]) -> list[Plan]:
        was = self.training
        self.eval()
        found = [self.plan(table) for table in tables]
        self.train(was)
        return found


class PointerPlanner(ContentPlanner):
    """Points at one slot after the other.

        u_j = mean of the encoder's states of slot j, each slot read by itself, then mixed over the set of slots
        g_t = GRU(u_{p_{t−1}}, g_{t−1});   logit_t(j) = u_jᵀ W g_t,   and a learned STOP beside the slots

    Slots have no positions, so that permuting them permutes the logits. Chosen slots are masked.
    """

    def __init__(
        self, tokenizer: Any, model: str | PreTrainedConfig | None = None, seed: int = 0, beams: int = 1, **small: int
    ):
        super().__init__()
        self.encoder, self.tokenizer = load_encoder(model, tokenizer, 128, seed, **small)
        width, self.beams = self.encoder.config.hidden_size, beams
        heads = self.encoder.config.num_attention_heads
        self.mix = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.1, batch_first=True)
        self.gru, self.bilinear = nn.GRUCell(width, width), nn.Linear(width, width, bias=False)
        self.start, self.stop, self.state = (nn.Parameter(torch.randn(width) * 0.02) for _ in range(3))

    def slots(self, table: Table) -> Float[Tensor, "m d"]:
        rows = [plain_ids(self.tokenizer, slot_text(*slot))[:128] for slot in table.slots]
        given = batch(rows, special(self.tokenizer, "pad"))
        given = {name: value.to(self.stop.device) for name, value in given.items()}
        states = self.encoder(**given).last_hidden_state
        mask = given["attention_mask"].unsqueeze(-1).to(states.dtype)
        return self.mix(((states * mask).sum(1) / mask.sum(1))[None])[0]

    def step(
        self, slots: Float[Tensor, "m d"], read: Float[Tensor, " d"], state: Float[Tensor, " d"]
    ) -> tuple[Float[Tensor, " m1"], Float[Tensor, " d"]]:
        """Logits of every slot and, last, of STOP; and the next state."""
        state = self.gru(read[None], state[None])[0]
        return torch.cat([slots, self.stop[None]]) @ self.bilinear(state), state

    def loss(self, pairs: list[tuple[Table, Plan]]) -> Tensor:
        total, count = torch.zeros((), device=self.stop.device), 0
        for table, plan in pairs:
            slots = self.slots(table)
            read: Tensor = self.start
            state: Tensor = self.state
            taken = torch.zeros(len(slots) + 1, dtype=torch.bool, device=slots.device)
            for index in [*(table.keys.index(item) for item in plan), len(slots)]:
                logits, state = self.step(slots, read, state)
                total = total + F.cross_entropy(
                    logits.masked_fill(taken, -torch.inf)[None], torch.tensor([index], device=slots.device)
                )
                count += 1
                if index < len(slots):
                    read, taken = slots[index], taken.clone()
                    taken[index] = True
        return total / count

    def plan(self, table: Table) -> Plan:
        slots = self.slots(table)
        size = len(slots)
        beams: list[tuple[float, list[int], Tensor, Tensor, bool]] = [(0.0, [], self.start, self.state, False)]
        for _ in range(size + 1):
            found = []
            for score, chosen, read, state, done in beams:
                if done:
                    found.append((score, chosen, read, state, True))
                    continue
                logits, after = self.step(slots, read, state)
                if chosen:
                    logits = logits.index_fill(0, torch.tensor(chosen, device=logits.device), -torch.inf)
                logs = logits.log_softmax(-1)
                for index in logs.topk(min(self.beams, size + 1 - len(chosen))).indices.tolist():
                    stopped = index == size
                    found.append((
                        score + float(logs[index]), chosen if stopped else [*chosen, index],
                        read if stopped else slots[index], after, stopped,
                    ))  # fmt: skip
            beams = sorted(found, key=lambda one: -one[0])[: self.beams]
            if all(done for *_, done in beams):
                break
        return [table.keys[index] for index in beams[0][1]]


class Seq2SeqPlanner(ContentPlanner):
    """An encoder-decoder that writes "key | key | key"; what it writes that is no key of the table is left out."""

    def __init__(self, model: Any, tokenizer: Any, most: int = 64):
        super().__init__()
        self.model, self.tokenizer, self.most = model, tokenizer, most

    def _ids(self, text: str) -> list[int]:
        return plain_ids(self.tokenizer, text)

    def _source(self, table: Table) -> dict[str, Tensor]:
        ids = self._ids(" ".join(slot_text(*slot) for slot in table.slots))
        return {
            name: value.to(self.model.device) for name, value in batch([ids], special(self.tokenizer, "pad")).items()
        }

    def loss(self, pairs: list[tuple[Table, Plan]]) -> Tensor:
        losses = []
        for table, plan in pairs:
            labels = [*self._ids(" | ".join(plan)), special(self.tokenizer, "eos")]
            losses.append(
                self.model(**self._source(table), labels=torch.tensor([labels], device=self.model.device)).loss
            )
        return torch.stack(losses).mean()

    def plan(self, table: Table) -> Plan:
        out = self.model.generate(**self._source(table), max_new_tokens=self.most, do_sample=False, num_beams=1)
        said = self.tokenizer.decode(out[0], skip_special_tokens=True)
        known = {" ".join(words(key)): key for key in table.keys}
        items = [known.get(" ".join(words(part))) for part in said.split("|")]
        return list(dict.fromkeys(item for item in items if item is not None))

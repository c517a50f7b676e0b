"""PlanGen's planner (arXiv 2108.13740): a non-autoregressive linear-chain CRF over the source's positions.

    e ∈ R^{L×V} = W · encoder(table)        position i of the source emits item i of the plan
    M = E₁ E₂ᵀ,  E ∈ R^{V×64}               transitions of low rank
    score(P) = Σ_i e_{i,P_i} + Σ_i M_{P_{i−1},P_i}
    L = ½ · CE(e, P) + NLL(P) / L           normalised over the best labels of each position, the gold one among them

The target is the plan, an end, and padding up to the source's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig

from fathom.tables.text.encoder import batch, load_encoder, special
from fathom.tables.text.linearize import Table, plain_ids, slot_text
from fathom.tables.text.plan import ContentPlanner, Plan

PAD, END, UNKNOWN = 0, 1, 2
WEIGHT = 0.5  # of the cross-entropy


def beam_labels(
    emissions: Float[Tensor, "L V"], beam: int, gold: Int[Tensor, " L"] | None = None
) -> Int[Tensor, "L K"]:
    """The labels of each position with the highest emissions, K = min(beam, V); the gold one is always among them."""
    ranked = emissions if gold is None else emissions.scatter(1, gold[:, None], torch.inf)
    return ranked.topk(min(beam, emissions.shape[1]), dim=1).indices


def log_partition(
    emissions: Float[Tensor, "L V"], transitions: Float[Tensor, "V V"], labels: Int[Tensor, "L K"]
) -> Float[Tensor, ""]:
    """log Σ_P exp score(P) over the paths through `labels`: at most that over all paths."""
    alpha = emissions[0, labels[0]]
    for i in range(1, len(labels)):
        step = transitions[labels[i - 1]][:, labels[i]]
        alpha = torch.logsumexp(alpha[:, None] + step, dim=0) + emissions[i, labels[i]]
    return torch.logsumexp(alpha, dim=0)


def path_score(
    emissions: Float[Tensor, "L V"], transitions: Float[Tensor, "V V"], path: Int[Tensor, " L"]
) -> Float[Tensor, ""]:
    """Σ emissions of the path's labels and of its transitions."""
    return emissions.gather(1, path[:, None]).sum() + transitions[path[:-1], path[1:]].sum()


def viterbi(
    emissions: Float[Tensor, "L V"], transitions: Float[Tensor, "V V"], labels: Int[Tensor, "L K"]
) -> Int[Tensor, " L"]:
    """The path of the highest score through `labels`."""
    alpha, back = emissions[0, labels[0]], []
    for i in range(1, len(labels)):
        best, where = (alpha[:, None] + transitions[labels[i - 1]][:, labels[i]]).max(dim=0)
        alpha = best + emissions[i, labels[i]]
        back.append(where)
    at = int(alpha.argmax())
    path = [at]
    for where in reversed(back):
        at = int(where[at])
        path.append(at)
    return torch.stack([labels[i, k] for i, k in enumerate(reversed(path))])


class CRFPlanner(ContentPlanner):
    """keys: every key that plans may have, those of the training tables. beam: labels a position is normalised over."""

    table_tokens, plan_items = 320, 25

    def __init__(
        self,
        keys: Sequence[str],
        tokenizer: Any,
        model: str | PreTrainedConfig | None = None,
        beam: int = 256,
        seed: int = 0,
        **small: int,
    ):
        super().__init__()
        self.keys = list(dict.fromkeys(keys))
        self.label = {key: 3 + index for index, key in enumerate(self.keys)}
        self.encoder, self.tokenizer = load_encoder(model, tokenizer, self.table_tokens, seed, **small)
        size = 3 + len(self.keys)
        self.emit = nn.Linear(self.encoder.config.hidden_size, size)
        self.left, self.right = (nn.Parameter(torch.randn(size, 64) * 0.02) for _ in range(2))
        self.beam = beam

    @property
    def transitions(self) -> Float[Tensor, "V V"]:
        return self.left @ self.right.T

    def emissions(self, table: Table) -> Float[Tensor, "L V"]:
        text = " ".join(slot_text(*slot) for slot in table.slots)
        ids = plain_ids(self.tokenizer, text)[: self.table_tokens]
        given = {
            name: value.to(self.left.device) for name, value in batch([ids], special(self.tokenizer, "pad")).items()
        }
        return self.emit(self.encoder(**given).last_hidden_state[0])

    def target(self, plan: Plan, length: int) -> Int[Tensor, " L"]:
        """The plan, an end, and padding. Items beyond 25, or beyond the source's length, are left out."""
        items = [self.label.get(key, UNKNOWN) for key in plan[: min(self.plan_items, length - 1)]]
        return torch.tensor([*items, END, *[PAD] * length][:length], device=self.left.device)

    def loss(self, pairs: list[tuple[Table, Plan]]) -> Tensor:
        losses, transitions = [], self.transitions
        for table, plan in pairs:
            emissions = self.emissions(table)
            gold = self.target(plan, len(emissions))
            labels = beam_labels(emissions, self.beam, gold)
            nll = log_partition(emissions, transitions, labels) - path_score(emissions, transitions, gold)
            losses.append(WEIGHT * F.cross_entropy(emissions, gold) + nll / len(gold))
        return torch.stack(losses).mean()

    def plan(self, table: Table) -> Plan:
        """Viterbi up to the end, over the table's own keys alone; repeated keys are dropped."""
        emissions = self.emissions(table)
        allowed = torch.full_like(emissions[0], -torch.inf)
        own = [PAD, END, *(self.label[key] for key in table.keys if key in self.label)]
        allowed[own] = 0.0
        emissions = emissions + allowed
        labels = emissions.topk(min(self.beam, len(own)), dim=1).indices
        found: list[str] = []
        for label in viterbi(emissions, self.transitions, labels).tolist():
            if label == END:
                break
            if label > UNKNOWN and self.keys[label - 3] not in found:
                found.append(self.keys[label - 3])
        return found

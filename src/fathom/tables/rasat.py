"""RASAT (arXiv 2205.06983): a vector for each relation between two tokens in T5's encoder self-attention.

    s_ij = q_i·(k_j + E_K[R_ij]) + b_ij,   a = softmax_j s,   o_i = Σ_j a_ij (v_j + E_V[R_ij])

R_ij is the relation of token i to token j: of words in a question, of a schema's parts, or between the two
(`tables/relations.py`). All layers and heads share one pair of tables. Row 0, no relation, is zero and stays so.

The official code starts from a normal distribution of standard deviation 1, so that its first step is not T5's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from fathom.models.method import check_choice
from fathom.models.registry import register
from fathom.tables.base import Relations

_DISTANCE = ("q-q:-2", "q-q:-1", "q-q:0", "q-q:1", "q-q:2")
_SYNTAX = ("q-q:forward", "q-q:backward", "q-q:unrelated")
_COREFERENCE = ("q-q:same-mention", "q-q:coreference")
# In the order of their ids, from 1 on. A name says from which kind of token to which: q(uestion), t(able), c(olumn),
# * (the star column, which stands for the whole database), v(alue).
RELATIONS: tuple[str, ...] = (
    *_DISTANCE,
    "t-t:identity", "t-t:fk", "t-t:fk-reverse", "t-t:fk-both",
    "c-c:identity", "c-c:same-table", "c-c:fk", "c-c:fk-reverse",
    "t-c:pk", "c-t:pk", "t-c:has", "c-t:has",
    "q-c:exact", "q-c:partial", "q-c:none", "q-c:value", "c-q:exact", "c-q:partial", "c-q:none", "c-q:value",
    "q-t:exact", "q-t:partial", "q-t:none", "t-q:exact", "t-q:partial", "t-q:none",
    "q-q:generic", "t-t:generic", "c-c:generic", "t-c:generic", "c-t:generic",
    "*-*:identity", "*-q:generic", "q-*:generic", "*-t:generic", "t-*:generic", "*-c:generic", "c-*:generic",
    "c-v:has", "v-c:has",
    *_SYNTAX, *_COREFERENCE,
)  # fmt: skip
# What the preprocessing tells apart and a model may not: how a name is read where an option is off.
_ACROSS = {f"q-q:{distance} across": f"q-q:{distance}" for distance in range(-2, 3)}
_BACK = "q-q:coreference-back"
EVERY: tuple[str, ...] = (*RELATIONS, *_ACROSS, _BACK)
_MINIMAL = {
    "q-c:partial": 1, "q-t:partial": 1, "q-c:exact": 2, "q-t:exact": 2, "q-c:value": 3, "q-c:none": 4, "q-t:none": 4,
    "t-c:pk": 5, "t-c:has": 6, "c-c:fk": 7,
}  # fmt: skip
EDGES = ("default", "without_schema_encoding", "without_schema_linking", "minimal", "minimal_syntax")


@register("relations", "rasat")
class Rasat(Relations):
    """E_K and E_V, and the ids of the relations that have rows in them."""

    summary = "A vector for each relation between two tokens, added to keys and values of T5's encoder self-attention."
    equation = "s_ij = q_i·(k_j + E_K[R_ij]) + b_ij,  o_i = Σ_j a_ij (v_j + E_V[R_ij])"
    paper = "2205.06983"
    variants = ({}, {"edges": "minimal", "init": "small"}, {"coreference": True, "dependency": True})
    identity = {"init": "zero"}  # noqa: RUF012

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options:

        edges: which relations have ids: "default"; "without_schema_encoding" and "without_schema_linking" give a group
            of relations the id 0; "minimal" (the official MinType) merges matches and leaves most out; "minimal_syntax"
            has dependencies instead of distances.
        coreference: two more relations, between mentions of one thing in several turns; read from a file.
        dependency: three more relations, from a parse of the question, instead of distances; read from a file.
        symmetric: coreference also from a later mention to an earlier one; only the other way in the official code.
        across_turns: word distances also between words of different turns; unreachable in the official code.
        init: of the tables: "normal" (standard deviation 1, official), "small" (0.02) or "zero" (T5 at first).
        """

        edges: Literal["default", "without_schema_encoding", "without_schema_linking", "minimal", "minimal_syntax"] = (
            "default"
        )
        coreference: bool = False
        dependency: bool = False
        symmetric: bool = False
        across_turns: bool = False
        init: Literal["normal", "small", "zero"] = "normal"

        def __post_init__(self) -> None:
            check_choice("rasat", "edges", self.edges, EDGES)
            check_choice("rasat", "init", self.init, ("normal", "small", "zero"))
            if self.edges == "minimal_syntax" and not self.dependency:
                raise ValueError(
                    "rasat option edges='minimal_syntax': its relations are those of a parse; set dependency=True"
                )
            if self.symmetric and not self.coreference:
                raise ValueError("rasat option symmetric=True: there is no coreference; set coreference=True")

    def __init__(self, config: Any, options: Any):
        super().__init__(config, options)
        spread = {"normal": 1.0, "small": 0.02, "zero": 0.0}[options.init]
        self.keys, self.values = (RelationTable(count(options) + 1, config.d_kv, spread) for _ in range(2))

    def tables(self) -> tuple[Tensor, Tensor]:
        rows = torch.arange(self.keys.num_embeddings, device=self.keys.weight.device)
        return self.keys(rows), self.values(rows)  # the look-up gives row 0 no gradient

    @classmethod
    def ids(cls, options: Any) -> Mapping[str, int]:
        return ids(options)

    @classmethod
    def numbering(cls, options: Any) -> list[int]:
        return numbering(options)

    @classmethod
    def unsupported(cls, config: Any, options: Any) -> str | None:
        if config.host != "t5":
            return f"relations='rasat' runs on t5, and this is {config.host}"
        return None


class RelationTable(nn.Embedding):
    """A vector for each relation; row 0 is zero."""

    def __init__(self, rows: int, width: int, spread: float):
        self.spread = spread
        super().__init__(rows, width, padding_idx=0)

    def initialize_parameters(self) -> None:
        if not getattr(self.weight, "_is_hf_initialized", False):  # by a checkpoint
            init.normal_(self.weight, 0.0, self.spread)
            init.zeros_(self.weight[0])


def ids(options: Any) -> dict[str, int]:
    """The id of each relation, 0 for one that has no row of its own."""
    names = [
        name
        for name in RELATIONS
        if (options.dependency or name not in _SYNTAX) and (options.coreference or name not in _COREFERENCE)
    ]
    if options.edges.startswith("minimal"):
        kept = _SYNTAX if options.edges == "minimal_syntax" else (*_DISTANCE, "q-q:generic")
        return {name: _MINIMAL.get(name, 8 + kept.index(name) if name in kept else 0) for name in names}
    without: list[str] = []
    if options.edges == "without_schema_encoding":
        without = [name for name in names if name[0] in "tc*" and name[2] in "tc*"]
    if options.edges == "without_schema_linking":
        without = [name for name in names if (name[0] == "q") != (name[2] == "q") and "v" not in (name[0], name[2])]
    kept_names = [name for name in names if name not in without]
    return {name: kept_names.index(name) + 1 if name in kept_names else 0 for name in names}


def numbering(options: Any) -> list[int]:
    """The ids of all relations in EVERY, at indices from 1 on; index 0 is no relation, with id 0."""
    numbers = ids(options)
    generic = numbers["q-q:generic"]

    def number(name: str) -> int:
        if name in _ACROSS:
            return numbers[_ACROSS[name]] if options.across_turns else generic
        if name == _BACK:
            return numbers["q-q:coreference"] if options.symmetric else generic
        return numbers.get(name, generic)  # coreference in a model without

    return [0, *map(number, EVERY)]


def count(options: Any) -> int:
    """N, the highest id."""
    return max(ids(options).values())

"""The methods of table-to-text: which parts of a source they read, and whether they have a knowledge adapter.

    source = table ⊕ plan ⊕ prototypes          (methods of slots)
    source = highlights ⊕ header ⊕ body ⊕ caption ⊕ background          (CTRLSciTab)

`akg`, `promptmize`, `p2g` and `table_plain` are settings of `SlotMethod`: prototypes × planner × adapter.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, ClassVar, Literal

from fathom.models.registry import check_type, nearest
from fathom.tables.text.linearize import GOLD_PLAN, PLAN, PROTOTYPES, TABLE

Planner = Literal["none", "auto", "pointer", "crf", "seq2seq", "prototype", "oracle", "prefix", "free_prefix"]
CRF_FROM = 500  # pairs, from which the planner "auto" is the CRF and not the pointer


@dataclasses.dataclass(frozen=True)
class TableMethod:
    """Base of the methods. Fields are options, which a checkpoint's config keeps in its section `table`.

    trains: what the last stage trains: "host", everything but a knowledge adapter; "knowledge", only the adapter;
        "prefix", only a continuous prefix; "all".
    prefix: text before every source; None: T5's own, and none for BART.
    """

    trains: Literal["host", "knowledge", "prefix", "all"] = "host"
    prefix: str | None = None

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    registry: ClassVar[str] = "table_to_text"
    summary: ClassVar[str]  # one line for `fathom methods`, which reads the sources: write literals
    equation: ClassVar[str]
    variants: ClassVar[tuple[dict[str, Any], ...]] = ({},)  # what the suite runs
    slots: ClassVar[bool] = True  # whether its tables are of slots, not of rows

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value, hint = getattr(self, field.name), hints[field.name]
            check_type(f"{self.name}.{field.name}", value, hint)
            if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
                raise self.refuse(field.name, value, f"use {', '.join(typing.get_args(hint))}")
        if self.trains == "knowledge" and not self.adapts:
            raise self.refuse("trains", "knowledge", "it has no adapter to train; use adapter=True")
        if self.trains == "prefix" and not self.prefixes:
            raise self.refuse("trains", "prefix", "it has no prefix to train; use planner='prefix' or 'free_prefix'")

    @property
    def adapts(self) -> bool:
        """Whether the model has a knowledge adapter."""
        return False

    @property
    def prefixes(self) -> bool:
        """Whether the model has a continuous prefix."""
        return False

    def refuse(self, option: str, value: Any, remedy: str) -> ValueError:
        return ValueError(f"{self.name} option {option}={value!r}: {remedy}")

    def to_dict(self) -> dict[str, Any]:
        """`{"name": …, options}`, which `from_dict` reads."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def parts(self, training: bool) -> tuple[int, ...]:
        """The parts of a source that are read, by their numbers in `linearize.py`."""
        raise NotImplementedError  # abstract


@dataclasses.dataclass(frozen=True)
class SlotMethod(TableMethod):
    """table_tokens, plan_tokens, prototype_tokens: the most tokens of the table, of a plan and of each prototype.
    prototypes: sentences of the corpus that are read beside the table, best first.
    planner: how slots are ordered: "pointer", "crf", "seq2seq", "oracle" (the reference's own plan), "prototype" (the
        prototypes are the prompt), "auto" (pointer below 500 pairs, else crf), "prefix" (vectors that every decoder
        layer reads before the source, made of the source's mean state), "free_prefix" (such vectors, the same for every
        table: with trains="prefix" prefix-tuning), or "none".
    prefix_tokens: number of vectors of a prefix.
    plan_item: how a planned slot is written: key, value or key_value.
    plan_noise: share of training rows that read the planner's plan instead of the reference's.
    keep_planned_slots: if a table is cut, planned slots come first.
    adapter: whether there is a knowledge adapter, trained on the corpus with the host frozen.
    reduction: width of the model / width of the adapter's bottleneck.
    placement: of the adapters, every_layer or last_layer.
    zero_init_up: the adapters start as the identity.
    knowledge: what is masked in the corpus for the adapter: table_values, random_span or entity.
    mask_unit: one mask for a run of table words, or for each word.
    mask_source: table words are those of values, or of values+keys.
    knowledge_with_table: the adapter's training reads the table before the masked sentence.
    candidates: number of corpus sentences found for each table, by BM25.
    content_aware: weight of the loss that makes prototype words which the reference lacks less likely (P2G).
    """

    table_tokens: int = 300
    plan_tokens: int = 60
    prototype_tokens: int = 50
    prototypes: int = 0
    planner: Planner = "none"
    prefix_tokens: int = 20
    plan_item: Literal["key", "value", "key_value"] = "key"
    plan_noise: float = 0.0
    keep_planned_slots: bool = True
    adapter: bool = False
    reduction: int = 16
    placement: Literal["every_layer", "last_layer"] = "every_layer"
    zero_init_up: bool = False
    knowledge: Literal["table_values", "random_span", "entity"] = "table_values"
    mask_unit: Literal["run", "word"] = "run"
    mask_source: Literal["values", "values+keys"] = "values"
    knowledge_with_table: bool = False
    candidates: int = 100
    content_aware: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, least in (
            ("prototypes", 0),
            ("reduction", 1),
            ("candidates", 1),
            ("prefix_tokens", 1),
            ("table_tokens", 1),
        ):
            if getattr(self, option) < least:
                raise self.refuse(option, getattr(self, option), f"must be at least {least}")
        if not 0 <= self.plan_noise <= 1:
            raise self.refuse("plan_noise", self.plan_noise, "use a share in [0, 1]")
        if self.content_aware < 0:
            raise self.refuse("content_aware", self.content_aware, "must not be negative")
        if self.planner == "prototype" and self.prototypes < 1:
            raise self.refuse("planner", "prototype", "its prompt are prototypes; give prototypes=3")

    @property
    def adapts(self) -> bool:
        return self.adapter

    @property
    def plans(self) -> bool:
        """Whether a plan of slots is read."""
        return self.planner not in ("none", "prototype", "prefix", "free_prefix")

    @property
    def prefixes(self) -> bool:
        return self.planner in ("prefix", "free_prefix")

    def parts(self, training: bool) -> tuple[int, ...]:
        plan = () if not self.plans else (GOLD_PLAN,) if training or self.planner == "oracle" else (PLAN,)
        return (TABLE, *plan, *((PROTOTYPES,) if self.prototypes else ()))


def planner_for(planner: str, pairs: int) -> str:
    """The planner's name, with "auto" resolved by the number of labelled pairs."""
    if planner == "auto":
        return "crf" if pairs >= CRF_FROM else "pointer"
    return planner


def methods() -> dict[str, type[TableMethod]]:
    """Every method by name."""
    from fathom.tables.text import METHODS

    return METHODS


def from_dict(section: dict[str, Any] | str | None) -> TableMethod:
    """The method of a config's section. Raises ValueError for an unknown name or option, naming the nearest."""
    section = {"name": section} if isinstance(section, str) else section or {"name": "table_plain"}
    known = methods()
    name = section.get("name")
    if name not in known:
        raise ValueError(
            f"table={name!r}: no such method{nearest(str(name), list(known))}; methods: {', '.join(known)}"
        )
    options = {key: value for key, value in section.items() if key != "name"}
    fields = [field.name for field in dataclasses.fields(known[name])]
    for key in options:
        if key not in fields:
            raise ValueError(
                f"unknown key table.{key}{nearest(key, fields)}; {name} has the options: {', '.join(fields)}"
            )
    return known[name](**options)

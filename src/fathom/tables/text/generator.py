"""`TableGenerator`: trains a model that describes tables, in all its stages, from tables and a few descriptions.

generator = TableGenerator.from_pretrained("a T5, BART or Llama", AKG())
generator.fit(pairs, corpus)
generator.describe(table)
generator.save_pretrained("out")

A Llama reads source, cue and description in one sequence, of which the description alone has a loss.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from fathom.models.local_paths import refuse_absent
from fathom.tables.text.base import SlotMethod, TableMethod, planner_for
from fathom.tables.text.configuration import FathomTableBartConfig, FathomTableLlamaConfig, FathomTableT5Config
from fathom.tables.text.crf import CRFPlanner
from fathom.tables.text.ctrlscitab import GRID_MARKERS, GRID_PREFIX, CTRLSciTab, query, source_parts
from fathom.tables.text.encoder import batch, special
from fathom.tables.text.kept import PLANNER, RETRIEVER, SELECTOR, keep, load_beside
from fathom.tables.text.knowledge import knowledge_pairs
from fathom.tables.text.linearize import MARKERS, T5_PREFIX, Grid, Table, TableLinearizer, with_markers
from fathom.tables.text.models import (
    FathomTableBartForConditionalGeneration,
    FathomTableLlamaForCausalLM,
    FathomTableT5ForConditionalGeneration,
)
from fathom.tables.text.plan import ContentPlanner, Plan, PointerPlanner, Seq2SeqPlanner, gold_plan
from fathom.tables.text.prototypes import Candidates, PrototypeSelector
from fathom.tables.text.retrieval import Random, TfIdf, make_retriever
from fathom.tables.text.stages import Stage, train

MODELS = {
    model: cls
    for config, cls in (
        (FathomTableT5Config, FathomTableT5ForConditionalGeneration),
        (FathomTableBartConfig, FathomTableBartForConditionalGeneration),
        (FathomTableLlamaConfig, FathomTableLlamaForCausalLM),
    )
    for model in (config.model_type, config.stock.model_type)
}
TARGET_TOKENS, KNOWLEDGE_TOKENS = 90, 512
CUE = "\nText:"  # ends the source where source and description are one sequence


@dataclasses.dataclass(frozen=True)
class Stages:
    """Steps and learning rates of each stage of `fit`. The defaults are the papers' (P2G's scripts) for 50 to 100
    pairs.
    """

    planner: Stage = dataclasses.field(default=Stage(steps=1000, batch_size=8, lr=5e-4, warmup=50))
    selector: Stage = dataclasses.field(default=Stage(steps=1000, batch_size=4, lr=2e-5, warmup=100))
    knowledge: Stage = dataclasses.field(
        default=Stage(steps=1000, batch_size=8, lr=1e-3, schedule="constant", optimizer="adafactor")
    )
    retriever_steps: int = 1000
    generator: Stage = dataclasses.field(default=Stage(steps=1000, batch_size=8, lr=3e-5, warmup=100))


class TableGenerator:
    """A model with the parts that it reads beside the table.

    model, tokenizer: of this wing's classes, the tokenizer with the markers.
    planner, candidates, selector, retriever: these make plans, find and sort prototypes, and choose background.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, planner: ContentPlanner | None = None,
        candidates: Candidates | None = None, selector: PrototypeSelector | None = None, retriever: Any = None,
    ):  # fmt: skip
        self.model, self.tokenizer = model, tokenizer
        self.planner, self.candidates, self.selector, self.retriever = planner, candidates, selector, retriever
        method = self.method
        own = ("table_tokens", "plan_tokens", "prototype_tokens", "plan_item", "keep_planned_slots")
        limits = {name: getattr(method, name) for name in own if hasattr(method, name)}
        prefixes = ("", T5_PREFIX if method.slots else GRID_PREFIX)
        before = prefixes["t5" in model.config.model_type] if method.prefix is None else method.prefix
        self.linearizer = TableLinearizer(tokenizer, before, **limits)
        self.causal = not model.config.is_encoder_decoder
        self.cue = self.linearizer.ids(CUE) if self.causal else []

    @property
    def method(self) -> TableMethod:
        return self.model.config.method

    @classmethod
    def from_pretrained(
        cls, folder: str, method: TableMethod | None = None, corpus: Iterable[str] | None = None
    ) -> Any:
        """The generator of a stock T5, BART or Llama with a method, or of what `save_pretrained` or a recipe wrote.

        corpus: sentences that prototypes are found among.
        """
        refuse_absent(folder, f"checkpoint {folder!r}")
        kind = AutoConfig.from_pretrained(folder).model_type
        if kind not in MODELS:
            raise ValueError(f"{folder}: model_type={kind!r}; table to text is for {', '.join(MODELS)}")
        tokenizer = with_markers(AutoTokenizer.from_pretrained(folder), (*MARKERS, *GRID_MARKERS))
        changes = {} if method is None else {"table": method.to_dict()}
        model = MODELS[kind].from_pretrained(folder, **changes)
        if model.config.vocab_size < len(tokenizer):
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        candidates = None if corpus is None else Candidates(corpus)
        beside = {role: load_beside(Path(folder), role) for role in (PLANNER, SELECTOR, RETRIEVER)}
        if beside[RETRIEVER] is None and isinstance(model.config.method, CTRLSciTab):
            beside[RETRIEVER] = {"tfidf": TfIdf(), "random": Random()}.get(model.config.method.retriever)
        return cls(model.eval(), tokenizer, candidates=candidates, **beside)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model, tokenizer and the trained parts beside it. The corpus must be given again when they
        are loaded.
        """
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        for role in (PLANNER, SELECTOR, RETRIEVER):
            part = getattr(self, role)
            if isinstance(part, nn.Module):  # what has not learned is named by the config
                keep(part, Path(folder) / role)

    # -- what the model reads ----------------------------------------------------------------------------------------

    def source(
        self, table: Table | Grid, plan: Plan | None = None, without: Sequence[str] = (),
        background: Sequence[str] | None = None,
    ) -> list[int]:  # fmt: skip
        """Token ids of a table with the parts that its method reads beside it.

        plan: instead of the planner's.   without: sentences that must not be prototypes, such as the table's
            references.
        background: instead of the retriever's choice.

        Raises ValueError if a planner, a corpus or a retriever is needed and missing, and for a plan with an item that
        is no key.
        """
        method = self.method
        if isinstance(method, CTRLSciTab):
            if not isinstance(table, Grid):
                raise ValueError("table: ctrlscitab reads tables of rows; give a Grid")
            if background is None and method.background and table.background:
                if self.retriever is None:
                    raise ValueError("retriever=None: this method reads retrieved background; give one")
                background = self.retriever.top(query(table), table.background, method.sentences)
            chosen = self.linearizer.sentences(background or (), method.strip_stopwords, method.sentence_tokens)
            lines, most, read = self.linearizer, method.source_tokens, method.parts(training=False)
            parts = source_parts(table, chosen, lines, most)
            return self._within([token for part, ids in parts if part in read for token in ids][:most])
        assert isinstance(method, SlotMethod)
        slots = table.slots() if isinstance(table, Grid) else table
        if plan is None and method.plans:
            if self.planner is None:
                raise ValueError(
                    f"plan=None: method {method.name!r} has no planner here; give the keys to tell, in order"
                )
            (plan,) = self.planner.predict([slots])
        elif not method.plans and plan:
            raise ValueError(f"plan={plan!r}: method {method.name!r} reads none (planner={method.planner!r})")
        return self._within(self.linearizer.source(slots, plan or (), self.prototypes(slots, without)))

    @property
    def _positions(self) -> float:
        """The most tokens of a text: BART has a vector for each position, Llama a trained length, T5 no limit."""
        config = self.model.config
        return math.inf if "t5" in config.model_type else config.max_position_embeddings

    def _within(self, ids: list[int]) -> list[int]:
        if len(ids) > self._positions:
            limits = "source_tokens" if isinstance(self.method, CTRLSciTab) else "table_tokens or prototype_tokens"
            raise ValueError(
                f"source of {len(ids)} tokens: the model has max_position_embeddings={self._positions}; give method "
                f"{self.method.name!r} fewer {limits}"
            )
        return ids + self.cue

    def prototypes(self, table: Table, without: Sequence[str] = ()) -> list[str]:
        method = self.method
        if not isinstance(method, SlotMethod) or not method.prototypes:
            return []
        if self.candidates is None:
            raise ValueError(f"corpus=None: method {method.name!r} reads prototypes; give sentences of the domain")
        found = self.candidates.find(table, method.candidates, without)
        if self.selector is not None:
            found = self.selector.rank(table, found)
        return found[: method.prototypes]

    @torch.no_grad()
    def describe(
        self, tables: Table | Grid | Sequence[Table | Grid], plans: Sequence[Plan] | None = None, beams: int = 4,
        max_new_tokens: int = TARGET_TOKENS, batch_size: int = 8, backgrounds: Sequence[Sequence[str]] | None = None,
    ) -> list[str]:  # fmt: skip
        """A description of every table, by beam search.

        plans, backgrounds: of every table, instead of the planner's and the retriever's.
        """
        some = [tables] if isinstance(tables, Table | Grid) else list(tables)
        sources = [
            self.source(
                table, None if plans is None else plans[i], background=None if backgrounds is None else backgrounds[i]
            )
            for i, table in enumerate(some)
        ]
        found: list[str] = []
        pad, end = special(self.tokenizer, "pad"), special(self.tokenizer, "eos")
        for start in range(0, len(sources), batch_size):
            given = batch(sources[start : start + batch_size], pad, left=self.causal)
            given = {name: value.to(self.model.device) for name, value in given.items()}
            read = given["input_ids"].shape[1] if self.causal else 0  # generate() gives a decoder's source back
            most = int(min(max_new_tokens, self._positions - max(read, 1)))  # what there are places for
            ends = {"pad_token_id": pad, "eos_token_id": end} if self.causal else {}
            out = self.model.generate(**given, num_beams=beams, do_sample=False, max_new_tokens=most, **ends)
            found += [text.strip() for text in self.tokenizer.batch_decode(out[:, read:], skip_special_tokens=True)]
        return found

    # -- the stages --------------------------------------------------------------------------------------------------

    def fit(
        self, pairs: Sequence[tuple[Any, str]], corpus: Iterable[str] = (), stages: Stages = Stages(),
        selector_model: str | None = None, planner_model: str | None = None, retriever_model: str | None = None,
        rerank: bool = True, target_tokens: int = TARGET_TOKENS,
    ) -> dict[str, list[float]]:  # fmt: skip
        """Losses of every stage, by its name. Each trains its own parameters and leaves the others' bits as they were.

        pairs: tables (`Table`, for ctrlscitab `Grid`) with their descriptions, of at most `target_tokens`.
        rerank: a selector sorts prototypes; without, they stay in BM25's order.
        """
        method = self.method
        losses: dict[str, list[float]] = {}
        if isinstance(method, CTRLSciTab):
            if method.background:
                self.retriever = self._fit_retriever(pairs, stages.retriever_steps, retriever_model)
            losses["generator"] = self.fit_generator(pairs, stages.generator, target_tokens)
            return losses
        assert isinstance(method, SlotMethod)
        texts = list(corpus)
        if texts:
            self.candidates = Candidates(texts)
        tables = [table for table, _ in pairs]
        if method.plans and method.planner != "oracle":
            self.planner = make_planner(method.planner, pairs, self.tokenizer, planner_model, stages.planner, losses)
        if method.prototypes and rerank:
            assert self.candidates is not None or self._no_corpus()
            self.selector = PrototypeSelector(selector_model, self.tokenizer)
            examples = [(t, text, self.candidates.find(t, method.candidates, [text])) for t, text in pairs]  # type: ignore[union-attr]
            losses["selector"] = self.selector.fit(examples, stages.selector)
        if method.adapter:
            losses["knowledge"] = self.fit_knowledge(tables, stages.knowledge, [text for _, text in pairs])
        losses["generator"] = self.fit_generator(pairs, stages.generator, target_tokens)
        return losses

    def _fit_retriever(self, pairs: Sequence[tuple[Grid, str]], steps: int, model: str | None) -> Any:
        method = self.method
        assert isinstance(method, CTRLSciTab)
        for option, value in (("retriever", method.retriever), ("query_for_train", method.query_for_train)):
            if value == "oracle":
                raise ValueError(
                    f"{option}='oracle': it reads references, which a table to describe has not; use a recipe"
                )
        grids, texts = [grid for grid, _ in pairs], [text for _, text in pairs]
        return make_retriever(method.retriever, grids, texts, self.tokenizer, model, steps)

    def _no_corpus(self) -> bool:
        raise ValueError(f"corpus=(): method {self.method.name!r} learns from sentences of the domain; give some")

    def fit_knowledge(
        self, tables: Sequence[Table], stage: Stage, without: Sequence[str] = (), part: str = "knowledge"
    ) -> list[float]:
        """Stage 2: the adapter alone learns to fill in what tables say in sentences of the corpus.

        part: "host" trains the host instead, as a comparison to the adapter.
        """
        method = self.method
        assert isinstance(method, SlotMethod)
        assert self.candidates is not None or self._no_corpus()
        found = [(table, self.candidates.find(table, method.candidates, without)) for table in tables]  # type: ignore[union-attr]
        examples = []
        for table, masked, text in knowledge_pairs(
            found, method.knowledge, method.mask_unit, method.mask_source, stage.seed
        ):
            ids = self.linearizer.ids(masked)
            if method.knowledge_with_table:
                ids = [*self.linearizer.table(table), *ids]
            examples.append(([*ids[:KNOWLEDGE_TOKENS], *self.cue], self.target(text, KNOWLEDGE_TOKENS)))
        if not examples:
            raise ValueError(
                "corpus: no sentence of it shares a word with a table, so the adapter has nothing to learn"
            )
        self.model.train_part(part)
        losses = train(self.model, examples, self.loss, stage)
        self.model.train_part(method.trains)
        return losses

    def fit_generator(
        self, pairs: Sequence[tuple[Table | Grid, str]], stage: Stage, most: int = TARGET_TOKENS,
        watch: Callable[[int], None] | None = None, backgrounds: Sequence[Sequence[str]] | None = None,
    ) -> list[float]:  # fmt: skip
        """Stage 3: the host learns descriptions of at most `most` tokens, with the references' own plans as prompts.

        watch: called after every step with the number of steps done.
        backgrounds: of every pair, instead of what the retriever chooses.
        """
        method = self.method
        draw = torch.Generator().manual_seed(stage.seed)
        examples = []
        for number, (table, text) in enumerate(pairs):
            plan, given = None, None if backgrounds is None else backgrounds[number]
            if isinstance(method, SlotMethod) and method.plans:
                slots = table.slots() if isinstance(table, Grid) else table
                noisy = method.plan_noise and torch.rand((), generator=draw) < method.plan_noise
                plan = None if noisy else gold_plan(slots, text)  # None: the planner's
            examples.append((self.source(table, plan, [text], given), self.target(text, most)))
        return train(self.model, examples, self.loss, stage, watch)

    def target(self, text: str, most: int) -> list[int]:
        text = f" {text}" if self.causal else text  # it goes on from the source
        return [*self.linearizer.plain(text)[: most - 1], special(self.tokenizer, "eos")]

    def loss(self, examples: list[tuple[list[int], list[int]]]) -> Tensor:
        """Cross-entropy of targets."""
        sources, targets = zip(*examples, strict=True)
        size = max(map(len, targets))
        if self.causal:  # padded on the left, so that the last places hold all targets and logits are theirs alone
            rows = [[*source, *target] for source, target in examples]
            given = batch(rows, special(self.tokenizer, "pad"), left=True)
            labels = torch.tensor([[*[-100] * (size + 1 - len(row)), *row] for row in targets])
            more: dict[str, Any] = {"logits_to_keep": size + 1}
        else:
            given, more = batch(sources, special(self.tokenizer, "pad")), {}
            labels = torch.tensor([[*row, *[-100] * (size - len(row))] for row in targets])
        given = {name: value.to(self.model.device) for name, value in {**given, "labels": labels}.items()}
        return self.model(**given, **more).loss


def make_planner(
    kind: str, pairs: Sequence[tuple[Table, str]], tokenizer: Any, model: str | None = None, stage: Stage | int = 1000,
    losses: dict[str, list[float]] | None = None,
) -> ContentPlanner:  # fmt: skip
    """A planner trained on the plans of the pairs' descriptions; "auto" depends on the number of pairs."""
    if isinstance(stage, int):
        stage = Stage(steps=stage, batch_size=8, lr=2e-5 if model else 5e-4, warmup=min(50, stage))
    kind = planner_for(kind, len(pairs))
    planner: ContentPlanner
    if kind == "pointer":
        planner = PointerPlanner(tokenizer, model, seed=stage.seed)
    elif kind == "crf":
        planner = CRFPlanner([key for table, _ in pairs for key in table.keys], tokenizer, model, seed=stage.seed)
    elif kind == "seq2seq":
        planner = Seq2SeqPlanner(small_seq2seq(tokenizer, stage.seed), tokenizer)
    else:
        raise ValueError(f"planner={kind!r}: use auto, pointer, crf or seq2seq")
    found = planner.fit([(table, gold_plan(table, text)) for table, text in pairs], stage)
    if losses is not None:
        losses["planner"] = found
    return planner


def small_seq2seq(tokenizer: Any, seed: int) -> nn.Module:
    """A T5 of two layers from scratch."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    pad = special(tokenizer, "pad")
    fields: dict[str, Any] = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    fields |= {"vocab_size": len(tokenizer), "eos_token_id": special(tokenizer, "eos")}
    return T5ForConditionalGeneration(T5Config(**fields, pad_token_id=pad, decoder_start_token_id=pad))  # type: ignore[call-arg]

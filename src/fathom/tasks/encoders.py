"""Base of the tasks with encoders: models by family, from our configs or transformers', and their cost.

Our families (bart, longt5, decoder) take a section `encoder`. Others are transformers' own models with their own config
fields. They serve as baselines; torch's counter counts their FLOPs on one forward, as they have no closed form here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import datasets
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, PreTrainedTokenizerFast

from fathom.data import DataConfig, PreparedData, Source, load_tokenizer
from fathom.data.packing import IGNORED
from fathom.data.prepared import build_once, cache_key
from fathom.data.tokenizer import tokenizer_hash
from fathom.tasks.base import Sizes, Task


class EncoderTask(Task):
    """Base of `seq2seq` and `classification`.

    Attributes:
        families: configs by the name that a recipe's `family` gives; the first is the default.
        auto: the Auto class that makes and loads their models.
        specials: special tokens that are added to a tokenizer without them.
        markers: tokens that every source may have, added to a tokenizer that does not know them.
    """

    families: ClassVar[dict[str, Any]]
    auto: ClassVar[Any]
    specials: ClassVar[tuple[str, ...]]
    markers: ClassVar[tuple[str, ...]] = ()
    checkpoint_fields = ("encoder",)
    unused: ClassVar[tuple[str, ...]] = ("document_mask", "keep_remainder", "streaming")

    @classmethod
    def model_fields(cls) -> list[str]:
        fields = {"family"}
        for config in cls.families.values():
            fields |= {field.name for field in dataclasses.fields(config) if not field.name.startswith("_")}
        return sorted(fields)

    @property
    def model_class(self) -> Any:
        return self.auto

    def model_config(self, fields, data, tokenizer):
        fields = dict(fields)
        checkpoint, family = fields.pop("checkpoint", None), fields.pop("family", None)
        if checkpoint is not None:
            return self._checkpoint_config(checkpoint, fields)
        family = family or next(iter(self.families))
        if family not in self.families:
            raise ValueError(f"model.family={family!r}: task {self.name!r} has {', '.join(self.families)}")
        kind = self.families[family]
        known = {field.name for field in dataclasses.fields(kind)}
        unknown = [name for name, value in fields.items() if name not in known and value is not None]
        if unknown:
            raise ValueError(
                f"model.{unknown[0]}={fields[unknown[0]]!r}: family {family!r} has no such field; "
                f"a method without it says {unknown[0]}: null"
            )
        fields = {name: value for name, value in fields.items() if name in known}
        if tokenizer is None and isinstance(data.tokenizer, str):
            tokenizer = self.with_specials(load_tokenizer(data.tokenizer))
        found: dict[str, Any] = {"max_position_embeddings": data.block_size + 1}
        if tokenizer is None:
            found["vocab_size"] = data.tokenizer["bpe"] + len(self.specials + self.markers)  # type: ignore[index]
        else:
            found["vocab_size"] = max(tokenizer.get_vocab().values()) + 1
            found |= {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
        for name, value in {**found, **self.defaults(kind, found, data)}.items():
            if fields.get(name) is None:
                fields[name] = value
        return kind(**fields)

    def defaults(self, kind: Any, found: dict[str, Any], data: DataConfig) -> dict[str, Any]:
        """Fields that the task and the data decide, beside those `found` in the tokenizer."""
        raise NotImplementedError  # abstract

    def with_specials(self, tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
        """The tokenizer with all special tokens that the task needs; its padding token differs from its EOS."""
        for name in self.specials:
            given = getattr(tokenizer, f"{name}_token")
            if given is None or given == tokenizer.eos_token:
                tokenizer.add_special_tokens({f"{name}_token": f"<{name}>"})
        known = tokenizer.get_vocab()
        tokenizer.add_tokens([marker for marker in self.markers if marker not in known], special_tokens=True)
        return tokenizer

    def _checkpoint_config(self, checkpoint: str, changes: dict[str, Any]) -> Any:
        stored = AutoConfig.from_pretrained(checkpoint)
        for kind in self.families.values():
            if stored.model_type in (kind.model_type, getattr(getattr(kind, "stock", None), "model_type", None)):
                return kind.from_pretrained(checkpoint, **changes)
        raise ValueError(
            f"model.checkpoint={checkpoint!r}: model_type={stored.model_type!r}; task {self.name!r} has the families "
            f"{', '.join(self.families)}"
        )

    def sections(self, config):
        return {"encoder": config.encoder} if is_own(config) else {}

    def example_flops(self, config: Any, block_size: int) -> float:
        """FLOPs of one forward on one example."""
        raise NotImplementedError  # abstract

    def training_flops(self, config, block_size, checkpointing, ran=None):
        """FLOPs of three forwards, with checkpointing of four: an upper bound, as the head runs three times."""
        return (4 if checkpointing else 3) * self.example_flops(config, block_size) / block_size

    def sizes(self, config, block_size, dtype, ran=None):
        kind: Any = type(config)
        total, tables = parameters(self.auto, written(config), kind)
        flops = self.example_flops(config, block_size) / block_size
        return Sizes(total, total - tables, flops, self.cache_bytes(config, block_size, dtype) / block_size)

    def cache_bytes(self, config: Any, block_size: int, dtype: torch.dtype) -> float:
        """Bytes that decoding keeps for one source."""
        return 0.0

    def answer_flops(self, config, data, block_size, ran: Sequence[float] | None = None):
        return self.example_flops(config, block_size)

    def picture_tokens(self, data, count):
        """As of every task, without padding."""
        rows, wanted = data.validation, max(1, count // torch.as_tensor(data.validation[0]["input_ids"]).numel())
        some = (rows[i] for i in range(min(wanted, len(rows))))
        return torch.cat(
            [torch.as_tensor(row["input_ids"])[torch.as_tensor(row["attention_mask"]).bool()] for row in some]
        )

    def forward(self, model: Any, **batch: Any) -> Any:
        labels, items = batch.pop("labels"), batch.pop("num_items_in_batch", None)
        taken = inspect.signature(getattr(model, "module", model).forward).parameters
        batch = {name: value for name, value in batch.items() if name in taken}
        out = model(**batch, labels=labels)
        smoothing = getattr(self, "label_smoothing", 0.0) if model.training else 0.0
        total = F.cross_entropy(
            out.logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing,
            reduction="sum",
        )  # fmt: skip
        out["loss"] = total / (self.targets({"labels": labels}).clamp(min=1) if items is None else items)
        return out

    def targets(self, batch):
        return (batch["labels"] != IGNORED).sum()

    def kept(
        self, source: Source, tokenizer: PreTrainedTokenizerFast, cache: Path, options: list[Any], data: DataConfig,
        rows: Callable[[], Iterator[dict[str, Any]]],
    ) -> datasets.Dataset:  # fmt: skip
        """The rows as a data set on disk, made once; at most as many as there are whole blocks in `max_tokens`."""
        tokens = data.max_tokens if source.argument == "data.train" else data.max_validation_tokens
        most = tokens and tokens // data.block_size
        options = [*options, data.block_size, most]
        folder = cache / f"{self.name}-{cache_key(source.content_hash(), tokenizer_hash(tokenizer), options)}"

        def build(work: Path) -> None:
            found = list(itertools.islice(rows(), most))
            if not found:
                raise ValueError(f"{source.argument}={source.name!r}: has no rows to learn from")
            datasets.Dataset.from_list(found).save_to_disk(str(work / "rows"))

        build_once(folder, build)
        return datasets.load_from_disk(str(folder / "rows")).with_format("torch")

    def held_out_size(self, data: PreparedData) -> str:
        assert data.validation is not None
        return f"{len(data.validation):,} rows"


@functools.cache
def parameters(auto: Any, written: str, kind: Any) -> tuple[int, int]:
    """All parameters of a model, and those of its tables and head, without memory for them."""
    with torch.device("meta"):
        model = auto.from_config(kind.from_dict(json.loads(written)))
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    if head is not None:
        tables[id(head.weight)] = head.weight.numel()
    return sum(p.numel() for p in model.parameters()), sum(tables.values())


@functools.cache
def _counted(auto: Any, written: str, kind: Any, source: int, target: int | None) -> float:
    model = auto.from_config(kind.from_dict(json.loads(written))).eval()
    batch: dict[str, Tensor] = {"input_ids": torch.zeros(1, source, dtype=torch.long)}
    if target is not None:
        batch["labels"] = torch.zeros(1, target, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**batch)
    return float(counter.get_total_flops())


def counted_flops(auto: Any, config: Any, source: int, target: int | None) -> float:
    """FLOPs of one forward of a model of transformers, by torch's counter: it runs once, with random weights."""
    kind: Any = type(config)
    return _counted(auto, written(config), kind, source, target)


def is_own(config: Any) -> bool:
    """Whether the config has a section `encoder`, and so a closed form."""
    return hasattr(config, "host")


def written(config: Any) -> str:
    """The config as JSON, which counts are cached by."""
    return json.dumps(config.to_dict(), default=str)


def encode_row(texts: Sequence[str], tokenizer: Any, room: int) -> list[list[int]]:
    """Token ids of texts, cut to `room`."""
    found = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return [ids[:room] for ids in found]


def padded(ids: list[int], size: int, fill: int) -> list[int]:
    """The ids, with `fill` behind them up to `size`."""
    return ids + [fill] * (size - len(ids))

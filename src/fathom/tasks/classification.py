"""Classification of texts, or of pairs of texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import datasets
import torch
from transformers import AutoModelForSequenceClassification, FNetConfig, NystromformerConfig

from fathom.cost.encoders import classifier_flops
from fathom.data import DataConfig, PreparedData, Source
from fathom.data.prepared import cache_key, make_tokenizer
from fathom.models.device import device_of
from fathom.models.encoder_configs import FathomEncoderConfig
from fathom.models.method import check_range
from fathom.tasks.base import Sample, Score, register_task
from fathom.tasks.encoders import EncoderTask, counted_flops, encode_row, is_own, padded

BATCH = 32
SAMPLES = 4


@register_task("classification")
@dataclass(frozen=True)
class Classification(EncoderTask):
    """Options:

    text_field, second_field: fields of a row; a second text makes two towers.
    label_field: field of the class, a whole number from 0 on.
    classes: number of classes.
    """

    text_field: str = "text"
    second_field: str | None = None
    label_field: str = "label"
    classes: int = 2

    families: ClassVar[dict[str, Any]] = {
        "decoder": FathomEncoderConfig,
        "fnet": FNetConfig,
        "nystromformer": NystromformerConfig,
    }
    auto = AutoModelForSequenceClassification
    specials = ("pad", "cls")  # the last id is the CLS token
    unused = (*EncoderTask.unused, "text_field")  # the task's own option
    summary = "Say which class a text, or a pair of texts, belongs to."
    scores = (
        Score("accuracy", "of rows classified right", "higher", "The share of held-out rows whose class is found."),
    )
    held_out = "held-out rows"
    loss_unit = "nats per row"
    answer = "text and its class"
    cost_heading = "FLOPs per row"
    reference_name = "majority"
    reference_note = "The class that is most frequent in training, for every row."
    samples_note = "The first held-out rows"

    def __post_init__(self) -> None:
        check_range("task classification", "classes", self.classes, 2)

    def check(self, data: DataConfig) -> None:
        super().check(data)
        self.refuse_text(data)

    def model_config(self, fields, data, tokenizer):
        config = super().model_config(fields, data, tokenizer)
        if isinstance(config, NystromformerConfig):
            refuse_other_attention(config, data.block_size)
        return config

    def defaults(self, kind, found, data):
        if kind is FathomEncoderConfig:
            return {"num_labels": self.classes, "towers": 1 if self.second_field is None else 2}
        if self.second_field is not None:
            raise ValueError(f"task.second_field={self.second_field!r}: two towers are of family 'decoder' alone")
        own = {"segment_means_seq_len": data.block_size} if kind is NystromformerConfig else {}
        return {"num_labels": self.classes, **own}

    def forward(self, model: Any, **batch: Any) -> Any:
        inner = getattr(model, "module", model)
        if isinstance(inner.config, NystromformerConfig):
            # of a mask [B, T] transformers makes one for T queries, but landmarks ask; one of four axes is added as is
            padding = batch["attention_mask"][:, None, None] == 0
            batch["attention_mask"] = padding * torch.finfo(inner.dtype).min
        return super().forward(model, **batch)

    def example_flops(self, config, block_size):
        if is_own(config):
            return classifier_flops(config, block_size)
        return counted_flops(self.auto, config, block_size, None)

    def prepare(self, data: DataConfig, cache_dir: Path) -> PreparedData:
        cache = Path(cache_dir)
        cache.mkdir(parents=True, exist_ok=True)
        train, held_out = self.sources(data)
        names = [str(name) for name in self.section.values()]
        tokenizer = make_tokenizer(
            data,
            lambda: ("\n".join(self._row(row, where)[0]) for row, where in train.rows()),
            lambda: cache_key(train.content_hash(), *names),
            cache,
        )

        tokenizer = self.with_specials(tokenizer)

        def rows(text: Source) -> datasets.Dataset:
            return self.kept(text, tokenizer, cache, names, data, lambda: self._rows(text, tokenizer, data.block_size))

        training, validation = rows(train), None if held_out is None else rows(held_out)
        count = 0 if validation is None else len(validation)
        size = 0 if held_out is None else sum(len(t.encode()) for r, w in held_out.rows() for t in self._row(r, w)[0])
        return PreparedData(training, validation, tokenizer, count, size)

    def _row(self, row: dict[str, Any], where: str) -> tuple[list[str], int]:
        texts = []
        for option in ("text_field", "second_field"):
            name = getattr(self, option)
            if name is None:
                continue
            if not isinstance(row.get(name), str) or not row[name]:
                raise ValueError(
                    f"{where}: no text in field {name!r} (found: {', '.join(row) or 'none'}); set task.{option}"
                )
            texts.append(row[name])
        label = row.get(self.label_field)
        if type(label) is not int or not 0 <= label < self.classes:
            raise ValueError(
                f"{where}: {self.label_field}={label!r}: needs a whole number from 0 to {self.classes - 1}; set "
                "task.classes or task.label_field"
            )
        return texts, label

    def _rows(self, source: Source, tokenizer: Any, size: int) -> Iterator[dict[str, Any]]:
        for row, where in source.rows():
            texts, label = self._row(row, where)
            ids = encode_row(texts, tokenizer, size)
            fields = {
                "input_ids": [padded(one, size, tokenizer.pad_token_id) for one in ids],
                "attention_mask": [padded([1] * len(one), size, 0) for one in ids],
            }
            found = {name: value if self.second_field else value[0] for name, value in fields.items()}
            yield {**found, "labels": label}

    @torch.no_grad()
    def classes_of(self, model: Any, data: PreparedData, rows: int) -> list[int]:
        """The likeliest class of the first held-out rows."""
        assert data.validation is not None
        found: list[int] = []
        for start in range(0, rows, BATCH):
            batch = self.collate([data.validation[i] for i in range(start, min(start + BATCH, rows))])
            batch = {name: value.to(model.device) for name, value in batch.items()}
            found += self.forward(model, **batch).logits.argmax(-1).tolist()
        return found

    def score(self, data: PreparedData, loss: float | None, checkpoint: Path) -> dict[str, float | None]:
        if loss is None:
            return {"accuracy": None}
        assert data.validation is not None
        model = self.auto.from_pretrained(checkpoint)
        model.eval().to(device_of())
        right = data.validation["labels"][:].tolist()
        found = self.classes_of(model, data, len(right))
        return {"accuracy": sum(a == b for a, b in zip(found, right, strict=True)) / len(right)}

    def reference(self, data: PreparedData, sequences: int) -> float:
        assert data.validation is not None
        seen = torch.tensor([int(row["labels"]) for row in itertools.islice(data.train, sequences)])
        return (data.validation["labels"][:] == seen.mode().values).double().mean().item()

    def samples(self, model: Any, data: PreparedData, room: int) -> list[Sample]:
        assert data.validation is not None
        rows = min(SAMPLES, len(data.validation))
        found = self.classes_of(model, data, rows)
        samples = []
        for index in range(rows):
            row = data.validation[index]
            ids = row["input_ids"][row["attention_mask"].bool()]
            text = str(data.tokenizer.decode(ids, skip_special_tokens=True))
            samples.append(Sample(text, str(found[index]), str(int(row["labels"]))))
        return samples

    def picture_tokens(self, data: PreparedData, count: int) -> Any:
        return super().picture_tokens(data, count).flatten()


def refuse_other_attention(config: NystromformerConfig, block_size: int) -> None:
    """Raise ValueError where transformers' Nyströmformer would fail, or read rows of `block_size` tokens by plain
    attention: it does so where each token is a landmark, as with transformers' defaults."""
    length, landmarks = config.segment_means_seq_len, config.num_landmarks
    if length != block_size:
        raise ValueError(
            f"model.segment_means_seq_len={length}: landmarks are means over rows of that length, and rows have "
            f"data.block_size={block_size}; give that, or leave it out"
        )
    if not 0 < landmarks < length or length % landmarks:
        raise ValueError(
            f"model.num_landmarks={landmarks}: must divide data.block_size={length} and be less; with as many "
            "landmarks as tokens, attention is plain"
        )
    if config.conv_kernel_size % 2 == 0:
        raise ValueError(
            f"model.conv_kernel_size={config.conv_kernel_size}: must be odd, or the row changes its length"
        )
    if config.inv_coeff_init_option:
        raise ValueError("model.inv_coeff_init_option=True: transformers' model fails with it; leave it out")

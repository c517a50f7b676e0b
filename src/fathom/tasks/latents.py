"""Base of the two stages of a latent diffusion model: the model on a trained encoder, and its data.

A recipe's `model` names the `encoder`, a folder or hub name, with the sizes of `denoiser` and `decoder` and the options
`codar`; or the `checkpoint` of another stage, with another decoder if the recipe says so.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from fathom.data import DataConfig, PreparedData, Source, collate, load_tokenizer, prepare, token_byte_lengths
from fathom.data.packing import IGNORED, Example, encode, pack_examples, target_tokens, write_blocks
from fathom.data.prepared import build_once, cache_key, make_tokenizer
from fathom.data.tokenizer import tokenizer_hash
from fathom.latents.configuration import FathomLatentConfig
from fathom.models.device import device_of
from fathom.tasks.base import Sizes, Task
from fathom.tasks.masked_diffusion import mixed

FIT_TOKENS = 65_536  # of the training set, to which the norm is fitted
FIT_BATCH = 32  # rows
LATER = ("memory_positions", "diagonal")  # options of the decoder alone
GOLDEN = (5**0.5 - 1) / 2


class LatentTask(Task):
    """Base of `latent_diffusion` and `contextual_decoder`, which are stages of one model.

    Attributes:
        stage: of FathomForLatentDiffusion.
        unwrapped: option of both tasks.
    """

    stage: ClassVar[str]
    unwrapped: bool
    held_out = "held-out text"
    reference_name = "unigram"
    shards = ("Denoiser",)  # adaLN and the decoder's memory run parts of layers
    numbered = True  # a row's time follows from the seed and its number
    checkpoint_fields = ("decoder", "codar")

    @classmethod
    def model_fields(cls) -> list[str]:
        return ["encoder", "denoiser", "decoder", "codar", "length"]

    @property
    def model_class(self) -> Any:
        from fathom.latents.model import FathomForLatentDiffusion

        return FathomForLatentDiffusion

    def model_config(self, fields: dict[str, Any], data: DataConfig, tokenizer: Any) -> FathomLatentConfig:
        from fathom.latents.model import new_config

        fields = {"length": data.block_size, **fields}
        checkpoint = fields.pop("checkpoint", None)
        if checkpoint is not None:
            return self._continued(checkpoint, {n: fields[n] for n in ("decoder", "codar") if fields.get(n)})
        if not isinstance(fields.get("encoder"), str):
            raise ValueError(
                f"model.encoder={fields.get('encoder')!r}: name the folder or hub name of a trained encoder, whose "
                "states become the vectors (task 'masked_diffusion' trains one)"
            )
        encoder = fields.pop("encoder")
        if tokenizer is None:
            if not isinstance(data.tokenizer, str):
                raise ValueError(
                    f"data.tokenizer={data.tokenizer!r}: encoder and decoder read one tokenizer; name {encoder!r}"
                )
            tokenizer = load_tokenizer(data.tokenizer)
        return new_config(encoder, tokenizer, **fields)

    def _continued(self, checkpoint: str, changes: dict[str, Any]) -> FathomLatentConfig:
        stored = FathomLatentConfig.from_pretrained(checkpoint)
        for name, value in changes.get("codar", {}).items():
            if name not in LATER and value != stored.codar.get(name):
                raise ValueError(
                    f"codar option {name}={value!r}: model.checkpoint has {stored.codar.get(name)!r}, which it was "
                    f"trained with; only {', '.join(LATER)} may change"
                )
        if not changes:
            return stored
        written = {**stored.to_dict(), **changes, "codar": {**stored.codar, **changes.get("codar", {})}}
        written["trained"] = [stage for stage in stored.trained if stage != "contextual_decoder"]
        return FathomLatentConfig(**{name: value for name, value in written.items() if name != "model_type"})

    def new_model(self, config: Any, fields: dict[str, Any], data: PreparedData) -> Any:
        """The model of another stage, or a new one on the encoder with its norm fitted to the training set. Only this
        stage's part has gradients. Raises ValueError for an encoder with another tokenizer, and for longer rows."""
        kind, checkpoint = self.model_class, fields.get("checkpoint")
        if len(data.train[0]["input_ids"]) > config.length:
            raise ValueError(
                f"data.block_size={len(data.train[0]['input_ids'])}: the model's rows have length={config.length}"
            )
        if checkpoint is None:
            refuse_other_tokenizer(fields["encoder"], data.tokenizer)
            model = kind.from_encoder(fields["encoder"], config)
            place = device_of()
            model.space.to(place).fit(batches(data, config, place))
        else:
            refuse_other_tokenizer(checkpoint, data.tokenizer)
            model = kind.from_pretrained(checkpoint, dtype=torch.float32)
            if model.config.decoder != config.decoder or model.config.codar != config.codar:
                earlier, model = model, kind(config)
                for part in ("space", "denoiser", "denoiser_mean"):
                    if hasattr(model, part):
                        getattr(model, part).load_state_dict(getattr(earlier, part).state_dict())
        if self.stage == "latent_diffusion" and config.options.source == "learned":
            # the embeddings move away from those that a decoder was trained on
            model.config.trained = [stage for stage in model.config.trained if stage == self.stage]
        self.check_stages(model)
        model.config.trained = sorted({*model.config.trained, self.stage})
        model.train_stage(self.stage)
        return model

    def check_stages(self, model: Any) -> None:
        """Raise ValueError for a stage that must come before this one and did not."""

    def sections(self, config: Any) -> dict[str, dict[str, Any]]:
        from fathom.latents.codar import CoDAR

        plain = dataclasses.asdict(CoDAR())
        return {"latents": {"name": CoDAR.name, **{k: v for k, v in config.codar.items() if v != plain[k]}}}

    def sizes(self, config: Any, block_size: int, dtype: torch.dtype, ran: Any = None) -> Sizes:
        from fathom.latents.cost import cache_bytes, decoder_flops

        with torch.device("meta"):
            model = self.model_class(config)
        total = sum(model.part_parameters().values())
        tables = 2 * config.vocab_size * config.decoder_config.hidden_size
        return Sizes(total, total - tables, decoder_flops(config, block_size), cache_bytes(config, dtype.itemsize))

    def check(self, data: DataConfig) -> None:
        super().check(data)
        if self.unwrapped and (data.keep_remainder or data.document_mask):
            named = "keep_remainder" if data.keep_remainder else "document_mask"
            raise ValueError(f"data.{named}=True: with unwrapped=True a row is one document, padded; leave it out")
        if data.streaming:
            raise ValueError("data.streaming=True: times follow from the number of a row; leave it out")

    def prepare(self, data: DataConfig, cache_dir: Path) -> PreparedData:
        if not self.unwrapped:
            return prepare(data, cache_dir)
        cache = Path(cache_dir)
        cache.mkdir(parents=True, exist_ok=True)
        train, held_out = self.sources(data, data.text_field)
        tokenizer = make_tokenizer(data, train.documents, train.content_hash, cache)
        blocks = padded_rows(train, tokenizer, data, data.max_tokens, cache)
        validation, targets, size = None, 0, 0
        if held_out is not None:
            validation = padded_rows(held_out, tokenizer, data, data.max_validation_tokens, cache)
            targets, size = target_tokens(validation, token_byte_lengths(tokenizer))
        return PreparedData(blocks, validation, tokenizer, targets, size)

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Training rows with times `t`, spread evenly over consecutive rows. In held-out rows the first token is only
        context, as for an autoregressive model."""
        draws = [example["draw"] for example in examples if "draw" in example]
        batch = collate([{name: x for name, x in example.items() if name != "draw"} for example in examples])
        places = torch.arange(batch["labels"].shape[1])
        ends = batch["labels"].shape[1] - 1 - (batch["labels"] != IGNORED).flip(1).int().argmax(1)
        if bool((batch["labels"] == IGNORED).any()):
            batch["attention_mask"] = (places <= ends[:, None]).long()
        batch["labels"] = batch["labels"].clone()
        batch.pop("position_ids", None)
        if draws:
            starts = [torch.Generator().manual_seed(mixed(int(seed), -1)) for seed, _ in draws]
            numbers = torch.tensor([int(number) for _, number in draws], dtype=torch.float64)
            first = torch.stack([torch.rand((), dtype=torch.float64, generator=g) for g in starts])
            batch["t"] = ((first + numbers * GOLDEN) % 1).float()
        else:
            batch["labels"][:, 0] = IGNORED
        return batch

    def targets(self, batch: Any) -> Tensor:
        return (batch["labels"] != IGNORED).sum()


def padded_rows(source: Source, tokenizer: Any, data: DataConfig, most: int | None, cache: Path) -> datasets.Dataset:
    """Rows of one document each: its first tokens and EOS, padded to the block with tokens that have no label."""
    size, eos = data.block_size, tokenizer.eos_token_id
    folder = cache / f"padded-{cache_key(source.content_hash(), tokenizer_hash(tokenizer), [size, most])}"

    def examples() -> Iterator[Example]:
        for text in source.documents():
            ids = encode([text], tokenizer)[0][: size - 1]
            if ids:
                tokens = np.array([*ids, eos], dtype=np.int32)
                yield Example(tokens, tokens)

    def build(work: Path) -> None:
        columns = pack_examples(examples(), size, eos, together=False)
        if not write_blocks(columns, work / "blocks.arrow", most and most // size):
            raise ValueError(f"{source.argument}={source.name!r}: has no text to learn from")

    build_once(folder, build)
    return datasets.Dataset.from_file(str(folder / "blocks.arrow")).with_format("torch")


def batches(data: PreparedData, config: FathomLatentConfig, place: torch.device) -> Any:
    """(input_ids, mask) of the rows that the norm is fitted to."""
    size = len(data.train[0]["input_ids"])
    rows = itertools.islice(iter(data.train), max(1, FIT_TOKENS // size))
    while some := list(itertools.islice(rows, FIT_BATCH)):
        batch = collate(some)
        mask = batch["labels"] != IGNORED
        yield batch["input_ids"].to(place), None if bool(mask.all()) else mask.to(place)


def refuse_other_tokenizer(checkpoint: str, tokenizer: Any) -> None:
    """Raise ValueError where the tokenizer of a checkpoint is another one than that of the data."""
    own = AutoTokenizer.from_pretrained(checkpoint)
    if own.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"{checkpoint}: its tokenizer is another one than that of the data ({len(own.get_vocab())} and "
            f"{len(tokenizer.get_vocab())} tokens); encoder and decoder read one: set data.tokenizer={checkpoint!r}"
        )

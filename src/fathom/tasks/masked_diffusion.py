"""Masked diffusion: predicting hidden tokens of a text from all others, which trains a generative model.

    t ~ U(0, 1) a row;   p = (1 − ε) t + ε;   every token is hidden with probability p
    loss = Σ_{hidden} w · (−log p(x_j | tokens not hidden)) / denominator

with w = 1/p (LLaDA, arXiv 2502.09992), or MDLM's noise (arXiv 2406.07524): p = (1 − ε) t, w = 1/t. The first token of a
row is context, as for an autoregressive model, and never hidden. Held-out text is scored by the Monte Carlo bound
(fathom.diffusion.likelihood), never by the training loss. A method with `diffusion: {name: none}` is the autoregressive
twin, on the same rows: its score is exact. A method with `diffusion: {name: block}` learns block diffusion (BD3-LM,
arXiv 2503.09573): a block is predicted from itself and from earlier blocks without masks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import AutoConfig, TrainerCallback

from fathom.cost import forward_flops_per_token
from fathom.data import DataConfig, PreparedData, collate, prepare
from fathom.data.packing import IGNORED
from fathom.diffusion.base import check_option, own_blocks
from fathom.diffusion.likelihood import bound
from fathom.evaluate.text import bits_per_byte
from fathom.models.causal_lm import FathomForCausalLM
from fathom.models.configuration import FathomConfig
from fathom.models.hf_versions import FathomOutput
from fathom.models.method import check_choice, check_range
from fathom.tasks.base import Sample, Score, Task, register_task
from fathom.tasks.causal_lm import (
    SAMPLE_TEMPERATURE,
    SAMPLE_TOKENS,
    beginnings,
    bits_of_loss,
    continuation,
    unigram,
)
from fathom.tasks.sft import SFT

MASK_TOKEN = "<|mask|>"
ERROR_ROWS = 32  # whose draws say how sure the bound is
BLOCK = 10  # tokens of a block of the samples
GOLDEN = (math.sqrt(5) - 1) / 2
WEIGHTS = ("1/t", "uniform", "cart")


@register_task("masked_diffusion")
@dataclass(frozen=True)
class MaskedDiffusion(Task):
    """Options:

    eps: ε of the noise.
    noise: "llada": p = (1 − ε) t + ε and weight 1/p; "mdlm": p = (1 − ε) t and weight 1/t, t at least ε.
    weight: of a hidden token's loss, "1/t" as the noise says, "uniform" 1, or "cart" (Dream, arXiv 2508.15487): half
        the geometric mass of the tokens that are not hidden, by their distance.
    cart_p: p of the geometric distribution.
    denominator: what the weighted sum is divided by, over all batches of a step: "token" the tokens that may be hidden;
        "sequence" each row by its own, then by the rows; "batch" the rows.
    antithetic: the t of consecutive rows are spread evenly (steps of the golden ratio from one random start) instead of
        drawn independently.
    random_length: share of the batches that are cut to a random length (texts).
    subs: the mask token has no probability in training either.
    ema: decay of the running mean of the weights, which the trained model gets; 0: it gets the last weights.
    anneal: share of the training over which a later token's chance to be seen grows from 0 to 1 (DiffuLLaMA, arXiv
        2410.17891), for models adapted from autoregressive ones; 0: all are seen from the start.
    block_length: of methods with `diffusion: block` that give none themselves.
    t_granularity: "sequence": one t a row (SDAR), so that masked and block diffusion learn from the same noise;
        "block": one for each `block_length` tokens (BD3-LM), which masked diffusion has no bound for.
    draws: forward passes a row of the held-out bound.
    prompt_field, answer_field: fields of rows of prompt and answer; None reads running text. The prompt is never
        hidden; the EOS tokens that pad a row are, and are learned, which teaches the model to stop.
    """

    eps: float = 1e-3
    noise: str = "llada"
    weight: str = "1/t"
    cart_p: float = 0.3
    denominator: str = "token"
    antithetic: bool = True
    random_length: float = 0.01
    subs: bool = False
    ema: float = 0.0
    anneal: float = 0.0
    block_length: int = 4
    t_granularity: str = "sequence"
    draws: int = 8
    prompt_field: str | None = None
    answer_field: str | None = None

    asked_by_lm_eval = True
    summary = "Predict hidden tokens from all others of the row: masked diffusion."
    scores = (
        Score(
            "bits_per_byte_bound",
            "bits per byte",
            "lower",
            "The bits of the held-out text over its bytes, in separate blocks of {block_size} tokens: of a masked "
            "model an upper bound by Monte Carlo, with the context token and the targets of an autoregressive one, "
            "which has them exactly.",
        ),
    )
    held_out = "held-out text"
    loss_unit = "nats per token, a bound"
    answer = "generated token"
    cost_heading = "FLOPs per token"
    reference_name = "unigram"
    reference_note = "The unigram model knows only how often each token occurs."
    samples_note = f"Filled from left to right in blocks, one token a step, at temperature {SAMPLE_TEMPERATURE}"
    adds_tokens = True  # the mask token
    numbered = True  # noise follows from the seed and the number of a row

    def __post_init__(self) -> None:
        where = "task masked_diffusion"
        check_option(where, "eps", self.eps, 0 < self.eps < 1, "between 0 and 1")
        check_choice(where, "noise", self.noise, ("llada", "mdlm"))
        check_choice(where, "weight", self.weight, WEIGHTS)
        check_option(where, "cart_p", self.cart_p, 0 < self.cart_p <= 1, "above 0 and at most 1")
        check_choice(where, "denominator", self.denominator, ("token", "sequence", "batch"))
        check_option(where, "random_length", self.random_length, 0 <= self.random_length <= 1, "between 0 and 1")
        check_option(where, "anneal", self.anneal, 0 <= self.anneal <= 1, "between 0 and 1")
        check_option(where, "ema", self.ema, 0 <= self.ema < 1, "at least 0 and below 1")
        check_range(where, "draws", self.draws, 1)
        check_range(where, "block_length", self.block_length, 1)
        check_choice(where, "t_granularity", self.t_granularity, ("sequence", "block"))
        both = (self.prompt_field is None) == (self.answer_field is None)
        check_option(where, "answer_field", self.answer_field, both, "given if and only if prompt_field is")

    def callbacks(self) -> list[Any]:
        from fathom.train.running_mean import RunningMean

        means = [RunningMean(self.ema)] if self.ema else []
        return [*means, Opening(self.anneal)] if self.anneal else means

    @property
    def rows(self) -> SFT | None:
        """The `sft` task that reads rows of prompt and answer; None for running text."""
        if self.prompt_field is None or self.answer_field is None:
            return None
        return SFT(prompt_field=self.prompt_field, answer_field=self.answer_field, packing=False)

    @property
    def model_class(self) -> Any:
        from fathom.models.masked_diffusion import FathomForMaskedDiffusion

        return FathomForMaskedDiffusion

    def class_of(self, config: Any) -> Any:
        return self.model_class if is_masked(config) else FathomForCausalLM

    def exact(self, config: Any) -> bool:
        return not is_masked(config)

    def completed(self, fields: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
        """The fields with the section `diffusion`. Its mask token is the tokenizer's, or a new one after all others.
        The autoregressive twin has as many rows of embeddings.
        """
        section = fields.get("diffusion") or {"name": "masked"}
        section = {"name": section} if isinstance(section, str) else dict(section)
        token = section.get("mask_token_id")
        if token is None:
            token = with_mask(tokenizer).mask_token_id if tokenizer is not None else fields["vocab_size"]
            if fields.get("vocab_size") == token:  # counted without it
                fields["vocab_size"] += 1
        if section["name"] == "block":
            section = {"block_length": self.block_length, **section}
        if self.t_granularity == "block" and section["name"] == "masked":
            raise ValueError(
                "t_granularity='block' with diffusion='masked': its bound has one t a row; use 'sequence', or "
                "diffusion: block"
            )
        if self.t_granularity == "block" and section.get("block_length", self.block_length) != self.block_length:
            raise ValueError(
                f"block_length={self.block_length} with diffusion={section}: the noise has a t for each block; give "
                "both the same"
            )
        if self.anneal and section["name"] == "block":
            raise ValueError(f"anneal={self.anneal} with diffusion='block': earlier blocks are seen at once; use 0")
        if section["name"] != "none":
            return {**fields, "diffusion": {**section, "mask_token_id": token}}
        if self.denominator != "token":
            raise ValueError(
                f"denominator={self.denominator!r} beside diffusion: none: an autoregressive model learns from the "
                "mean over tokens; use 'token'"
            )
        return {**fields, "diffusion": section}

    def new_model(self, config: Any, fields: dict[str, Any], data: PreparedData) -> Any:
        """The model of a checkpoint. If its table lacks a row for the mask token, it gets the mean of the others."""
        checkpoint = fields.get("checkpoint")
        if checkpoint is None or not is_masked(config):
            return None
        changes = {name: fields[name] for name in fields if name not in ("checkpoint", "diffusion")}
        if AutoConfig.from_pretrained(checkpoint).vocab_size >= config.vocab_size:
            return None
        first: Any = FathomForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, **changes)
        first.resize_token_embeddings(config.vocab_size)
        model = self.model_class(config)
        model.load_state_dict(first.state_dict())
        return model

    def check(self, data: DataConfig) -> None:
        if self.rows is not None:
            self.rows.check(data)
        if data.streaming:
            raise ValueError("data.streaming=True: the noise follows from the number of a row; leave it out")
        if self.anneal and data.document_mask:
            raise ValueError(
                "data.document_mask=True with anneal: the mask that opens knows no documents; leave one out"
            )
        if data.keep_remainder:
            raise ValueError("data.keep_remainder=True: padding of texts would be seen; leave it out")

    def prepare(self, data: DataConfig, cache_dir: Path) -> PreparedData:
        prepared = prepare(data, cache_dir) if self.rows is None else self.rows.prepare(data, cache_dir)
        return replace(prepared, tokenizer=with_mask(prepared.tokenizer))

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch of training rows, which are numbered, with their noise; held-out rows stay without."""
        draws = [example["draw"] for example in examples if "draw" in example]
        batch = collate([{name: x for name, x in example.items() if name != "draw"} for example in examples])
        batch["labels"] = batch["labels"].clone()
        batch["labels"][:, 0] = IGNORED
        ends = last_label(batch["labels"])
        places = torch.arange(batch["labels"].shape[1])
        if not draws:
            if self.rows is not None:
                batch["attention_mask"] = (places <= ends[:, None]).long()
            return batch
        if self.rows is not None:  # the EOS tokens after the answer are learned
            batch["labels"] = torch.where(places > ends[:, None], batch["input_ids"], batch["labels"])
        generators = [torch.Generator().manual_seed(mixed(int(seed), int(number))) for seed, number in draws]
        of_batch = torch.Generator().manual_seed(mixed(int(draws[0][0]), -2 - int(draws[0][1])))  # no row's own
        if self.rows is None and torch.rand((), generator=of_batch) < self.random_length:
            length = int(torch.randint(2, len(places) + 1, (), generator=of_batch))
            batch = {name: x[:, :length] if x.ndim > 1 else x for name, x in batch.items()}  # `domains`: one a row
        length = batch["labels"].shape[1]
        size = self.block_length if self.t_granularity == "block" else length
        count = -(-length // size)  # of t in a row
        t = torch.stack([torch.rand(count, dtype=torch.float64, generator=g) for g in generators])
        if self.antithetic:
            starts = [torch.Generator().manual_seed(mixed(int(seed), -1)) for seed, _ in draws]
            numbers = torch.tensor([int(number) for _, number in draws], dtype=torch.float64)
            numbers = numbers[:, None] * count + torch.arange(count)
            start = torch.stack([torch.rand((), dtype=torch.float64, generator=g) for g in starts])
            t = (start[:, None] + numbers * GOLDEN) % 1
        return self.hide(batch, t.repeat_interleave(size, dim=1)[:, :length], generators)

    def hide(
        self,
        batch: dict[str, Tensor],
        t: Float[
            Tensor,
            (
                B  # T
            ),
        ],
        generators: Sequence[torch.Generator],
    ) -> dict[str, Tensor]:
        """The batch with its tokens hidden, −1 for the mask token, and the weights of the losses."""
        may = batch["labels"] != IGNORED
        if self.noise == "mdlm":
            t = (1 - self.eps) * t + self.eps
            p, w = (1 - self.eps) * t, 1 / t
        else:
            p = (1 - self.eps) * t + self.eps
            w = 1 / p
        noise = torch.stack([torch.rand(may.shape[1], dtype=torch.float64, generator=g) for g in generators])
        hidden = (noise < p) & may
        weights = w.expand(hidden.shape)
        if self.weight == "uniform":
            weights = torch.ones_like(weights)
        elif self.weight == "cart":
            weights = cart(hidden, self.cart_p)
        weights = weights * hidden
        if self.denominator == "sequence":
            weights = weights / may.sum(1, keepdim=True).clamp(min=1)
        return {
            **batch,
            "input_ids": batch["input_ids"].masked_fill(hidden, -1),
            "loss_weights": weights.float(),
        }

    def counted(self, batch: Mapping[str, Tensor]) -> Tensor:
        if self.denominator == "token" or "loss_weights" not in batch:
            return batch["labels"]
        return torch.zeros_like(batch["labels"][:, :1])  # one a row

    def forward(self, model: Any, **batch: Any) -> Any:
        unwrapped = getattr(model, "module", model)
        items = batch.pop("num_items_in_batch", None)
        items = (self.counted(batch) != IGNORED).sum().clamp(min=1) if items is None else items
        ids = batch.pop("input_ids")
        if not is_masked(unwrapped.config):  # hidden tokens have labels, so that all are known
            batch.pop("loss_weights", None)
            return model(input_ids=torch.where(ids == -1, batch["labels"], ids), num_items_in_batch=items, **batch)
        own = unwrapped.diffusion
        if "loss_weights" in batch:
            if self.subs:
                batch["excluded_token"] = own.mask_token_id
            if own_blocks(unwrapped):
                batch["clean_ids"] = torch.where(ids == -1, batch["labels"], ids)
            ids = ids.masked_fill(ids == -1, own.mask_token_id)
            sight = getattr(unwrapped, "sight", 1.0)
            if sight < 1:
                batch["attention_mask"] = opening(ids.shape[1], sight, ids.device)
            return model(input_ids=ids, num_items_in_batch=items, **batch)
        nats, _ = bound(
            model, ids, batch["labels"] != IGNORED, self.draws, mask_token_id=own.mask_token_id, shift=own.shift,
            attention_mask=batch.get("attention_mask"), position_ids=batch.get("position_ids"),
        )  # fmt: skip
        return FathomOutput(loss=nats.sum() / items)

    def score(self, data: PreparedData, loss: float | None, checkpoint: Path) -> dict[str, float | None]:
        return {"bits_per_byte_bound": bits_of_loss(data, loss)}

    def error(self, model: Any, data: PreparedData) -> float | None:
        """The bound's standard error in bits per byte, from the draws on at most `ERROR_ROWS` held-out rows."""
        if not is_masked(model.config) or self.draws == 1:
            return None
        rows = data.validation
        assert rows is not None
        some = [rows[i] for i in range(0, len(rows), -(-len(rows) // ERROR_ROWS))]
        batch = {name: x.to(model.device) for name, x in self.collate(some).items()}
        _, error = bound(
            model, batch["input_ids"], batch["labels"] != IGNORED, self.draws, shift=model.diffusion.shift,
            mask_token_id=model.diffusion.mask_token_id, attention_mask=batch.get("attention_mask"),
            position_ids=batch.get("position_ids"),
        )  # fmt: skip
        nats = math.sqrt(float(error.double().square().mean()) * len(rows))
        return bits_per_byte(nats, data.validation_bytes)

    def reference(self, data: PreparedData, sequences: int) -> float:
        assert data.validation is not None
        if self.rows is not None:
            return self.rows.reference(data, sequences)
        seen = torch.cat([block["input_ids"] for block in itertools.islice(data.train, sequences)])
        return unigram(data, seen, torch.cat([block["input_ids"][1:] for block in data.validation]))

    def samples(self, model: Any, data: PreparedData, room: int) -> list[Sample]:
        if self.rows is None:
            prompts = [data.tokenizer(text, add_special_tokens=False)["input_ids"] for text in beginnings(data)]
        else:
            prompts = [list(question.prompt) for question in data.questions[:4]]  # type: ignore[attr-defined]
        found = []
        if not is_masked(model.config):
            texts = [str(data.tokenizer.decode(ids)) for ids in prompts]
            return [Sample(text, continuation(model, data.tokenizer, text, room)) for text in texts]
        for ids in prompts:
            size = own_blocks(model) or BLOCK
            length = min(SAMPLE_TOKENS, room - len(ids)) // size * size
            if length > 0:
                out = model.generate(
                    torch.tensor([ids], device=model.device), max_new_tokens=length, block_length=size,
                    temperature=SAMPLE_TEMPERATURE, stop_at_eos=self.rows is not None,
                )  # fmt: skip
                text = [data.tokenizer.decode(part, skip_special_tokens=True) for part in (ids, out[0, len(ids) :])]
                found.append(Sample(*map(str, text)))
        return found

    def answer_flops(
        self, config: FathomConfig, data: PreparedData, block_size: int, ran: Sequence[float] | None = None
    ) -> float:
        """FLOPs of one token. A masked model writes one token a step without a cache: a pass over a row of
        `block_size`. An autoregressive model decodes with its cache.
        """
        return (block_size if is_masked(config) else 1) * forward_flops_per_token(config, block_size, ran=ran).matmul


class Opening(TrainerCallback):
    """A callback that tells the model which share of later tokens is visible: from 0 to 1 over the first `share` of the
    training."""

    def __init__(self, share: float) -> None:
        self.share = share

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model = getattr(model, "module", model)
        model.sight = min(1.0, state.global_step / max(1.0, self.share * state.max_steps))


def opening(length: int, share: float, device: Any) -> Bool[Tensor, "1 1 T T"]:
    """The mask in which a token sees itself, all earlier tokens and each later one with probability `share`."""
    later = torch.rand(length, length, device=device) < share
    return (later | torch.ones_like(later).tril())[None, None]


def is_masked(config: Any) -> bool:
    """Whether a model of the task predicts hidden tokens; else it is the autoregressive twin (`diffusion: none`)."""
    return config.diffusion["name"] != "none"


def with_mask(tokenizer: Any) -> Any:
    """The tokenizer with a mask token: its own, or a new one."""
    if tokenizer.mask_token_id is None:
        tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    return tokenizer


def mixed(seed: int, number: int) -> int:
    """One seed from two numbers."""
    return (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xBF58476D1CE4E5B9) % 2**63


def last_label(labels: Tensor) -> Tensor:
    """The index of each row's last label [B]."""
    return labels.shape[1] - 1 - (labels != IGNORED).flip(1).int().argmax(1)


def cart(hidden: Bool[Tensor, "B T"], p: float) -> Float[Tensor, "B T"]:
    """w_n = ½ Σ_i [i not hidden] · p (1 − p)^(|n − i| − 1), i ≠ n."""
    places = torch.arange(hidden.shape[1])
    apart = (places[:, None] - places).abs()
    kernel = torch.where(apart > 0, p * (1 - p) ** (apart - 1).clamp(min=0).double(), 0)
    return 0.5 * (~hidden).double() @ kernel

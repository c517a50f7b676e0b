"""One run of a comparison: train it, or find it trained, and note everything that the report says about it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fathom.cost import kv_bytes_per_token, parameter_counts
from fathom.data import PreparedData
from fathom.evaluate import bits_per_byte, unigram_loss
from fathom.inspect import StepMap, offered
from fathom.models.causal_lm import FathomForCausalLM
from fathom.models.registry import SECTIONS
from fathom.report.plan import Planned, inference_flops
from fathom.report.provenance import provenance
from fathom.report.results import Run
from fathom.train import Recipe, TrainResult, model_config, train_run
from fathom.train.complete_checkpoints import checkpoints
from fathom.train.trainer import MODEL
from fathom.writing import whole

MEASURED = "measured.json"
PROVENANCE = "provenance.json"  # versions, commit and device that the run began with
PICTURE_TOKENS = 16_384
SAMPLE_TOKENS = 60
SAMPLE_TEMPERATURE = 0.7
SAMPLE_TOP_K = 40


def measure(
    planned: Planned, lr: float, recipe: Recipe, data: PreparedData, folder: Path, side_by_side: int = 1
) -> Run:
    """The run of `planned` in `folder` (the comparison's): finished ones are read, broken ones resumed.

    `side_by_side`: how many runs share the device, which is noted with its name.
    Raises ValueError where the loss diverged, and whatever `train_run` raises.
    """
    where = folder / planned.folder
    where.mkdir(parents=True, exist_ok=True)
    goes_on = checkpoints(where) or (where / MODEL).is_dir()  # else it trains from the first step on, whatever it wrote
    if not ((where / PROVENANCE).exists() and goes_on):  # a later resume or report must not sign for it
        _write(where / PROVENANCE, provenance(side_by_side))
    result = train_run(recipe, planned.method, seed=planned.seed, folder=where, data=data, lr=lr, tokens=planned.tokens)
    try:
        measured = json.loads((where / MEASURED).read_text(encoding="utf-8"))
        run = Run(pictures=measured.pop("pictures"), **measured)
    except (FileNotFoundError, KeyError, TypeError):  # not yet measured, or by another version of this file
        began_with = json.loads((where / PROVENANCE).read_text(encoding="utf-8"))
        run = _describe(planned, result, recipe, data, began_with)
        _write(where / MEASURED, dataclasses.asdict(run))
    return dataclasses.replace(run, budget=planned.budget, residual_percent=planned.residual_percent)


def prompts(data: PreparedData) -> list[str]:
    """Some words from a quarter and from three quarters into the held-out text."""
    blocks = data.validation
    assert blocks is not None  # compare() has refused recipes without held-out text
    found = []
    for index in dict.fromkeys((len(blocks) // 4, 3 * len(blocks) // 4)):
        ids = blocks[index]["input_ids"]
        text = str(data.tokenizer.decode(ids[: min(24, len(ids) // 2)], skip_special_tokens=True))
        found.append(" ".join(text.split()[1:-1]))  # a block may begin, and the cut end, inside a word
    return [prompt for prompt in found if prompt]


def write_samples(
    model: FathomForCausalLM, tokenizer: PreTrainedTokenizerBase, beginnings: list[str], room: int
) -> Any:
    """`[{"prompt", "text"}]`: one sampled continuation each, of at most `room` tokens with the prompt."""
    samples = []
    for prompt in beginnings:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(model.device)
        length = inputs["input_ids"].shape[1]
        torch.manual_seed(0)
        ids = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=True,
            temperature=SAMPLE_TEMPERATURE,
            top_k=SAMPLE_TOP_K,
            max_new_tokens=max(1, min(SAMPLE_TOKENS, room - length)),
            pad_token_id=tokenizer.eos_token_id,
        )
        samples.append({"prompt": prompt, "text": tokenizer.decode(ids[0, length:], skip_special_tokens=True)})
    return samples


def unigram_bits_per_byte(data: PreparedData, blocks: int) -> float:
    """Held-out bits per byte of the unigram model of the first training blocks, on the targets of the runs."""
    assert data.validation is not None
    seen = torch.cat([block["input_ids"] for block in itertools.islice(data.train, blocks)])
    targets = torch.cat([block.get("labels", block["input_ids"])[1:] for block in data.validation])
    vocabulary = max(data.tokenizer.get_vocab().values()) + 1
    return bits_per_byte(unigram_loss(seen, targets[targets >= 0], vocabulary), data.validation_bytes)


def _describe(
    planned: Planned, result: TrainResult, recipe: Recipe, data: PreparedData, began_with: dict[str, Any]
) -> Run:
    if result.bits_per_byte is None or result.validation_loss is None:
        raise ValueError(f"the held-out loss is not finite at lr {result.lr:g}; try a smaller training.lr")
    config = model_config(recipe, planned.method, data.tokenizer)
    history = [
        {key: line[key] for key in ("tokens", "train_flops", "loss")}
        for line in result.history
        if line.get("loss") is not None
    ]
    model = FathomForCausalLM.from_pretrained(result.model).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    counts = parameter_counts(config)
    dtype = torch.bfloat16 if recipe.training.precision == "bf16" else torch.float32
    tail = history[-max(1, len(history) // 10) :]
    pictures = {
        kind.name: kind.measure(model, data.tokenizer, _beginning(data), recipe.data.block_size)
        for kind in offered(config)
    }
    ran = getattr(pictures.get(StepMap.name), "ran", None)  # what tokens that stop on their own really cost
    return Run(
        method=planned.method.name,
        options={section: getattr(config, section) for section in SECTIONS},
        budget=planned.budget,
        seed=planned.seed,
        lr=result.lr,
        layers=planned.layers,
        bits_per_byte=result.bits_per_byte,
        validation_loss=result.validation_loss,
        train_loss=statistics.fmean(point["loss"] for point in tail),
        params=counts.total,
        non_embedding_params=counts.non_embedding,
        train_tokens=result.tokens,
        train_flops=result.train_flops,
        inference_flops_per_token=inference_flops(config, recipe, ran),
        kv_bytes_per_token=kv_bytes_per_token(config, dtype, ran),
        tokens_per_second=result.tokens_per_second,
        peak_memory_bytes=result.peak_memory_bytes,
        tokens_per_second_interval=result.tokens_per_second_interval,
        interruptions=result.interruptions,
        busy=result.busy,
        seconds=result.seconds,
        history=history,
        pictures={name: dataclasses.asdict(picture) for name, picture in pictures.items()},
        samples=write_samples(model, data.tokenizer, prompts(data), recipe.data.block_size),
        folder=planned.folder,
        **began_with,
    )


def _beginning(data: PreparedData) -> torch.Tensor:
    """The first tokens of the held-out text."""
    blocks = data.validation
    assert blocks is not None
    count = max(1, PICTURE_TOKENS // len(blocks[0]["input_ids"]))
    tokens = torch.cat([blocks[i]["input_ids"] for i in range(min(count, len(blocks)))])
    return tokens.long()


def _write(path: Path, value: dict[str, Any]) -> None:
    with whole(path) as partial:
        partial.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")

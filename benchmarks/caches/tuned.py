"""FreqKV as its paper has it, fine-tuned with its own compression in the training forward; and what stands beside it.

    for arm in untuned plain freqkv; do
      python benchmarks/caches/tuned.py $arm --model SmolLM2-135M-Instruct --text books-train-*.jsonl.xz \
        --books books-test-long.jsonl.xz -o OUT &
    done

    untuned   the model as it is
    plain     fine-tuned with full attention, the same rows in the same order
    freqkv    fine-tuned under `compress(model, FreqKV(budget))`: every row of --length tokens is compressed while it is
              read, and gradients pass through all compressions. --band mean or high: the ablations

Each is then read teacher forced over --windows, by the full cache and by methods of as many bytes as `--budget` tokens
take, paired by book. `--recipe all` trains every weight; `lora` what the paper trains: rank 8 on queries, keys, values
and outputs, and embeddings and norms whole. The learning rate rises for 20 steps and falls to 0 along a line.

Tokens: --tokens, or with a --train-until (seconds since 1970) as many as fit before it by the speed of the freqkv
arm's first steps; the plain arm takes the same number. OUT gets ARM.json after every cell.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import lzma
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from quality import books
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from fathom.caches import METHODS, FreqKV, cache_shape, compress
from fathom.evaluate.cache_quality import perplexity
from fathom.ops.cached_attention import causal_attention
from fathom.ops.cross_entropy import linear_cross_entropy
from fathom.report.provenance import provenance
from fathom.writing import write_json

WARMUP, TIMED = 20, 12  # steps
BESIDE = ("freqkv", "streaming_llm", "snapkv", "treekv")
CHARACTERS = 10_000  # of a book that a row of 2,048 tokens is taken from


def rows(paths: list[Path], tokenizer: Any, length: int, seed: int) -> Iterator[Tensor]:
    """Rows of `length` tokens: stretches of all books, shuffled; each once."""
    size, stretches = CHARACTERS * length // 2048, []
    for path in paths:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                text = json.loads(line)["text"]
                stretches += [text[start : start + size] for start in range(0, len(text) - size, size)]
    random.Random(seed).shuffle(stretches)
    for text in stretches:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0, :length]
        if len(ids) == length:
            yield ids


def trained_weights(model: Any, recipe: str) -> tuple[Any, list[Any]]:
    """The model to be trained, and what of it trains."""
    if recipe == "lora":
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
        for name, weight in model.named_parameters():
            weight.requires_grad_(weight.requires_grad or "embed" in name or "norm" in name)
    return model, [weight for weight in model.parameters() if weight.requires_grad]


def attention_gradients_differ(device: torch.device) -> float:
    """The largest relative difference of the training forward's attention and its gradients from the form written out,
    in fp32, at the shapes of a compression: the fused kernels are taken for what they are only after this."""
    torch.manual_seed(0)
    made = [torch.randn(2, heads, tokens, 64, device=device) for heads, tokens in ((9, 254), (3, 512), (3, 512))]
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (x.to(dtype).requires_grad_() for x in made)
        if dtype == torch.bfloat16:
            out = causal_attention(q, k, v, 0.125)
        else:
            hidden = torch.ones(254, 512, dtype=torch.bool, device=device).triu(259)
            scores = q @ k.repeat_interleave(3, 1).transpose(2, 3) * 0.125
            out = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v.repeat_interleave(3, 1)
        gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        found.append([x.detach().float() for x in (out, *gradients)])
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True))


class Run:
    """One arm: the model, what is measured of it, and where that is written."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.device = given, torch.device(given.device)
        self.tokenizer = AutoTokenizer.from_pretrained(given.model)
        self.model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(self.device)
        self.method = FreqKV(budget=given.budget, band=given.band)
        self.name = given.name or given.arm
        arguments = {name: str(value) for name, value in vars(given).items()}
        self.found: dict[str, Any] = {"arguments": arguments, "cells": {}, **provenance(1)}
        given.output.mkdir(parents=True, exist_ok=True)

    def keep(self, **more: Any) -> None:
        self.found |= more
        write_json(self.given.output / f"{self.name}.json", self.found)

    def under(self) -> Any:
        return compress(self.model, self.method) if self.given.arm == "freqkv" else contextlib.nullcontext()

    # ---------------------------------------------------------------- training

    def train(self) -> None:
        given = self.given
        self.model, weights = trained_weights(self.model, given.recipe)
        optimizer = torch.optim.AdamW(weights, lr=given.lr, betas=(0.9, 0.95), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.share_of_peak)
        self.steps, started, losses = None, time.time(), []
        source = rows(given.text, self.tokenizer, given.length, given.seed)
        if given.tokens:
            self.steps = max(1, given.tokens // (given.rows * given.length))
        self.model.train()
        done = 0
        with self.under():
            while self.steps is None or done < self.steps:
                losses.append(self.step(source, weights, optimizer))
                schedule.step()
                done += 1
                if done == WARMUP:
                    started_after = time.time()
                if self.steps is None and done >= WARMUP:
                    self.plan(done, started_after)
                if done % 10 == 0:
                    said = {"step": done, "loss": sum(losses[-10:]) / 10, "seconds": time.time() - started}
                    print(self.name, said, self.steps, flush=True)
                    self.keep(log=[*self.found.get("log", []), said], tokens=done * given.rows * given.length)
                if given.train_until and time.time() > given.train_until + 60:
                    print(f"{self.name}: the time is up after {done} of {self.steps} steps", flush=True)
                    break
        if given.recipe == "lora":
            self.model = self.model.merge_and_unload()
        self.keep(steps=done, planned_steps=self.steps, tokens=done * given.rows * given.length,
                  trained=sum(weight.numel() for weight in weights), train_seconds=time.time() - started)  # fmt: skip

    def share_of_peak(self, step: int) -> float:
        if step < WARMUP or self.steps is None:
            return min(1.0, (step + 1) / WARMUP)
        return max(0.0, 1 - (step - WARMUP) / max(1, self.steps - WARMUP))

    def plan(self, done: int, since: float) -> None:
        """Agree on the number of steps: the freqkv arm, which is the slower, says it."""
        path, given = self.given.output / "plan.json", self.given
        if path.exists():
            self.steps = max(done, json.loads(path.read_text())["steps"])
        elif given.arm == "freqkv" and done >= WARMUP + TIMED:
            a_second = (done - WARMUP) / (time.time() - since)
            self.steps = done + max(1, int(0.9 * a_second * (given.train_until - time.time())))
            write_json(path, {"steps": self.steps, "steps_a_second": a_second})

    def step(self, source: Iterator[Tensor], weights: list[Any], optimizer: Any) -> float:
        given, total = self.given, 0.0
        batch = torch.stack([next(source) for _ in range(given.rows)])
        for part in batch.split(given.at_once):
            ids = part.to(self.device)
            targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
                hidden = inner.model(input_ids=ids, use_cache=False).last_hidden_state
                loss, _ = linear_cross_entropy(hidden, inner.lm_head.weight, targets)
            loss = loss / (given.rows * (given.length - 1))
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    # ---------------------------------------------------------------- what is measured

    def read(self) -> None:
        """A cell for every window and method, in bf16 as the untuned tables have it."""
        given = self.given
        model = copy.deepcopy(self.model).to(torch.bfloat16).eval()
        self.model = None
        shape = cache_shape(model, given.read_rows)
        for window in given.windows:
            ids = books(given.books, self.tokenizer, given.read_rows, window).to(self.device)
            make = partial(METHODS["freqkv"], budget=given.budget, band=given.band)
            for name in ("full", *given.methods):
                if given.deadline and time.time() > given.deadline:
                    return
                started, fraction = time.time(), given.budget / window
                if name == "full":
                    if window > given.full_until:
                        continue
                    method: Any = METHODS[name]()
                else:
                    method = METHODS[name].at_fraction(fraction, shape, window, given.chunk)
                    if window > model.config.max_position_embeddings and not method.pre_rope:
                        continue
                if name == "freqkv":
                    method = make()
                # these two read a text alike in any parts
                cell = perplexity(model, ids, method, 1024 if name in ("full", "freqkv") else given.chunk)
                cell |= {"method": method.to_dict(), "seconds": round(time.time() - started, 1)}
                self.found["cells"][f"{window}/{name}"] = cell
                self.keep()
                print(self.name, window, name, {k: cell[k] for k in ("nll", "bytes", "seconds")}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=("untuned", "plain", "freqkv"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="JSONL.xz of books to train on")
    parser.add_argument("--books", type=Path, required=True, help="JSONL.xz of long books to read")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--name", help="of the file; default: the arm's")
    parser.add_argument("--recipe", choices=("all", "lora"), default="all")
    parser.add_argument("--band", choices=("low", "high", "mean"), default="low")
    parser.add_argument("--methods", nargs="*", default=BESIDE)
    parser.add_argument("--windows", type=int, nargs="+", default=[2048, 4096, 8192])
    for name, default in (
        ("budget", 512), ("length", 2048), ("rows", 16), ("at-once", 8), ("read-rows", 8), ("chunk", 128), ("seed", 0),
        ("tokens", 0), ("full-until", 8192),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--train-until", type=float, help="seconds since 1970")
    parser.add_argument("--deadline", type=float, help="seconds since 1970: no cell begins after it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    run = Run(given)
    if given.arm != "untuned":
        try:
            apart: Any = attention_gradients_differ(run.device)
        except RuntimeError as error:
            apart = str(error)[:300]
        run.keep(attention_gradients_differ=apart)
        if not isinstance(apart, float) or apart > 0.02:
            print(f"fused attention is not used: {apart}", flush=True)
            torch.backends.cuda.enable_flash_sdp(False)
        run.train()
    run.read()


if __name__ == "__main__":
    main()

"""Quality under a cache: perplexity by position (teacher forced through the cache), passkey and needle grids.

Text is fed `chunk` tokens at a time: a chunk attends to the cache and to itself, then the cache is compressed. So only
the method `Full` is scored under full attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathom.caches.base import CacheMethod
from fathom.caches.compress import check_chunk, compress, prefill
from fathom.caches.report import compression_report
from fathom.caches.versions import CACHE_NAME, execution_device
from fathom.evaluate.long_context import FRUITS, TASKS, hidden


@torch.no_grad()
def perplexity(
    model: nn.Module, input_ids: Tensor, method: CacheMethod, chunk: int = 64, bins: int = 8
) -> dict[str, Any]:
    """Teacher-forced negative log-likelihood, in nats per token, of all but the first token of rows [B,T].

    Returns nll (mean), perplexity, nll_by_position (means over `bins` equal stretches), nll_by_row, and bytes,
    real_ratio and note (CompressionReport) after the last chunk.

    Raises:
        ValueError: fewer than 2 tokens, or chunks so short that the method never compresses them (SnapKV's window).
    """
    if chunk < 1 or input_ids.shape[1] < 2:
        raise ValueError(f"perplexity needs chunk ≥ 1 and at least 2 tokens, got {chunk} and {input_ids.shape[1]}")
    check_chunk(method, chunk)
    losses, cache = [], None
    with compress(model, method):
        for start in range(0, input_ids.shape[1], chunk):
            part = input_ids[:, start : start + chunk]
            out = model(input_ids=part, use_cache=True, **{CACHE_NAME: cache})
            cache = out[CACHE_NAME]
            targets = input_ids[:, start + 1 : start + 1 + part.shape[1]]
            logits = out.logits[:, : targets.shape[1]]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses.append(F.cross_entropy(logits.transpose(1, 2), targets, reduction="none"))
    loss = torch.cat(losses, dim=1).cpu()
    report = compression_report(cache)  # type: ignore[arg-type]
    nll = loss.mean().item()
    return {
        "tokens": loss.numel(),
        "nll": nll,
        "perplexity": math.exp(nll),
        "nll_by_position": [part.mean().item() for part in loss.chunk(bins, dim=1)],
        "nll_by_row": loss.mean(1).tolist(),
        "bytes": report.compressed_bytes,
        "real_ratio": report.real_ratio,
        "note": report.note,
    }


@torch.no_grad()
def retrieval(
    model: nn.Module,
    tokenizer: Any,
    contexts: Tensor,
    question: str,
    answers: list[str],
    method: CacheMethod,
    chunk: int,
) -> list[bool]:
    """Whether, for each row of contexts [B,T], the greedy continuation of the question begins with the row's answer.

    Contexts are read alone, `chunk` tokens at a time (the method does not see the question), then the question.
    """
    check_chunk(method, chunk)
    wanted = max(len(tokenizer(answer, add_special_tokens=False).input_ids) for answer in answers)
    asked = tokenizer(question, add_special_tokens=False, return_tensors="pt").input_ids
    asked = asked.expand(len(answers), -1).to(contexts.device)
    produced = []
    with compress(model, method):
        cache = prefill(model, contexts, chunk_size=chunk)[CACHE_NAME]
        for _ in range(wanted):
            out = model(input_ids=asked, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
            asked = out.logits[:, -1:].argmax(-1)
            produced.append(asked)
    texts = [tokenizer.decode(row) for row in torch.cat(produced, dim=1).tolist()]
    return [text.strip().startswith(answer.strip()) for text, answer in zip(texts, answers)]


def grid(
    model: nn.Module,
    tokenizer: Any,
    filler: str,
    lengths: list[int],
    depths: list[float],
    method_at: Any,
    chunk: int = 512,
    task: str = "passkey",
) -> dict[str, Any]:
    """Recall over lengths × depths, one batch a length; `method_at(length)` gives the method for it.

    task: "passkey" (five digits, stated twice) or "needle" (a fruit, stated once). Every depth has its own secret.
    """
    cells = {}
    for length in lengths:
        secrets = [
            FRUITS[i % len(FRUITS)] if task == "needle" else str(10000 + 7919 * (i + 1) % 89999)
            for i in range(len(depths))
        ]
        rows = [hidden(task, tokenizer, filler, length, d, secret) for d, secret in zip(depths, secrets)]
        contexts = torch.tensor(rows, device=execution_device(model))
        answers = [f" {secret}" for secret in secrets]
        hits = retrieval(model, tokenizer, contexts, TASKS[task][1], answers, method_at(length), chunk)
        cells[str(length)] = dict(zip((str(depth) for depth in depths), hits))
    values = [hit for row in cells.values() for hit in row.values()]
    return {"cells": cells, "recall": sum(values) / len(values)}

"""A recipe of seconds for every task, on data made here."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = ["the", "sea", "was", "calm", "and", "old", "men", "sat", "by", "it", "in", "silence"]
ROWS = [(f"{a} + {b} =", str(a + b)) for a in range(4, 14) for b in range(1, 9)]


def causal_lm(folder: Path) -> dict[str, Any]:
    words = random.Random(0).choices(WORDS, k=600)
    (folder / "train.txt").write_text(" ".join(words[:450]))
    (folder / "held-out.txt").write_text(" ".join(words[450:]))
    data = {"train": str(folder / "train.txt"), "validation": str(folder / "held-out.txt")}
    return {"task": "causal_lm", "data": {**data, "tokenizer": {"bpe": 280}, "block_size": 32, "num_proc": 1}}


def sft(folder: Path) -> dict[str, Any]:
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in ROWS]
    random.Random(0).shuffle(rows)
    for name, some in (("train", rows[:60]), ("held-out", rows[60:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    data = {"train": str(folder / "train.jsonl"), "validation": str(folder / "held-out.jsonl")}
    return {"task": {"name": "sft", "questions": 9}, "data": {**data, "tokenizer": {"bpe": 270}, "block_size": 96}}


def seq2seq(folder: Path) -> dict[str, Any]:
    rows = [{"source": prompt, "target": answer} for prompt, answer in ROWS]
    data = write_rows(folder, rows)
    model = {"d_model": 32, "encoder_layers": 3, "decoder_layers": 1, "encoder_attention_heads": 2}
    model |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0}
    task = {"name": "seq2seq", "target_tokens": 8, "answers": 9}
    return {"task": task, "model": model, "data": {**data, "tokenizer": {"bpe": 270}, "block_size": 24}}


def classification(folder: Path) -> dict[str, Any]:
    rows = [
        {"text": 3 * ("sea", "old")[index % 2] + prompt, "label": index % 2} for index, (prompt, _) in enumerate(ROWS)
    ]
    data = {**write_rows(folder, rows), "tokenizer": {"bpe": 270}, "block_size": 24}
    model = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "pooling": "mean"}
    return {"task": {"name": "classification"}, "model": model, "data": data}


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> dict[str, str]:
    """Sixty to train on, the others held out."""
    random.Random(0).shuffle(rows)
    for name, some in (("train", rows[:60]), ("held-out", rows[60:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return {"train": str(folder / "train.jsonl"), "validation": str(folder / "held-out.jsonl")}


def masked_diffusion(folder: Path) -> dict[str, Any]:
    return {**causal_lm(folder), "task": {"name": "masked_diffusion", "draws": 3, "random_length": 0.3}}


def vqa(folder: Path) -> dict[str, Any]:
    language = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = {
        "tower": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "mlp_ratio": 2},
        "language": {**language, "num_key_value_heads": 1},
        "vision_compress": {"name": "fourier_vlm", "tokens": 4},
    }
    task = {"name": "vqa", "side": 16, "scenes": 60, "questions": 72}
    return {"task": task, "model": model, "data": {"tokenizer": {"bpe": 480}, "block_size": 32}}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "causal_lm": causal_lm, "sft": sft, "seq2seq": seq2seq, "classification": classification,
    "masked_diffusion": masked_diffusion, "vqa": vqa,
}  # fmt: skip


def recipe(task: str, folder: Path, /, **sections: Any) -> dict[str, Any]:
    """A whole recipe; `sections` are laid over it."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "name": "tiny",
        "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "training": {"examples": 40, "sequences": 2, "lr": 1e-2, "log_every": 1, "save_every": 3},
        "budgets": ["examples"],
        **CASES[task](folder),
    }
    for name, section in sections.items():
        whole[name] = {**whole[name], **section} if isinstance(section, dict) else section
    return whole

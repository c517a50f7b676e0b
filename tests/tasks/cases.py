"""A recipe of seconds for every task, on data made here."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from fathom.data import PreparedData
from fathom.train import Recipe, load_recipe
from tiny_checkpoint import save_masked

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


def text_to_sql(folder: Path) -> dict[str, Any]:
    """Questions over one database."""
    kinds = ("boat", "crew", "port")
    connection = sqlite3.connect(folder / "harbour.sqlite")
    for kind in kinds:
        connection.execute(f"CREATE TABLE IF NOT EXISTS {kind} (name TEXT, size INTEGER)")
    connection.executemany("INSERT INTO boat VALUES (?, ?)", [(word, len(word)) for word in WORDS])
    connection.commit()
    connection.close()
    rows = [
        {"question": f"{word} of {kind} above {n} ?", "query": f"SELECT {word} FROM {kind} WHERE size > {n}"}
        for kind in kinds
        for word in ("name", "size")
        for n in range(14)
    ]
    model = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    data = write_rows(folder, [{"db_id": "harbour", **row} for row in rows[:80]])
    task = {"name": "text_to_sql", "databases": str(folder), "target_tokens": 24, "answers": 9}
    return {"task": task, "model": model, "data": {**data, "tokenizer": {"bpe": 300}, "block_size": 64}}


def table_to_text(folder: Path) -> dict[str, Any]:
    foods, places = ("Thai", "Greek", "Welsh", "Fijian"), ("river", "castle", "market", "harbour")
    rows = [
        {"table": [["name", name], ["food", food], ["near", place], ["price", str(number + 5)]],
         "text": f"{name} serves {food} food near the {place} for {number + 5} pounds."}
        for number, (name, food, place) in enumerate(
            (f"{first}{last}", food, place) for first in ("Al", "Bo", "Cy", "Di", "Ed") for last in ("an", "is")
            for food in foods for place in places[:2]
        )
    ]  # fmt: skip
    corpus = [f"{name} has {food} food." for name in ("Fay", "Gus", "Hal") for food in foods]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in corpus))
    model = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    task = {"name": "table_to_text", "target_tokens": 40, "table_tokens": 96, "plan_tokens": 20, "source_tokens": 96}
    task |= {"answers": 9, "corpus": str(folder / "corpus.jsonl"), "prototypes": 1, "prototype_tokens": 12}
    task |= {"planner_steps": 2}
    data = {**write_rows(folder, rows), "tokenizer": {"bpe": 290}, "block_size": 160}
    return {"task": task, "model": {"family": "t5", **model}, "data": data}


def audiovideo(folder: Path) -> dict[str, Any]:
    task = {"name": "audiovideo", "frames": 25, "height": 32, "width": 32, "sample_rate": 8000, "audio_channels": 8}
    task |= {"train_clips": 20, "held_out_clips": 5, "video_channels": 4, "made": 2, "steps": 2, "actions": ["bounce"]}
    data = {"train": "generated", "validation": "generated", "tokenizer": {"bpe": 270}, "block_size": 81}
    model = {"preset": "tiny", "freq_dim": 32}
    method = {"name": "vanilla", "mova": {"bridge_dropout": 0.1}}
    return {"task": task, "model": model, "data": data, "methods": [method]}


def latent_diffusion(folder: Path) -> dict[str, Any]:
    """On a masked model with random weights."""
    made = causal_lm(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    encoder = save_masked(folder / "encoder", (folder / "train.txt").read_text(), **sizes)
    model = {"encoder": encoder, "denoiser": sizes, "decoder": {**sizes, "num_hidden_layers": 1}, "codar": {"ema": 0.9}}
    data = {**made["data"], "tokenizer": encoder, "block_size": 16}
    return {"task": {"name": "latent_diffusion", "draws": 2}, "model": model, "data": data}


def contextual_decoder(folder: Path) -> dict[str, Any]:
    return {**latent_diffusion(folder), "task": {"name": "contextual_decoder", "word_dropout": 0.1, "examples": 3}}


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
    "masked_diffusion": masked_diffusion, "text_to_sql": text_to_sql, "table_to_text": table_to_text,
    "audiovideo": audiovideo, "latent_diffusion": latent_diffusion, "contextual_decoder": contextual_decoder,
    "vqa": vqa,
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


def load(task: str, folder: Path, /, **sections: Any) -> tuple[Recipe, PreparedData]:
    """The recipe as it is read from a file, and its data."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(task, folder, **sections)))
    loaded = load_recipe(path)
    return loaded, loaded.task.prepare(loaded.data, folder / ".data")

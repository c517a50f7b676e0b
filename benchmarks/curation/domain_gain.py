"""What domain pretraining gains and forgets: textbooks on top of general text, with replay, without, and by LoRA.

    python benchmarks/curation/domain_gain.py --data DATA -o OUT --curate   # the first step alone, on a CPU
    python benchmarks/curation/domain_gain.py --data DATA -o OUT            # minutes on one GPU
    python benchmarks/curation/domain_gain.py --data DATA -o OUT --tiny     # a dry run on a CPU

DATA holds openstax.jsonl.xz (the domain), wiki.jsonl.xz and books.jsonl.xz (general text), wiki-valid.jsonl.xz and
books-valid.jsonl.xz. The domain is curated first, unless OUT has it, and every twentieth of its documents is held out.
A base model is trained on the general text. From it, at equal tokens: 80 % domain, 10 % and 10 % general; the domain
alone; LoRA on the mixture; and general text alone, which says what training on gains by itself. OUT/domain_gain.json
has bits per byte and perplexity of each on held-out text: domain, encyclopedia ("general") and books.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

from fathom.data import DataConfig, prepare
from fathom.data.config import NamedSource
from fathom.evaluate import evaluate_text, load_checkpoint
from fathom.evaluate.text import read_documents
from fathom.report.provenance import provenance
from fathom.train import Recipe, Training, train_run
from fathom.train.recipe import LowRank, MethodConfig
from fathom.writing import write_json

MIXTURE = {"domain": 8.0, "wiki": 1.0, "books": 1.0}
METHODS = (
    MethodConfig("continued", weights=MIXTURE),
    MethodConfig("replay-free", weights={"domain": 1.0}),
    MethodConfig("lora", weights=MIXTURE, trains="lora"),
    MethodConfig("general", weights={"wiki": 1.0, "books": 1.0}),
)


def split(data: Path, out: Path) -> dict[str, Any]:
    """Curate the domain into OUT/domain.jsonl and OUT/held-out.jsonl, unless they are there; the account."""
    file = out / "account.json"
    if file.is_file():
        return json.loads(file.read_text())
    from fathom.curation import Curation, curate

    made = curate(data / "openstax.jsonl.xz", out / "curated", Curation(max_characters=None))
    rows = [row for file in sorted((out / "curated" / "corpus").glob("*.jsonl")) for row in file.open()]
    for name, some in (("domain", [r for i, r in enumerate(rows) if i % 20]), ("held-out", rows[::20])):
        (out / f"{name}.jsonl").write_text("".join(some))
    account = {name: made[name] for name in ("documents", "kept", "dropped", "lines", "lines_taken", "characters")}
    write_json(file, account)
    return account


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--curate", action="store_true", help="stop after the domain is curated")
    parser.add_argument("--base-tokens", type=int, default=50_000_000)
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--deadline", type=float, help="seconds since 1970, after which no run begins")
    options = parser.parse_args()
    out, tiny = options.output, options.tiny
    out.mkdir(parents=True, exist_ok=True)
    account = split(options.data, out)
    if options.curate:
        return
    wiki, books = (str(options.data / f"{name}.jsonl.xz") for name in ("wiki", "books"))
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    if tiny:
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shared = {
        "validation": None, "block_size": 128 if tiny else 512, "tokenizer": {"bpe": 512 if tiny else 16384},
        "max_documents": 60 if tiny else None, "num_proc": 1 if tiny else 4,
    }  # fmt: skip
    speed = {} if tiny else {"precision": "bf16", "compile": "layers"}
    data = DataConfig(train={"wiki": NamedSource(wiki), "books": NamedSource(books)}, **shared)
    training = Training(tokens=8192 if tiny else options.base_tokens, sequences=4 if tiny else 64, lr=2e-3, **speed)
    recipe = Recipe("base", training, sizes, data=data)
    prepared = prepare(data, out / "cache")
    base = train_run(recipe, MethodConfig("base"), seed=0, folder=out / "base", data=prepared).model

    named = {"domain": NamedSource(str(out / "domain.jsonl")), "wiki": NamedSource(wiki), "books": NamedSource(books)}
    data = dataclasses.replace(data, train=named, tokenizer=str(base))
    prepared = prepare(data, out / "cache")
    training = dataclasses.replace(  # short runs: compiling would take longer than it saves
        training, tokens=4096 if tiny else options.tokens, compile=False, lora=LowRank(rank=32, alpha=64.0)
    )
    recipe = Recipe("domain", training, {"checkpoint": str(base)}, METHODS, data=data)
    texts = {"domain": out / "held-out.jsonl", "general": options.data / "wiki-valid.jsonl.xz"}
    texts["books"] = options.data / "books-valid.jsonl.xz"
    held = {name: read_documents(path)[: 4 if tiny else 60] for name, path in texts.items()}
    held["books"] = [text[: 500 if tiny else 50_000] for text in held["books"]]

    def scores(folder: Path) -> dict[str, float]:
        model, tokenizer = load_checkpoint(str(folder))
        found = {name: evaluate_text(model, tokenizer, some, 128 if tiny else 512) for name, some in held.items()}
        return {name: one.bits_per_byte for name, one in found.items()}

    rows = [{"method": "base", "seed": 0, "lr": None, **scores(base)}]
    bytes_held = {name: sum(len(text.encode()) for text in some) for name, some in held.items()}
    tokens = {name: sum(len(prepared.tokenizer(t)["input_ids"]) for t in some) for name, some in held.items()}

    def keep() -> None:
        for row in rows:
            for name in held:  # perplexity a token, as the paper counts
                row[f"{name}_perplexity"] = math.exp(row[name] * math.log(2) * bytes_held[name] / tokens[name])
        settings = {"base_tokens": options.base_tokens, "tokens": options.tokens, "sizes": sizes}
        found = {"account": account, "held_out_bytes": bytes_held, "rows": rows, "settings": settings}
        write_json(out / "domain_gain.json", {**found, **provenance(1)})

    def run(method: MethodConfig, lr: float, seed: int) -> None:
        if options.deadline and time.time() > options.deadline:
            return
        folder = out / f"{method.name}-{lr:g}-{seed}"
        made = train_run(recipe, method, seed=seed, folder=folder, data=prepared, lr=lr)
        row = {"method": method.name, "seed": seed, "lr": lr, "tokens": made.tokens, **scores(made.model)}
        print(json.dumps(row), flush=True)
        rows.append(row)
        keep()

    for method in METHODS:  # two rates
        rates = (1e-3, 4e-3) if method.trains == "lora" else (3e-4, 1e-3)
        for lr in rates[: 1 if tiny else 2]:
            run(method, lr, 0)
    for seed in () if tiny else (1, 2):  # the better one on the domain with two further seeds
        for method in METHODS[:2]:
            of_method = [row for row in rows if row["method"] == method.name]
            run(method, min(of_method, key=lambda row: row["domain"])["lr"], seed)


if __name__ == "__main__":
    main()

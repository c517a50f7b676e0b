"""From text to an assistant with tools, stage by stage, at equal training tokens of one model: raw JSON of every arm.

    python recipes/make_specialist.py runs/specialist --papers 64
    python benchmarks/specialist/stages.py runs/specialist -o OUT --general wiki.jsonl.xz --held-out wiki-valid.jsonl.xz
    python benchmarks/specialist/stages.py runs/specialist -o OUT --checkpoint SMOLLM2 --arms mixed rows_alone

All arms start from one base, a model trained here on general text or a checkpoint, and all but the last read as many
tokens after it:

    mixed            papers, general text and tables 8/1/1, then rows of all types
    domain_only      papers alone, then rows of all types
    no_domain        general text alone, then rows of all types
    two_steps        as mixed, but first the rows without calls, then those with
    rows_alone       rows of all types at once

Of each: bits per byte of held-out papers and general text before and after the rows; then, of held-out questions of
three kinds, the calls that are right, the answers with the tools, and those without any (fathom.evaluate.tool_calls):

    told       what papers say of a mineral: colour, lustre, place
    untold     its hardness, which stands in the table alone
    sums       arithmetic

The time of an optimiser step of pretraining and of rows is that of the Trainer's own account. The papers are made up:
this measures what each stage gives, not a model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from fathom.evaluate import evaluate_text, load_checkpoint, read_documents
from fathom.evaluate.tool_calls import ToolQuestion, evaluate_tool_calls, read_questions
from fathom.report.provenance import provenance
from fathom.tools import load_tools
from fathom.train import load_recipe, train_run
from fathom.writing import write_json

BLOCK = 512
DOCUMENTS = 40  # of held-out text
MIXTURE = {"domain": 8, "general": 1, "tables": 1}
ARMS: dict[str, dict[str, int] | None] = {
    "mixed": MIXTURE,
    "domain_only": {"domain": 1},
    "no_domain": {"general": 1},
    "two_steps": MIXTURE,
    "rows_alone": None,
}


def train(stage: str, recipe: dict[str, Any], folder: Path, seed: int) -> tuple[Path, dict[str, Any]]:
    """A stage's model and what it cost."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stage}.yaml"
    shared = {"name": stage, "methods": ["vanilla"], "seeds": [seed], "budgets": ["tokens"]}
    path.write_text(yaml.safe_dump({**shared, **recipe}))
    loaded = load_recipe(path)
    data = loaded.task.prepare(loaded.data, folder.parent / ".data")
    made = train_run(loaded, loaded.methods[0], seed=seed, folder=folder / stage, data=data)
    said = {"tokens": made.tokens, "train_flops": made.train_flops, "tokens_per_second": made.tokens_per_second}
    return Path(made.model), {**said, "parameters": made.parameters, "scores": made.scores}


def kind_of(question: ToolQuestion) -> str:
    """Which of the three kinds a held-out question is of."""
    (call,) = question.calls
    if call["name"] == "calculator":
        return "sums"
    return "untold" if call["arguments"]["column"] == "hardness" else "told"


def chosen(path: Path, count: int) -> dict[str, list[ToolQuestion]]:
    """The first `count` different questions of each kind."""
    found: dict[str, dict[str, ToolQuestion]] = {"told": {}, "untold": {}, "sums": {}}
    for question in read_questions(path):
        found[kind_of(question)].setdefault(question.question, question)
    return {kind: list(some.values())[:count] for kind, some in found.items()}


def main(arguments: argparse.Namespace) -> None:
    data, out = arguments.data.resolve(), arguments.output
    options = {"sequences": arguments.sequences, "lr": arguments.lr, "precision": arguments.precision}
    options |= {"compile": arguments.compile, "log_every": 50}
    general = str(arguments.general or data / "general" / "prose.jsonl")
    held_out = {"domain": data / "held-out" / "papers.jsonl"}
    held_out["general"] = arguments.held_out or data / "held-out" / "prose.jsonl"
    named = {"domain": str(data / "corpus" / "papers.jsonl"), "general": general}
    named["tables"] = str(data / "tables" / "tables.jsonl")
    tools, questions = load_tools(data / "tools.py"), chosen(data / "asked.jsonl", arguments.questions)

    def texts(weights: dict[str, int]) -> dict[str, Any]:
        train = {name: {"text": named[name], "weight": weight} for name, weight in weights.items()}
        return {"train": train, "validation": str(held_out["domain"]), "block_size": BLOCK, "num_proc": 4}

    def rows(name: str) -> dict[str, Any]:
        asked = str(data / "rows" / "held-out.jsonl")
        train = str(data / "rows" / f"{name}.jsonl")
        return {"train": train, "validation": asked, "block_size": BLOCK, "num_proc": 4}

    def bits(model: Any, tokenizer: Any) -> dict[str, float]:
        found = {}
        for name, file in held_out.items():
            documents = read_documents(file)[:DOCUMENTS]
            found[f"{name}_bits_per_byte"] = evaluate_text(model.float(), tokenizer, documents, BLOCK).bits_per_byte
        return found

    task = {"name": "sft", "template": "react", "tight": True, "balance": 0.5, "questions": 64}
    settings = {name: str(value) for name, value in vars(arguments).items() if name not in ("arms", "seeds", "output")}
    file = out / "specialist.json"
    found: dict[str, Any] = {"settings": settings, **provenance(1), "runs": []}
    if file.is_file() and json.loads(file.read_text())["settings"] == settings:
        found = json.loads(file.read_text())
    done = {(run["arm"], run["seed"]) for run in found["runs"]}
    for seed in arguments.seeds:
        folder = out / f"seed-{seed}"
        base = arguments.checkpoint
        if base is None:
            sizes = {"hidden_size": arguments.width, "num_hidden_layers": arguments.layers, "init": "scaled"}
            sizes |= {"num_attention_heads": max(1, arguments.width // 64), "max_position_embeddings": BLOCK}
            # the tokenizer learns the words of all three; nine tenths of what is read are general
            stage: dict[str, Any] = {"model": sizes, "data": texts({"general": 18, "domain": 1, "tables": 1})}
            stage["data"] = {**stage["data"], "tokenizer": {"bpe": 4096}}
            stage["training"] = {"tokens": arguments.base_tokens, **options}
            base, _ = train("base", stage, folder, seed)
        base = str(Path(base).resolve()) if Path(base).is_dir() else str(base)
        if ("base", seed) not in done:
            found["runs"].append({"arm": "base", "seed": seed, **bits(*load_checkpoint(base))})
        for arm in arguments.arms:
            if (arm, seed) in done:
                continue
            result: dict[str, Any] = {"arm": arm, "seed": seed}
            weights, model = ARMS[arm], base
            if weights is not None:
                stage = {"model": {"checkpoint": base}, "data": {**texts(weights), "tokenizer": base}}
                stage["training"] = {"tokens": arguments.tokens, **options}
                model, result["pretraining"] = train("mixed" if arm == "two_steps" else arm, stage, folder, seed)
                result |= bits(*load_checkpoint(str(model)))
            steps = ("told", "asked") if arm == "two_steps" else ("train",)
            for step in steps:
                stage = {"task": task, "model": {"checkpoint": str(model)}, "data": {**rows(step), "tokenizer": base}}
                stage["training"] = {"tokens": arguments.row_tokens // len(steps), **options}
                model, result[f"rows_{step}"] = train(f"{arm}-{step}", stage, folder, seed)
            loaded, tokenizer = load_checkpoint(str(model))
            result["after_rows"] = bits(loaded, tokenizer)
            result["tools"] = {
                kind: evaluate_tool_calls(loaded, tokenizer, some, tools.values(), 2, 64)
                for kind, some in questions.items()
            }
            found["runs"].append(result)
            write_json(file, found)
            shares = {
                kind: {name: round(value["share"], 2) for name, value in some.items() if isinstance(value, dict)}
                for kind, some in result["tools"].items()
            }
            print(arm, seed, {k: round(v, 4) for k, v in result.items() if k.endswith("byte")}, shares, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--general", type=Path, help="general text; else the prose inside the package")
    parser.add_argument("--held-out", type=Path, help="held-out general text")
    parser.add_argument("--checkpoint", help="the base, instead of one that is trained here")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS)[:4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--base-tokens", type=int, default=12_000_000)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--row-tokens", type=int, default=8_000_000)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--questions", type=int, default=40, help="of each kind")
    main(parser.parse_args())

"""From text to an assistant with tools, stage by stage, at equal training tokens of one model: raw JSON of every arm.

    python recipes/make_specialist.py runs/specialist
    python benchmarks/specialist/stages.py runs/specialist -o $OUT --width 512 --layers 8

All arms start from one base on general prose, and read as many tokens after it:

    mixed            papers, prose and tables 8/1/1, then rows of all types
    domain_only      papers alone, then rows of all types
    no_domain        prose alone, then rows of all types
    two_steps        as mixed, but first rows of the papers, then rows with tools

Of each: bits per byte of held-out papers and prose after pretraining, and calls and answers after the rows. The time of
an optimiser step of pretraining and of rows is that of the Trainer's own account. The data are made up and small: this
measures the way, not a model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from fathom.evaluate import evaluate_text, load_checkpoint, read_documents
from fathom.evaluate.tool_calls import evaluate_tool_calls, read_questions
from fathom.report.provenance import provenance
from fathom.tools import load_tools
from fathom.train import load_recipe, train_run

BLOCK = 512


def train(stage: str, recipe: dict[str, Any], folder: Path, seed: int) -> tuple[Path, dict[str, float]]:
    """A stage's model and what it cost."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stage}.yaml"
    shared = {"name": stage, "methods": ["vanilla"], "seeds": [seed], "budgets": ["tokens"]}
    path.write_text(yaml.safe_dump({**shared, **recipe}))
    loaded = load_recipe(path)
    data = loaded.task.prepare(loaded.data, folder.parent / ".data")
    made = train_run(loaded, loaded.methods[0], seed=seed, folder=folder / stage, data=data)
    said = {"tokens": made.tokens, "train_flops": made.train_flops, "tokens_per_second": made.tokens_per_second}
    return Path(made.model), {**said, "scores": made.scores}


def main(arguments: argparse.Namespace) -> None:
    data, out = arguments.data.resolve(), arguments.output
    options = {"sequences": arguments.sequences, "lr": arguments.lr, "precision": arguments.precision}
    options |= {"compile": arguments.compile, "log_every": 50}
    sizes = {"hidden_size": arguments.width, "num_hidden_layers": arguments.layers, "init": "scaled"}
    sizes |= {"num_attention_heads": max(1, arguments.width // 64), "max_position_embeddings": BLOCK}
    named = {
        "domain": str(data / "corpus" / "papers.jsonl"),
        "general": str(data / "general" / "prose.jsonl"),
        "tables": str(data / "tables" / "tables.jsonl"),
    }
    tools, questions = load_tools(data / "tools.py"), read_questions(data / "questions.jsonl")[: arguments.questions]

    def texts(weights: dict[str, int]) -> dict[str, Any]:
        train = {name: {"text": named[name], "weight": weight} for name, weight in weights.items()}
        return {"train": train, "validation": str(data / "held-out" / "papers.jsonl"), "block_size": BLOCK}

    def rows(name: str) -> dict[str, Any]:
        held_out = str(data / "rows" / "held-out.jsonl")
        return {"train": str(data / "rows" / f"{name}.jsonl"), "validation": held_out, "block_size": BLOCK}

    task = {"name": "sft", "template": "react", "tight": True, "balance": 0.5, "questions": 64}
    found: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(arguments).items()}, **provenance(), "runs": []}
    for seed in range(arguments.seeds):
        folder = out / f"seed-{seed}"
        every = {"domain": 1, "general": 1, "tables": 1}  # whose words the tokenizer learns
        stage: dict[str, Any] = {"model": sizes, "data": {**texts(every), "tokenizer": {"bpe": 2048}}}
        stage["training"] = {"tokens": arguments.base_tokens, **options}
        base, _ = train("base", stage, folder, seed)
        for arm, weights in (
            ("mixed", {"domain": 8, "general": 1, "tables": 1}),
            ("domain_only", {"domain": 1}),
            ("no_domain", {"general": 1}),
            ("two_steps", {"domain": 8, "general": 1, "tables": 1}),
        ):
            stage = {"model": {"checkpoint": str(base)}, "data": texts(weights)}
            stage["training"] = {"tokens": arguments.tokens, **options}
            model, cost = train("mixed" if arm == "two_steps" else arm, stage, folder, seed)
            result: dict[str, Any] = {"arm": arm, "seed": seed, "pretraining": cost}
            loaded, tokenizer = load_checkpoint(str(model))
            for name, file in (("domain", "papers"), ("general", "prose")):
                documents = read_documents(data / "held-out" / f"{file}.jsonl")
                result[f"{name}_bits_per_byte"] = evaluate_text(loaded, tokenizer, documents, BLOCK).bits_per_byte
            steps = ("told", "asked") if arm == "two_steps" else ("train",)
            for step in steps:
                stage = {"task": task, "model": {"checkpoint": str(model)}, "data": rows(step)}
                stage["training"] = {"tokens": arguments.row_tokens // len(steps), **options}
                model, cost = train(f"{arm}-{step}", stage, folder, seed)
                result[f"rows_{step}"] = cost
            loaded, tokenizer = load_checkpoint(str(model))
            result["tools"] = evaluate_tool_calls(loaded, tokenizer, questions, tools.values(), 2, 64)
            found["runs"].append(result)
            (out / "specialist.json").write_text(json.dumps(found, indent=2))
            shares = {name: value["share"] for name, value in result["tools"].items() if isinstance(value, dict)}
            print(arm, seed, {k: round(v, 4) for k, v in result.items() if k.endswith("byte")}, shares, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--base-tokens", type=int, default=2_000_000)
    parser.add_argument("--tokens", type=int, default=1_500_000)
    parser.add_argument("--row-tokens", type=int, default=2_500_000)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    main(parser.parse_args())

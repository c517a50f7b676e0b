"""lm_eval task files of local benchmark files, so that a recipe's `downstream` needs no network.

    python benchmarks/depth/downstream_tasks.py BENCHMARKS my-tasks --limit 1000
    # in a recipe: downstream: {tasks: [arc_easy, piqa, …], task_dir: my-tasks}

BENCHMARKS has JSON lines, xz-compressed: {query | ctx, choices, gold}, {context_options, continuation, gold}, or
{context, continuation}. `arc_easy.jsonl.xz` becomes `my-tasks/arc_easy.yaml` and `arc_easy.jsonl`. Files of other forms
are named and left out, and so are those whose choices are letters, which models without instructions cannot use.
"""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path
from typing import Any

import yaml


def task(name: str, row: dict[str, Any], file: Path) -> dict[str, Any] | None:
    """The task's YAML for rows like this one; None for an unknown form."""
    about: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "metric_list": [{"metric": "acc"}],
    }
    keys = set(row)
    if {"choices", "gold"} <= keys and keys & {"query", "ctx"}:
        if all(len(choice) == 1 for choice in row["choices"]):
            return None
        text = "query" if "query" in keys else "ctx"
        asked = {"doc_to_text": f"{{{{{text}}}}}", "doc_to_choice": "{{choices}}", "doc_to_target": "gold"}
        return about | {"output_type": "multiple_choice", **asked}
    if {"context_options", "continuation", "gold"} <= keys:  # the end is scored after each of the beginnings
        asked = {"doc_to_text": "gold", "doc_to_choice": "{{context_options}}", "doc_to_target": "continuation"}
        return about | {"output_type": "multiple_choice", **asked}
    if {"context", "continuation"} <= keys:
        asked = {"doc_to_text": "{{context}}", "doc_to_target": "{{' ' + continuation.lstrip()}}"}
        return about | {"output_type": "loglikelihood", **asked}
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=int, help="rows of each file")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for path in sorted(args.benchmarks.glob("*.jsonl.xz")):
        name = path.name.removesuffix(".jsonl.xz")
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines][: args.limit]
        file = (args.out / f"{name}.jsonl").resolve()
        about = task(name, rows[0], file)
        if about is None:
            print(f"{name}: left out, its rows have {', '.join(rows[0])}")
            continue
        keep = ("query", "ctx", "choices", "gold", "context_options", "context", "continuation")
        kept = [json.dumps({key: row[key] for key in keep if key in row}) for row in rows]
        file.write_text("\n".join(kept) + "\n", encoding="utf-8")
        (args.out / f"{name}.yaml").write_text(yaml.safe_dump(about, sort_keys=False), encoding="utf-8")
        print(f"{name}: {len(rows)} rows")


if __name__ == "__main__":
    main()

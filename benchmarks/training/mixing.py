"""What mixing sources costs of a training step: the loader's time for a batch of four named sources, and of one text.

    python benchmarks/training/mixing.py -o mixing.json    (a CPU, a minute)

Text of made-up words goes the way of a recipe: `prepare` tokenises and packs it, a `DataLoader` reads the order that
a run reads. A batch is the median over both in turns. A step, of 14 million parameters and 2,048 tokens, is what
`train_run` takes longer for three than for one, halved. All in CPU seconds of this process, which other work on the
machine does not lengthen; for a GPU, whose steps are short, see the seconds of a batch.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from fathom.data import DataConfig, prepare
from fathom.data.config import NamedSource
from fathom.data.mixing import ShuffledBlocks
from fathom.report.provenance import provenance
from fathom.train import Recipe, Training, train_run
from fathom.train.recipe import MethodConfig

SOURCES, BLOCK, SEQUENCES = 4, 512, 4


def write_text(file: Path, size: int, seed: int) -> str:
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 8))) for _ in range(2000)]
    file.write_text("\n\n".join(" ".join(draw.choices(words, k=400)) for _ in range(size)))
    return str(file)


def batches(order: Dataset, size: int, collate: Any) -> list[float]:
    """Seconds of each batch that the loader gives."""
    found, loader = [], iter(DataLoader(order, size, collate_fn=collate))
    began = time.process_time()
    for _ in loader:
        found.append(time.process_time() - began)
        began = time.process_time()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("mixing.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        named = {f"s{n}": NamedSource(write_text(folder / f"{n}.txt", 400, n)) for n in range(SOURCES)}
        data = DataConfig(train=named, validation=None, block_size=BLOCK, tokenizer={"bpe": 1024})
        prepared = prepare(data, folder / "cache")
        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6}
        training = Training(tokens=SEQUENCES * BLOCK, sequences=SEQUENCES, log_every=1, save_every=None)
        spent = []
        for steps in (1, 3):
            recipe = Recipe("mixing", replace(training, tokens=steps * SEQUENCES * BLOCK), sizes, data=data)
            began = time.process_time()
            train_run(recipe, MethodConfig("vanilla"), seed=0, folder=folder / f"run{steps}", data=prepared)
            spent.append(time.process_time() - began)
        step = (spent[1] - spent[0]) / 2

        mixed = prepared.train.ordered(0, 1600)
        alone = ShuffledBlocks(prepared.train.sources["s0"], 0, 1600)
        rows = []
        for size in (SEQUENCES, 16, 64):
            turns = [[batches(one, size, recipe.task.collate) for one in (mixed, alone)] for _ in range(5)]
            four, one = (statistics.median(second for turn in turns for second in turn[n]) for n in (0, 1))
            rows.append({"sequences": size, "four_sources": four, "one_text": one, "mixing": four - one})
    found = {"cpu_seconds_of_a_step": step, "mixing_of_a_step": rows[0]["mixing"] / step, "batches": rows}
    options.output.write_text(json.dumps({**found, **provenance(1)}, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

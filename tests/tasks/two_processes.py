"""Trains recipes one after the other: torchrun starts `two_processes.py FOLDER RECIPE …` on two processes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from fathom.train import load_recipe, train_run
from sharded_on_cpu import allow_fsdp_on_cpu

allow_fsdp_on_cpu()
folder, *recipes = sys.argv[1:]
failed = []
for path in map(Path, recipes):
    try:
        loaded = load_recipe(path)
        data = loaded.task.prepare(loaded.data, path.parent / ".data")
        train_run(loaded, loaded.methods[0], seed=0, folder=path.parent / folder, data=data)
    except Exception as error:
        failed.append(f"{loaded.task.name}: {error!r}")
sys.exit("\n".join(failed) or None)

"""Trains the recipes named on the command line, one after the other: torchrun starts it on two processes."""

from __future__ import annotations

import sys
from pathlib import Path

from fathom.train import load_recipe, train_run

for path in map(Path, sys.argv[1:]):
    loaded = load_recipe(path)
    data = loaded.task.prepare(loaded.data, path.parent / ".data")
    train_run(loaded, loaded.methods[0], seed=0, folder=path.parent / "two", data=data)

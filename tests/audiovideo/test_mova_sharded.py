"""Sharded over two ranks, MOVA learns what it learns on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_fsdp2_on_two_ranks_is_one_process():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command.append(str(Path(__file__).with_name("mova_sharded.py")))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("differences"))
    found = [float(word) for word in line.split()[1:]]
    assert len(found) == 4 and max(found) < 1e-5

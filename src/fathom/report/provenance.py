"""Provenance of a measured number: versions, commit, device."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fathom


def provenance(runs: int = 1) -> dict[str, Any]:
    """`{"versions", "commit", "device", "date"}` of this process, one of `runs` that share the device."""
    shared = f", shared by {runs} runs" if runs > 1 else ""
    now = datetime.now(UTC).isoformat(timespec="minutes")
    return {"versions": versions(), "commit": commit(), "device": device() + shared, "date": now}


def versions() -> dict[str, str]:
    """The versions of all packages that can change a number."""
    packages = {name: metadata.version(name) for name in ("transformers", "accelerate", "tokenizers")}
    return {"fathom": fathom.__version__, "torch": torch.__version__, **packages, "python": platform.python_version()}


def commit() -> str:
    """The commit of Fathom's source, with '+changes' if files differ from it, or 'not a checkout'.

    A bare copy of the source has no commit of its own: FATHOM_COMMIT in the environment names it, or the file COMMIT at
    the copy's root, which `git archive` fills in; who copies in another way writes `git rev-parse HEAD` to it.
    """
    package = Path(fathom.__file__).parent
    try:
        _git(package, "ls-files", "--error-unmatch", "__init__.py")  # installed inside another project's checkout?
        changed = _git(package, "status", "--porcelain", "--", ".")
        return _git(package, "rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        if "FATHOM_COMMIT" in os.environ:
            return os.environ["FATHOM_COMMIT"]
        written = package.parents[1] / "COMMIT"
        named = re.match(r"[0-9a-f]{7,40}\b", written.read_text(encoding="utf-8")) if written.is_file() else None
        return named[0][:12] if named else "not a checkout"


def device() -> str:
    """The name of the GPU, or the number of usable cores and the processor."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} CPU cores ({platform.machine()})"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()

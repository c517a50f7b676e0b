"""Writing files: a reader never sees half of one, and a failure names the path."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Have an error of the disk in this block name `path`: a full disk's own error names no file.

    Raises OSError, also for what libraries in Rust raise instead of it (safetensors, tokenizers).
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError):
            number = error.errno if error.filename is None else None
        else:
            found = re.search(r"os error (\d+)", str(error))
            number = int(found[1]) if found else None
        if number not in _OF_THE_DISK:
            raise
        raise OSError(number, os.strerror(number), os.fspath(path)) from error


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path`, that gets its name when the block ends; nothing is left of one that fails."""
    partial = path.with_name(f"{path.name}.partial")
    with naming(path):
        try:
            yield partial
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all, and have it on the disk before it gets its name."""
    with whole(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, complete or not at all. Raises ValueError for NaN and infinities."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder to write into, which becomes `folder` only when the block ends without an error.

    What a process that was killed left of an earlier try is deleted.

    Raises FileExistsError when `folder` is a file, or exists and is not empty.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder}: is a file; name a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: exists and is not empty; name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    here = f".{folder.name}-{socket.gethostname()}-"
    for path in folder.parent.glob(f"{glob.escape(here)}*"):
        begun_by = re.fullmatch(r"(\d+)-\w+", path.name.removeprefix(here))
        if begun_by and not psutil.pid_exists(int(begun_by[1])):
            shutil.rmtree(path, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{here}{os.getpid()}-", dir=folder.parent))
    try:
        with naming(folder):
            yield work
        if folder.exists():
            folder.rmdir()
        os.replace(work, folder)
        folder.chmod(0o755)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise

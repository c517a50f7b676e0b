"""Write a file so that a reader, or a process that was killed while writing, never sees half of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write beside `path`, flush to disk, rename."""
    temporary = path.with_name(f"{path.name}.partial")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, complete or not at all. Raises ValueError for NaN and infinities."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")

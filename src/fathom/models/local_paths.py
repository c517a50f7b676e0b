"""Telling local paths from names on the hub, so that a mistyped path does not become a request to the hub."""

from __future__ import annotations

import difflib
from pathlib import Path


def is_local(name: str) -> bool:
    """Whether `name` can only be a local path: it begins with ".", "/" or "~", ends with "/", has more parts than the
    hub's `org/name`, or its first part is a local file or folder."""
    return (
        name.startswith((".", "/", "~"))
        or name.endswith("/")
        or name.count("/") > 1
        or ("/" in name and Path(name.split("/")[0]).exists())
    )


def refuse_absent(name: str, subject: str, kind: str = "folder") -> None:
    """Raise FileNotFoundError if `name` can only be a local path and does not exist.

    The message begins with `subject` and suggests the nearest existing name.
    """
    path = Path(name).expanduser()
    if path.exists() or not is_local(name):
        return
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    raise FileNotFoundError(
        f"{subject}: no such {kind}" + "".join(f"; did you mean {path.with_name(found)}?" for found in near)
    )

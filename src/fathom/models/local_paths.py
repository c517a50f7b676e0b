"""A name is a path here or one of the hub's: a mistyped path must not become a question to the hub."""

from __future__ import annotations

import difflib
from pathlib import Path


def is_local(name: str) -> bool:
    """Whether `name` can only be a path here: it begins with ".", "/" or "~", ends with "/", has more parts than the
    hub's `org/name`, or its first part is a file or folder here."""
    return (
        name.startswith((".", "/", "~"))
        or name.endswith("/")
        or name.count("/") > 1
        or ("/" in name and Path(name.split("/")[0]).exists())
    )


def refuse_absent(name: str, subject: str, kind: str = "folder") -> None:
    """Raise FileNotFoundError, `subject` first, if `name` can only be a path here and there is nothing of that name.

    The nearest name beside it is suggested.
    """
    path = Path(name).expanduser()
    if path.exists() or not is_local(name):
        return
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    raise FileNotFoundError(
        f"{subject}: no such {kind}" + "".join(f"; did you mean {path.with_name(found)}?" for found in near)
    )

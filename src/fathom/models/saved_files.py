"""The Python file beside a checkpoint's weights by which transformers finds Fathom's classes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.version import Version

from fathom.version import __version__

CODE = Path(__file__).with_name("modeling_fathom.py")
AUTO_MAP = {
    "AutoConfig": f"{CODE.stem}.FathomConfig",
    "AutoModelForCausalLM": f"{CODE.stem}.FathomForCausalLM",
}
DIFFUSION_AUTO_MAP = {
    "AutoConfig": f"{CODE.stem}.FathomConfig",
    "AutoModelForMaskedLM": f"{CODE.stem}.FathomForMaskedDiffusion",
}

NOT_STOCK = ("model_type", "architectures", "auto_map", "transformers_version", "fathom_version")  # of a config of ours


def write_code(folder: str | os.PathLike) -> None:
    """Write the file that `AUTO_MAP` names."""
    if not Path(folder).is_file():  # transformers refuses that
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(CODE, Path(folder) / CODE.name)


@contextlib.contextmanager
def naming_newer_versions(config_dict: dict[str, Any]) -> Iterator[None]:
    """Where a config is refused, the error says so if a newer version of Fathom wrote it."""
    try:
        yield
    except ValueError as error:
        written_by, remedy = str(config_dict.get("fathom_version", __version__)), "pip install --upgrade fathom-lm"
        if Version(written_by) <= Version(__version__) or remedy in str(error):
            raise
        raise ValueError(
            f"{error}. The config was written by fathom {written_by}, newer than this {__version__}: {remedy}"
        ) from error

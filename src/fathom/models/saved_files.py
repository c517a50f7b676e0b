"""The Python file beside a checkpoint's weights by which transformers finds Fathom's classes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

CODE = Path(__file__).with_name("modeling_fathom.py")
AUTO_MAP = {
    "AutoConfig": f"{CODE.stem}.FathomConfig",
    "AutoModelForCausalLM": f"{CODE.stem}.FathomForCausalLM",
}
DIFFUSION_AUTO_MAP = {
    "AutoConfig": f"{CODE.stem}.FathomConfig",
    "AutoModelForMaskedLM": f"{CODE.stem}.FathomForMaskedDiffusion",
}


def write_code(folder: str | os.PathLike) -> None:
    """Write the file that `AUTO_MAP` names."""
    if not Path(folder).is_file():  # transformers refuses that
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(CODE, Path(folder) / CODE.name)

"""The `audiovideo` wing: video with sound. MOVA (arXiv 2602.08794), complete and small enough to train.

    two video experts ─┐
                       ├─ bridge: cross-attention both ways, on one clock (bridge.py, rotary.py)
    audio tower ───────┘
    mova.py: the options;  joint.py: one forward, the training loss;  scheduler.py, guidance.py, pipeline.py: sampling

It needs `pip install 'fathom-lm[media]'`; `import fathom` imports nothing of it.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "Mova": "mova",
    "MovaConfig": "configuration",
    "PRESETS": "configuration",
    "MovaModel": "joint",
    "joint_forward": "joint",
    "VideoTower": "towers",
    "AudioTower": "towers",
    "Bridge": "bridge",
    "FlowMatchPairScheduler": "scheduler",
    "MovaPipeline": "pipeline",
    "branches": "guidance",
    "lora_config": "lora",
    "read_codec": "checkpoints",
    "read_release": "checkpoints",
    "write_release": "checkpoints",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        try:
            return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "diffusers":
                raise
            raise ImportError(f"{name} needs diffusers: pip install 'fathom-lm[media]'") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

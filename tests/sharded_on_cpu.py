"""FSDP2 by accelerate on CPUs, for child processes of tests.

accelerate knows FSDP on GPUs alone. Here its state is told that CPUs do it too, as torch does over gloo; everything
from there on is what a run on GPUs goes through.
"""

from __future__ import annotations

from typing import Any

import accelerate.state
from accelerate.utils import DistributedType

# what `accelerate launch` sets for fsdp_version: 2, beside FSDP_STATE_DICT_TYPE
ENVIRONMENT = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}

_initialise = accelerate.state.AcceleratorState.__init__


def _sharded(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    _initialise(self, *args, fsdp_plugin=fsdp_plugin, **options)
    self.fsdp_plugin = fsdp_plugin or getattr(self, "fsdp_plugin", None)
    if self.fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP


def allow_fsdp_on_cpu() -> None:
    accelerate.state.AcceleratorState.__init__ = _sharded  # type: ignore[method-assign]

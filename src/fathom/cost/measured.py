"""Measured speeds and sizes that plans are based on, each with its raw file in docs/results.

mfu: matrix-product FLOPs of training per second (`fathom.cost`, recomputation included) / the device's bf16 peak.
activations: measured bytes of activations / the closed form of plan.py for the same tokens and forwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Attributes:
    memory: bytes that the driver shows.
    peak: dense bf16 FLOP/s of its data sheet.
    reduce, gather: bytes a second that leave a GPU in a large all-reduce within a host, and in an all-gather or
        reduce-scatter; `links_from`, where that was measured.
    network: the same between hosts, of each GPU; an assumption until it is given.
    """

    name: str
    memory: float
    peak: float
    reduce: float
    gather: float
    links_from: str
    network: float = 50e9


@dataclass(frozen=True)
class Measured:
    """One training step. Attributes:
    method: name of the methods other than plain ones, joined by "+".
    width, layers: of the model.
    compile: "model" or "layers".
    source: file in docs/results, and the contestant in it.
    """

    method: str
    width: int
    layers: int
    compile: str
    mfu: float
    activations: float
    source: tuple[str, str]

    @property
    def where(self) -> str:
        return f"docs/results/{self.source[0]} ({self.source[1]}, width {self.width}, {self.layers} layers)"


DEVICES = {
    "h200": Device(
        "NVIDIA H200",
        143771 * 2**20,
        989e12,
        298e9,
        238e9,
        "docs/results/several_gpus_h200x2.json, two GPUs, 268 MB, NVLink multicast off",
    ),
}
MEASURED_TOKENS = 16_384  # of a GPU at a time, in every measurement below: with fewer a GPU waits for its kernels
MEASURED = (  # tests/cost/test_plan.py computes each again from its file
    Measured("vanilla", 768, 12, "model", 0.370, 0.93, ("speed_training_mha_h200.json", "vanilla")),
    Measured("vanilla", 1024, 24, "model", 0.402, 1.00, ("speed_training_gqa_h200.json", "vanilla")),
    Measured("depth_attention", 768, 12, "model", 0.355, 0.97, ("depth_methods_mha_h200.json", "depth_attention")),
    Measured("depth_attention", 1024, 24, "model", 0.394, 1.02, ("depth_methods_gqa_h200.json", "depth_attention")),
    Measured("resformer", 768, 12, "model", 0.365, 0.92, ("depth_methods_mha_h200.json", "resformer")),
    Measured("resformer", 1024, 24, "model", 0.399, 0.99, ("depth_methods_gqa_h200.json", "resformer")),
    Measured("pondering", 768, 12, "model", 0.389, 0.98, ("speed_training_mha_h200.json", "pondering s=1")),
    Measured("vanilla", 896, 12, "layers", 0.417, 0.95, ("several_gpus_h200x2.json", "110M")),
    Measured("vanilla", 2048, 22, "layers", 0.489, 1.01, ("several_gpus_h200x2.json", "1.1B")),
    Measured("ponderlm2", 1024, 24, "layers", 0.426, 0.92, ("latent_training_h200.json", "ponderlm2 checkpointed")),
    Measured("pause", 1024, 24, "layers", 0.383, 1.13, ("latent_training_h200.json", "pause")),
)


def nearest(method: str, width: int, compiled: str) -> Measured:
    """The measured step nearest in width with this method (else vanilla), and compiled the same way if there is one."""
    of_method = [row for row in MEASURED if row.method == method] or [
        row for row in MEASURED if row.method == "vanilla"
    ]
    rows = [row for row in of_method if row.compile == compiled] or of_method
    return min(rows, key=lambda row: abs(math.log(row.width / width)))

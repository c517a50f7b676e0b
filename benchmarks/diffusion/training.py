"""A training step of masked diffusion against one of its autoregressive twin: time, peak memory and no [B, T, V].

1024 wide, 24 layers, 2,048 tokens a row, bf16 autocast over fp32 weights, fused AdamW, layers compiled, batches as the
task `masked_diffusion` makes them. Tokens of a masked model see all T of a row, so its attention has twice the twin's
products. What that costs is said twice: by FLOPs at the speed of the twin's whole step, and by attention timed alone,
forward and backward, with and without the causal order. The bar is (twin's step + the first) times 1.05. Both models
are timed in turns; the peak is each one's own, over what lay in memory before.

python benchmarks/diffusion/training.py -o training.json          (--tiny: a dry run on a CPU)
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fathom import FathomConfig, FathomForCausalLM, FathomForMaskedDiffusion
from fathom.cost import training_flops_per_token
from fathom.report.provenance import provenance
from fathom.tasks.masked_diffusion import MaskedDiffusion
from fathom.train.trainer import compile_layers
from fathom.writing import write_json

SIZES = {"width": 1024, "layers": 24, "heads": 16, "inner": 2816, "vocabulary": 32_768, "length": 2048, "rows": 8}
TINY = {"width": 32, "layers": 2, "heads": 2, "inner": 64, "vocabulary": 512, "length": 32, "rows": 2}


class Steps:
    """Training steps of one model on one batch."""

    def __init__(self, masked: bool, sizes: dict[str, int], device: torch.device):
        torch.manual_seed(0)
        section = {"name": "masked", "mask_token_id": sizes["vocabulary"] - 1} if masked else {"name": "none"}
        config = FathomConfig(
            hidden_size=sizes["width"], intermediate_size=sizes["inner"], num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"], vocab_size=sizes["vocabulary"], bos_token_id=None, eos_token_id=None,
            max_position_embeddings=sizes["length"], diffusion=section,
        )  # fmt: skip
        self.device, self.config, self.task = device, config, MaskedDiffusion(random_length=0.0)
        before = memory(device)
        self.model: Any = (FathomForMaskedDiffusion if masked else FathomForCausalLM)(config).to(device).train()
        compile_layers(self.model, backend="inductor" if device.type == "cuda" else "eager")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        ids = torch.randint(0, sizes["vocabulary"] - 1, (sizes["rows"], sizes["length"]))
        examples = [
            {"input_ids": row, "labels": row, "draw": torch.tensor([0, number])} for number, row in enumerate(ids)
        ]
        self.batch = {name: x.to(device) for name, x in self.task.collate(examples).items()}
        self(2)  # compiles, and makes the optimiser's state
        self.peak = -before + self.highest()

    def __call__(self, steps: int) -> float:
        """Seconds a step."""
        wait(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.task.forward(self.model, **self.batch).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        wait(self.device)
        return (time.perf_counter() - start) / steps

    def highest(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        self(1)
        return torch.cuda.max_memory_allocated()


def memory(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def attention(sizes: dict[str, int], causal: bool, device: torch.device) -> float:
    """Seconds of attention of all layers, forward and backward."""
    shape = sizes["rows"], sizes["heads"], sizes["length"], sizes["width"] // sizes["heads"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    found = []
    for _ in range(6):
        wait(device)
        start = time.perf_counter()
        for _ in range(4):
            F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()
        wait(device)
        found.append((time.perf_counter() - start) / 4)
    return statistics.median(found[1:]) * sizes["layers"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    sizes = TINY if given.tiny else SIZES
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    twin, masked = (Steps(kind, sizes, device) for kind in (False, True))
    times: dict[str, list[float]] = {"autoregressive": [], "masked": []}
    for _ in range(given.turns):
        times["autoregressive"].append(twin(3))
        times["masked"].append(masked(3))
    step, own = (statistics.median(times[name]) for name in ("autoregressive", "masked"))
    tokens = sizes["rows"] * sizes["length"]
    flops = training_flops_per_token(twin.config, sizes["length"], False) * tokens
    # QKᵀ and AV, forward and twice backward, of the keys that a causal token does not see
    more = sizes["layers"] * 3 * 2 * 2 * sizes["width"] * tokens * (sizes["length"] - 1) / 2
    extra = more / (flops / step)
    found = {
        "sizes": sizes, "seconds": times, "step": {"autoregressive": step, "masked": own},
        "extra_attention_flops": more, "twin_flops": flops, "extra_attention_seconds": extra,
        "attention_alone": {"causal": attention(sizes, True, device), "all": attention(sizes, False, device)},
        "time_ratio": own / (step + extra), "bar": 1.05,
        "peak_bytes": {"autoregressive": twin.peak, "masked": masked.peak},
        "peak_ratio": masked.peak / twin.peak if twin.peak else None,
        "logits_of_all_tokens_would_take": tokens * sizes["vocabulary"] * 4, **provenance(1),
    }  # fmt: skip
    write_json(given.output, found)
    print({name: found[name] for name in ("time_ratio", "peak_ratio", "step", "extra_attention_seconds")})


if __name__ == "__main__":
    main()

"""Writes the checkpoints of `test_old_files.py`: tiny models of every method, and the logits they gave.

The files beside this script were written by commit 8b5eabd, before the house was rearranged. They are not to be made
anew: what they test is that later code reads them. `python tests/old_files/make.py FOLDER` shows how they were made.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DynamicCache

from fathom import FathomConfig, FathomForCausalLM

SIZES = {
    "vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CASES: dict[str, dict] = {
    "vanilla-llama": {"num_key_value_heads": 1},
    "vanilla-qwen3": {"backbone": "qwen3", "num_key_value_heads": 1, "head_dim": 8},
    "vanilla-gpt_neox": {"backbone": "gpt_neox", "partial_rotary_factor": 0.5},
    "vanilla-gpt2": {"backbone": "gpt2"},
    "vanilla-tied-hf": {"tie_word_embeddings": True, "init": "hf"},
    "vanilla-yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 16
        }
    },
    "loop": {"depth": {"name": "loop", "passes": 2}},
    "loop-gpt2": {"backbone": "gpt2", "depth": {"name": "loop", "passes": 3}},
    "pondering": {"depth": {"name": "pondering", "steps": 2}},
    "pondering-neox": {"backbone": "gpt_neox", "depth": {"name": "pondering", "steps": 1}},
    "pause": {"depth": {"name": "pause", "pauses": 2}},
    "ponderlm2": {"depth": {"name": "ponderlm2"}},
    "ponderlm3": {"depth": {"name": "ponderlm3"}},
    "adaptive_latent_cot": {"depth": {"name": "adaptive_latent_cot"}},
    "adaptive_latent_cot-qwen3": {"backbone": "qwen3", "head_dim": 8, "depth": {"name": "adaptive_latent_cot"}},
    "adaponderlm": {"depth": {"name": "adaponderlm"}},
    "adaponderlm-gpt2": {"backbone": "gpt2", "depth": {"name": "adaponderlm"}},
    "depth_attention": {"mixer": {"name": "depth_attention"}},
    "depth_attention-post_rope": {
        "backbone": "qwen3", "head_dim": 8, "mixer": {"name": "depth_attention", "k_norm_position": "post_rope"}
    },
    "depth_attention-pondering": {
        "mixer": {"name": "depth_attention"}, "depth": {"name": "pondering", "steps": 1}
    },
    "depth_attention-ponderlm2": {"mixer": {"name": "depth_attention"}, "depth": {"name": "ponderlm2"}},
    "resformer": {"mixer": {"name": "resformer"}},
    "resformer-gpt_neox": {"backbone": "gpt_neox", "mixer": {"name": "resformer"}},
    "denseformer": {"residual": {"name": "denseformer"}},
    "denseformer-gpt_neox": {"backbone": "gpt_neox", "residual": {"name": "denseformer"}},
    "attnres": {"residual": {"name": "attnres"}},
    "mhc": {"residual": {"name": "mhc"}},
    "mhc-depth_attention": {"residual": {"name": "mhc"}, "mixer": {"name": "depth_attention"}},
    "attnres-resformer": {"residual": {"name": "attnres"}, "mixer": {"name": "resformer"}},
    "loop-depth_attention-gpt2": {
        "backbone": "gpt2", "depth": {"name": "loop", "passes": 2}, "mixer": {"name": "depth_attention"}
    },
}  # fmt: skip


def decoded(model: FathomForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """The logits of a row, its tokens given one by one."""
    cache, pieces = DynamicCache(), []
    with torch.no_grad():
        for token in ids.split(1, dim=1):
            pieces.append(model(token, past_key_values=cache, use_cache=True).logits)
    return torch.cat(pieces, dim=1)


def make(folder: Path) -> None:
    for number, (name, fields) in enumerate(CASES.items()):
        torch.manual_seed(number)
        model = FathomForCausalLM(FathomConfig(**{**SIZES, **fields})).eval()
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():  # off the initial values: closed gates and zero biases would hide mistakes
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        ids = torch.randint(3, SIZES["vocab_size"], (2, 9), generator=generator)
        model.save_pretrained(folder / name)
        save_file({"ids": ids, "logits": decoded(model, ids)}, folder / name / "expected.safetensors")
        (folder / name / "generation_config.json").unlink(missing_ok=True)
    (folder / "versions.json").write_text(json.dumps({"commit": "8b5eabd", "torch": torch.__version__}) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))

"""FLOPs and KV bytes of LLaVA-1.5-7B's shapes by vision tokens kept, counted on the meta device: no weights, no GPU.

    python benchmarks/vision/flops.py docs/results/vision_flops.json

A prompt of 64 text tokens and one picture, attention as whole products. `saved_prefill` is the share of the full
model's prefill that is saved, tower included; `saved_language` that of its language model. KV bytes are bf16's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig

from fathom.cost.vision import kv_bytes, llava_flops
from fathom.vision.configuration import FathomLlavaConfig
from fathom.writing import write_json

TEXT, SIDE = 64, 336
COUNTS = (24, 12, 10, 8, 6, 5, 4)  # sides of the kept grid


def config_of(side: int) -> Any:
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    text = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    return FathomLlavaConfig(
        vision_config=CLIPVisionConfig(**vision, image_size=SIDE, patch_size=14, projection_dim=768),
        text_config=LlamaConfig(**text, vocab_size=32_064, max_position_embeddings=4096),
        image_token_index=32_000,
        vision_compress={"name": "fourier_vlm", "ratio": f"{side}/24"},
    )


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} OUT.json")
    rows: list[dict[str, Any]] = []
    for side in COUNTS:
        config = config_of(side)
        parts = llava_flops(config, SIDE, TEXT + 1)  # the image token is one of the text's
        prefill, language = sum(parts.values()), parts["language"]
        rows.append({
            "tokens": side * side, **parts, "prefill": prefill,
            "kv_bytes": kv_bytes(config, SIDE, TEXT + 1, torch.bfloat16),
            "saved_prefill": round(1 - prefill / (rows[0]["prefill"] if rows else prefill), 4),
            "saved_language": round(1 - language / (rows[0]["language"] if rows else language), 4),
        })  # fmt: skip
        print(rows[-1], flush=True)
    write_json(Path(sys.argv[1]), {"text_tokens": TEXT, "side": SIDE, "rows": rows})


if __name__ == "__main__":
    main()

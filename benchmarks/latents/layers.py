"""Which layer of a masked model says which token it is of: heads on clean and noised vectors, layer by layer.

python benchmarks/latents/layers.py runs/codar_cpu/seed-0/encoder/model -o layers.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from fathom.data import DataConfig, prepare
from fathom.latents.model import FathomForLatentDiffusion, new_config
from fathom.latents.recovery import RecoveryConfig, study
from fathom.report.provenance import provenance
from fathom.writing import write_json
from fathom_cli.latents import rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--heads", nargs="+", default=["linear", "factorised"])
    parser.add_argument("-o", "--output", type=Path, default=Path("layers.json"))
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.encoder)
    data = prepare(
        DataConfig(tokenizer=given.encoder, block_size=given.length, max_documents=given.documents, max_tokens=600_000,
                   max_validation_tokens=4096),
        given.output.parent / ".data",
    )  # fmt: skip
    train, held_out = rows(data.train), rows(data.validation)
    sizes = {"hidden_size": given.width, "num_hidden_layers": 2, "num_attention_heads": 4}
    depth = new_config(given.encoder, tokenizer, denoiser=sizes, decoder=sizes).encoder_config.num_hidden_layers
    config = RecoveryConfig(heads=tuple(given.heads), steps=given.steps, levels=(0.0, 0.05, 0.1, 0.2))
    found: dict[str, Any] = {}
    for name, codar in {"embeddings": {"source": "embeddings"}, **{f"layer {n}": {"layer": n} for n in range(1, depth)},
                        "last": {}}.items():  # fmt: skip
        made = new_config(given.encoder, tokenizer, length=given.length, denoiser=sizes, decoder=sizes,
                          codar={"ema": 0.0, **codar})  # fmt: skip
        model = FathomForLatentDiffusion.from_encoder(given.encoder, made).eval()
        model.space.fit([(some, None) for some in train[:1024].split(64)])
        print(name, flush=True)
        found[name] = study(model, train, held_out, config)
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    write_json(given.output, {"command": "benchmarks/latents/layers.py", "arguments": arguments, "found": found,
                              **provenance(1)})  # fmt: skip


if __name__ == "__main__":
    main()

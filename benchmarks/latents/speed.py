"""Ratios of a latent diffusion model's parts to what they should cost, in one process, contestants taking turns.

    step      forward and backward of the denoiser over those of a masked diffusion model of its backbone: ≤ 1.05
    pass      the same without backward, as in sampling
    decode    tokens/s of the contextual decoder over those of an autoregressive model of its parameters, through the
              same path: ≥ 0.9. A layer with cross-attention has a third more weights, so that one has more layers
    decode_equal_layers   the same over a model of as many layers
    sample    64 × 128 tokens at N = 100 over (N passes + the decoder's tokens), each timed alone: ≤ 1.2

python benchmarks/latents/speed.py --width 512 --layers 8 -o speed.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fathom import FathomConfig, FathomForCausalLM, FathomForMaskedDiffusion
from fathom.latents.configuration import FathomLatentConfig
from fathom.latents.encoder import Latents
from fathom.latents.model import FathomForLatentDiffusion
from fathom.latents.sampling import decode
from fathom.report.provenance import provenance
from fathom.writing import write_json


def timed(functions: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each, in turns, after one call each."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                found[name].append(time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 512), ("layers", 8), ("heads", 8), ("vocabulary", 4096), ("rows", 64),
                          ("length", 128), ("steps", 100), ("repeats", 7)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("-o", "--output", type=Path, default=Path("speed.json"))
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    sizes = {"hidden_size": given.width, "num_hidden_layers": given.layers, "num_attention_heads": given.heads}
    mask, length, rows = given.vocabulary - 1, given.length, given.rows
    shape = {"vocab_size": given.vocabulary, "max_position_embeddings": length + 1, **sizes}
    masked = FathomForMaskedDiffusion(FathomConfig(**shape, diffusion={"name": "masked", "mask_token_id": mask}))
    more = {**shape, "num_hidden_layers": round(given.layers * 4 / 3)}
    plain, sized = (FathomForCausalLM(FathomConfig(**fields)).to(device).eval() for fields in (shape, more))
    config = FathomLatentConfig(
        encoder=masked.config, denoiser=sizes, decoder=sizes, length=length, vocab_size=given.vocabulary,
        start_token_id=0, mask_token_id=mask, codar={"layer": 2},
        trained=["latent_diffusion", "contextual_decoder"],
    )  # fmt: skip
    model = FathomForLatentDiffusion.from_encoder(masked, config).to(device).eval()
    masked = masked.to(device)
    ids = torch.randint(1, mask, (rows, length), device=device)
    model.space.fit([(ids, None)])
    z, t = model.encode(ids).values, torch.rand(rows, device=device).clamp(min=0.01)
    latents = Latents(z, None, model.space.fingerprint())

    def autocast() -> Any:
        return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def masked_step() -> None:
        with autocast():
            loss = masked.train()(ids, labels=ids).loss
        loss.backward()
        masked.zero_grad(set_to_none=True)

    def denoiser_step() -> None:
        with autocast():
            said = model.denoiser(z, t, z)
        (said.float() - z).square().mean().backward()
        model.denoiser.zero_grad(set_to_none=True)

    @torch.no_grad()
    def masked_pass() -> None:
        with autocast():
            masked.eval()(ids)

    @torch.no_grad()
    def denoiser_pass() -> None:
        with autocast():
            model.denoiser_mean(z, t, z)

    def passes() -> None:
        with torch.no_grad():
            for _ in range(given.steps):
                model.denoiser_mean(z, t, z)

    start = torch.zeros(rows, 1, dtype=torch.long, device=device)

    def written(model: Any) -> Callable[[], Any]:
        return lambda: model.generate(
            input_ids=start, attention_mask=torch.ones_like(start), max_new_tokens=length, do_sample=True, top_k=0,
            pad_token_id=0,
        )  # fmt: skip

    def contextual() -> None:
        decode(model, latents, temperature=1.0)

    def sample() -> None:
        model.generate(rows=rows, steps=given.steps)

    found: dict[str, list[float]] = {}
    for group in (
        {"masked_step": masked_step, "denoiser_step": denoiser_step},
        {"masked_pass": masked_pass, "denoiser_pass": denoiser_pass},
        {"equal_layers": written(plain), "autoregressive": written(sized), "contextual": contextual},
        {"sample": sample, "passes": passes, "decoder_alone": contextual},
    ):
        found |= timed(group, given.repeats, device)
    middle = {name: statistics.median(values) for name, values in found.items()}
    ratios = {
        "step": middle["denoiser_step"] / middle["masked_step"],
        "pass": middle["denoiser_pass"] / middle["masked_pass"],
        "decode": middle["autoregressive"] / middle["contextual"],
        "decode_equal_layers": middle["equal_layers"] / middle["contextual"],
        "sample": middle["sample"] / (middle["passes"] + middle["decoder_alone"]),
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f}")
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    parameters = {
        **model.part_parameters(),
        "masked": masked.num_parameters(),
        "autoregressive": plain.num_parameters(),
    }
    write_json(given.output, {"command": "benchmarks/latents/speed.py", "arguments": arguments, "ratios": ratios,
                              "seconds": found, "parameters": parameters, **provenance(1)})  # fmt: skip


if __name__ == "__main__":
    main()

"""Time of LLaVA-1.5-7B's shapes with fewer vision tokens, beside FLOPs and bytes: bf16, random weights, one GPU.

    python benchmarks/vision/speed.py --output docs/results/vision_speed_h200.json

Prefill at batch 8: one forward from pixels to the first logits; also its tower alone, how many operations Python
launches, and the same forward recorded as a CUDA graph, which launches once. Generation at batch 1 through
`generate()`. All methods in one process; medians. FLOPs by torch's counter, attention as whole products.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from fathom.decoding.graphs import warm_and_record
from fathom.vision import METHODS, compress_vision, from_dict
from fathom.vision.base import Compressor, LanguageCompressor
from fathom.vision.bench import layer_bytes, lengths_read
from fathom.writing import write_json

TEXT, NEW = 64, 32
GRID = (24, 24)
PREFILL = (
    (None, "all_tokens"),
    (144, "fourier_vlm"),
    (36, "fourier_vlm"),
    (25, "fourier_vlm"),
    (144, "average_pooling"),
)


def llava(small: bool) -> LlavaForConditionalGeneration:
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    text = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    if small:
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
        text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, image_size=336, patch_size=14, projection_dim=768),
        text_config=LlamaConfig(**text, vocab_size=32_064, max_position_embeddings=4096),
        image_token_index=32_000,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return LlavaForConditionalGeneration._from_config(config, dtype=torch.bfloat16).eval()


def inputs_of(model: Any, method: Compressor, batch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, 32_000, (batch, TEXT), generator=generator)
    image = torch.full((batch, method.count(GRID)), model.config.image_token_id)
    pixels = torch.randn(batch, 3, 336, 336, generator=generator)
    ids = torch.cat((text[:, :1], image, text[:, 1:]), 1).to(model.device)
    pixels = pixels.to(model.device, model.dtype)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


class Launched(TorchDispatchMode):
    """Counts operations that compute something: those that only look at a tensor otherwise launch no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def see(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Tower, compressor and projector."""
    layer, strategy = model.config.vision_feature_layer, model.config.vision_feature_select_strategy
    found = model.model.get_image_features(
        pixel_values=inputs["pixel_values"], vision_feature_layer=layer, vision_feature_select_strategy=strategy,
        return_dict=True,
    )  # fmt: skip
    return torch.stack(list(getattr(found, "pooler_output", found)))


def prompt(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits of `model(**inputs, logits_to_keep=1)` without what waits for the GPU: the check that placeholders and
    features agree, and the search for padding."""
    ids, features = inputs["input_ids"], see(model, inputs)
    text = model.get_input_embeddings()(ids)
    states = torch.cat((text[:, :1], features, text[:, 1 + features.shape[1] :]), 1)  # as `inputs_of` has laid them
    return model.lm_head(model.model.language_model(inputs_embeds=states, use_cache=True).last_hidden_state[:, -1:])


def recorded(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` as a CUDA graph; on a CPU as it is."""
    run()
    return warm_and_record(run, warm=1) if torch.cuda.is_available() else run


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Seconds, and how far the slowest lies above the fastest."""
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times), max(times) - min(times)


def flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="a few thousand parameters, to see that it runs")
    parser.add_argument("--seconds", type=float, default=1e9, help="no method is begun after so many")
    given, begin = parser.parse_args(), time.perf_counter()
    model: Any = llava(given.small)
    layers = model.model.language_model.layers
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {
        "device": device, "torch": torch.__version__, "transformers": transformers.__version__, "text_tokens": TEXT,
        "new_tokens": NEW, "prefill_batch_8": [], "generate_batch_1": [],
    }  # fmt: skip

    for tokens, name in PREFILL:
        options = {} if tokens is None else {"ratio": "5/24"} if tokens == 25 else {"tokens": tokens}
        method = from_dict({"name": name, **options})
        with compress_vision(model, None, method):
            inputs = inputs_of(model, method, 8)
            run = functools.partial(model, **inputs, use_cache=True, logits_to_keep=1)
            run()
            counted = flops(run)
            seconds, spread = median(run, 7)
            with Launched() as launched:
                logits = run().logits
            difference = float((prompt(model, inputs).float() - logits.float()).abs().max() / logits.float().std())
            tower = functools.partial(see, model, inputs)
            graph, graph_of_tower = recorded(functools.partial(prompt, model, inputs)), recorded(tower)
            once, once_spread = median(graph, 7)
            towers = {"tower_seconds": median(tower, 7)[0], "tower_recorded_seconds": median(graph_of_tower, 7)[0]}
            tower_flops = flops(tower)
            del graph, graph_of_tower
        features = torch.randn(8, 576, model.config.vision_config.hidden_size, device=model.device, dtype=model.dtype)
        method(features, GRID)
        op = [median(functools.partial(method, features, GRID), 1)[0] for _ in range(20)]
        row = {"method": name, "vision_tokens": method.count(GRID), "flops": counted, "seconds": seconds,
               "spread": spread, "op_seconds": statistics.median(op), "launched": launched.count,
               "recorded_seconds": once, "recorded_spread": once_spread, "recorded_difference": difference,
               "tower_flops": tower_flops, **towers}  # fmt: skip
        found["prefill_batch_8"].append(row)
        print(row, flush=True)
        write_json(given.output, found)

    names = ["all_tokens", "fourier_vlm", *(n for n in METHODS if n not in ("all_tokens", "fourier_vlm", "mqt"))]
    plan = [(name, None if name == "all_tokens" else 144) for name in names]
    for name, tokens in [*plan[:2], ("fourier_vlm", 36), *plan[2:]]:
        if time.perf_counter() - begin > given.seconds:
            found["stopped"] = True
            break
        method = from_dict({"name": name, **({} if tokens is None else {"tokens": tokens})})
        model.set_attn_implementation("eager" if isinstance(method, LanguageCompressor) else "sdpa")
        row = {"method": name, "tokens": tokens}
        with compress_vision(model, None, method):
            inputs = inputs_of(model, method, 1)
            cache = model(**inputs, use_cache=True, logits_to_keep=1).past_key_values
            row["kv_bytes"] = sum(
                part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values)
            )
            read = lengths_read(method, inputs["input_ids"].shape[1], method.count(GRID), len(layers))
            row["kv_bytes_closed"] = layer_bytes(layers, read)
            del cache
            generate = functools.partial(model.generate, **inputs, do_sample=False, pad_token_id=0)
            for label, count in (("first_token_seconds", 1), ("seconds", NEW)):
                row[label], row[f"{label}_spread"] = median(
                    functools.partial(generate, min_new_tokens=count, max_new_tokens=count), 3
                )
            row["tokens_per_second"] = (NEW - 1) / (row["seconds"] - row["first_token_seconds"])
        found["generate_batch_1"].append(row)
        print(row, flush=True)
        write_json(given.output, found)


if __name__ == "__main__":
    main()

"""A bench of the cost of vision tokens, method by method at equal numbers; and pictures of what each method keeps."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fathom.vision.base import Compressor, Grid, LanguageCompressor
from fathom.vision.compress import TOWERS, compress_vision
from fathom.vision.families import square
from fathom.vision.methods import METHODS, from_dict


@dataclasses.dataclass(frozen=True)
class Recorder(Compressor):
    """Keeps every token and notes what it saw: (features [B, n, C], grid) of every call."""

    seen: list[tuple[Tensor, Grid]] = dataclasses.field(default_factory=list)

    makes_a_grid = True

    def kept(self, grid: Grid) -> Grid:
        return grid

    def count(self, grid: Grid) -> int:
        return grid[0] * grid[1]

    def __call__(self, features: Tensor, grid: Grid) -> Tensor:
        self.seen.append((features.detach(), grid))
        return features


def inputs_of(model: Any, processor: Any, images: list[Any], prompt: str) -> dict[str, Tensor]:
    """The processor's inputs for a prompt and its images, which come first if the prompt has no placeholder
    for them.
    """
    token = processor.image_token
    if token not in prompt:
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": prompt}]
        if getattr(processor, "chat_template", None):
            prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        else:
            prompt = f"{token} " * len(images) + prompt
    inputs = processor(images=images, text=[prompt], return_tensors="pt")
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }


def features_of(model: Any, processor: Any, image: Any) -> tuple[Tensor, Grid]:
    """The features [n, C] that a compressor gets for an image (its first tile or slice), and their grid."""
    recorder = Recorder()
    with torch.no_grad(), compress_vision(model, processor, recorder):
        model(**inputs_of(model, processor, [image], ""))
    features, grid = recorder.seen[0]
    return features[0].float().cpu(), grid


@torch.no_grad()
def bench(
    model: Any,
    processor: Any,
    image: Any,
    tokens: int,
    prompt: str,
    new_tokens: int = 16,
    names: list[str] | None = None,
) -> list[dict[str, Any]]:
    """Rows of measurements, one for each method.

    A row has vision tokens; FLOPs of a prompt (torch's counter, attention as plain products); those of the tower, the
    language model's layers and a step after the prompt by counter and in closed form (None for a tower with windowed
    attention, such as Qwen2.5-VL's); KV bytes as stored and in closed form; time to the first token and tokens per
    second through `generate()`. A method that does not support the model has the reason instead.

    Raises:
        ValueError: a name in `names` is no method.
    """
    rows = []
    for name in ["all_tokens", *(other for other in names or METHODS if other != "all_tokens")]:
        row: dict[str, Any] = {"method": name}
        rows.append(row)
        method = from_dict({"name": name, **({} if name == "all_tokens" else {"tokens": tokens})})
        try:
            with compress_vision(model, processor, method):
                inputs = inputs_of(model, processor, [image], prompt)
                row["vision_tokens"] = int((inputs["input_ids"] == processor.image_token_id).sum())
                with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                    output = model(**inputs, use_cache=True, logits_to_keep=1)
                row["prefill_flops"] = counter.get_total_flops()
                layers = language_of(model).layers
                lengths = lengths_read(method, inputs["input_ids"].shape[1], row["vision_tokens"], len(layers))
                row["tower_flops"] = _counted(counter, r"\.(vision_tower|vision_model|visual)$")
                row["tower_flops_closed"] = tower_flops(model, inputs["pixel_values"])
                row["language_flops"] = _counted(counter, r"\.(language_model|text_model)\.layers\.\d+$")
                row["language_flops_closed"] = layer_flops(layers, lengths)
                cache = getattr(output, "cache", None) or output.past_key_values
                row["kv_bytes"] = sum(
                    part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values)
                )
                row["kv_bytes_closed"] = layer_bytes(layers, lengths)
                row["step_flops"] = _flops(model, inputs, 3) - _flops(model, inputs, 2)
                row["step_flops_closed"] = step_flops(model, [length + 2 for length in lengths])
                settings = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
                row["first_token_seconds"] = _seconds(
                    model, inputs, {**settings, "max_new_tokens": 1, "min_new_tokens": 1}
                )
                whole = _seconds(model, inputs, settings)
                row["tokens_per_second"] = (new_tokens - 1) / max(whole - row["first_token_seconds"], 1e-9)
        except ValueError as error:
            row["refused"] = str(error)
    return rows


def language_of(model: Any) -> Any:
    """The language model: its layers, and the module around them."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft's wrapper
    return base.model.language_model if hasattr(base.model, "language_model") else base.model.text_model


def lengths_read(method: Compressor, prompt: int, placeholders: int, layers: int) -> list[int]:
    """The number of tokens that each layer reads from a prompt with one picture."""
    if not isinstance(method, LanguageCompressor):
        return [prompt] * layers
    return [prompt - placeholders + tokens for tokens in method.read(square(placeholders), layers)]


def tower_flops(model: Any, pixels: Tensor) -> int | None:
    """FLOPs of a ViT on all tiles of all images: 2·n·(3·p²)·C for its patches and, for each layer that T = n tokens or
    n + 1 (with a CLS token) pass, 2·T·(weights of its matrices) + 4·T²·C."""
    config = model.config.vision_config
    if pixels.ndim < 4:  # patches of Qwen's tower, which attends in windows
        return None
    patch, width = config.patch_size, config.hidden_size
    tiles, patches = pixels[..., 0, 0, 0].numel(), (pixels.shape[-2] // patch) * (pixels.shape[-1] // patch)
    length = patches + (config.model_type in TOWERS)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft's wrapper
    tower = base.model.vision_tower if hasattr(base.model, "vision_tower") else base.model.vision_model
    weights = sum(part.weight.numel() for part in tower.modules() if isinstance(part, nn.Linear))
    attention = 4 * length**2 * width * config.num_hidden_layers
    return tiles * (2 * patches * pixels.shape[-3] * patch**2 * width + 2 * length * weights + attention)


def layer_flops(layers: Any, lengths: list[int]) -> int:
    """Σ over layers of 2·T·(weights of its matrices) + 4·T²·H·d, of a prompt of one row."""
    found = 0
    for layer, length in zip(layers, lengths, strict=True):
        weights = sum(part.weight.numel() for part in layer.modules() if isinstance(part, nn.Linear))
        found += 2 * length * weights + 4 * length**2 * layer.self_attn.q_proj.out_features
    return found


def step_flops(model: Any, lengths: list[int]) -> int:
    """FLOPs of the one token that is generated when layers hold so many, itself included: over layers
    Σ 2·(weights of its matrices) + 4·T·H·d, and 2·V·C of the head."""
    found = 2 * model.get_output_embeddings().weight.numel()
    for layer, length in zip(language_of(model).layers, lengths, strict=True):
        weights = sum(part.weight.numel() for part in layer.modules() if isinstance(part, nn.Linear))
        found += 2 * weights + 4 * length * layer.self_attn.q_proj.out_features
    return found


def layer_bytes(layers: Any, lengths: list[int]) -> int:
    """Σ over layers of 2·T·Hkv·d numbers."""
    return sum(
        2 * length * layer.self_attn.k_proj.out_features * layer.self_attn.k_proj.weight.element_size()
        for layer, length in zip(layers, lengths, strict=True)
    )


def _counted(counter: FlopCounterMode, modules: str) -> int:
    """FLOPs within the modules whose names match."""
    counts = counter.get_flop_counts()
    return sum(sum(found.values()) for name, found in counts.items() if re.search(modules, name))


def _flops(model: Any, inputs: dict[str, Tensor], new_tokens: int) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.generate(**inputs, do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens)
    return counter.get_total_flops()


def _seconds(model: Any, inputs: dict[str, Tensor], settings: dict[str, Any], repeats: int = 3) -> float:
    """Median of `generate()`."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        model.generate(**inputs, **settings)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


@torch.no_grad()
def chosen_places(model: Any, processor: Any, image: Any, method: Compressor, features: Tensor) -> Tensor:
    """Indices in the grid of the vision tokens of an image (its first tile) that a method keeps.

    A token merged from several has the index of the vision token with the nearest features [n, C]. For a method that
    drops tokens between layers, these are the tokens that the last layer reads.
    """
    made: list[Tensor] = []

    class Noting(type(method)):  # type: ignore[misc]
        def __call__(self, *arguments: Any, **kwargs: Any) -> Tensor:
            made.append(super().__call__(*arguments, **kwargs))
            return made[-1]

    Noting.__name__ = type(method).__name__  # errors name the method
    with compress_vision(model, processor, Noting(**dataclasses.asdict(method))):
        inputs = inputs_of(model, processor, [image], "")
        output = model(**inputs, use_cache=True, logits_to_keep=1)
    if not isinstance(method, LanguageCompressor):
        return torch.cdist(made[0][0].float().cpu(), features).argmin(1)
    cache = getattr(output, "cache", None) or output.past_key_values
    index, counts, _ = cache.thinned[max(cache.thinned)]
    places = (inputs["input_ids"][0] == processor.image_token_id).nonzero()[:, 0]
    return torch.isin(places, index[0][counts[0]]).nonzero()[:, 0].cpu()


def show(model: Any, processor: Any, image: Any, tokens: int, output: Path) -> dict[str, Any]:
    """Draw an image, its features, what each method keeps of them, and their spectrum.

    A square is one token; its colour shows the three largest principal components of the uncompressed features. A
    method with a smaller grid is shown by that grid's squares, any other by the tokens that it keeps at their places.

    Returns the methods shown, why others are not, and the share of the features' energy in the low frequencies that
    `tokens` tokens keep.
    """
    import matplotlib
    import numpy

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from fathom.ops.dct import dct, resample_grid

    features, grid = features_of(model, processor, image)
    center = features.mean(0)
    axes_of = torch.linalg.svd(features - center, full_matrices=False)[2][:3].T
    low, high = ((features - center) @ axes_of).aminmax(dim=0)

    def colours(kept: Tensor, shape: tuple[int, ...]) -> Any:
        return (((kept - center) @ axes_of - low) / (high - low)).clamp(0, 1).view(*shape, -1).numpy()

    panels: list[tuple[str, Any]] = [("image", image), (f"all {len(features)} tokens", colours(features, grid))]
    refused: dict[str, str] = {}
    for name, cls in METHODS.items():
        if name in ("all_tokens", "dct_coefficients"):  # the second's are no tokens of the picture
            continue
        try:
            options = {"rescale": "amplitude"} if name == "fourier_vlm" else {}
            method: Any = from_dict({"name": name, "tokens": tokens, **options})
            if cls.makes_a_grid:
                drawn = colours(method(features[None], grid)[0], method.kept(grid))
            else:
                places = chosen_places(model, processor, image, method, features)
                drawn = numpy.ones((len(features), 3), numpy.float32)
                drawn[places] = colours(features[places], (len(places),))
                drawn = drawn.reshape(*grid, 3)
            panels.append((f"{name}, {tokens}", drawn))
        except ValueError as error:
            refused[name] = str(error)
    spectrum = dct(dct(features.T.reshape(-1, *grid)).transpose(-1, -2).contiguous()).square().mean(0).T  # [H, W]
    panels.append(("energy by frequency, log₁₀", spectrum.clamp_min(1e-12).log10().numpy()))
    wide = min(5, len(panels))
    rows = -(-len(panels) // wide)
    figure, places_of = pyplot.subplots(
        rows, wide, figsize=(2.6 * wide, 2.9 * rows), layout="constrained", squeeze=False
    )
    for place in places_of.flat:
        place.set_xticks([])
        place.set_yticks([])
        place.set_frame_on(False)
    for place, (title, drawn) in zip(places_of.flat, panels, strict=False):
        place.imshow(drawn)
        place.set_title(title, fontsize=10)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)
    kept: Any = from_dict({"name": "fourier_vlm", "tokens": tokens}).kept(grid)  # type: ignore[attr-defined]
    share = resample_grid(features, grid, kept).square().sum() / features.square().sum()
    h, w = kept
    spread = (spectrum[:h, :w].sum() - spectrum[0, 0]) / (spectrum.sum() - spectrum[0, 0])
    shown = [name for name in METHODS if any(title.startswith(f"{name},") for title, _ in panels)]
    return {"methods": shown, "refused": refused, "energy": share.item(), "energy_without_mean": spread.item()}

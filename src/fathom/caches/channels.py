"""Which channels FourierAttention compresses: an offline search, its JSON, and a rule that needs no data.

Per layer the ρ·G·D channels with the smallest reconstruction error are compressed, across heads. The error of a channel
is the MSE between its middle part on calibration text and the rebuilt one (2N states, affine repair), not normalised.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fathom.caches import versions
from fathom.caches.base import CacheShape, portion
from fathom.caches.compress import cache_shape
from fathom.caches.record import HALF_PRECISION, fingerprint, record
from fathom.ops import fourier_coefficients as fourier
from fathom.writing import naming

FORMAT = "fathom.fourier_channels.1"


@dataclasses.dataclass(frozen=True)
class ChannelSets:
    """Channels that are kept as coefficients: for every compressed layer, their sorted flat ids head·D + channel."""

    key: tuple[tuple[int, ...], ...]
    value: tuple[tuple[int, ...], ...]
    kv_heads: int
    head_dim: int
    model: str = ""
    model_fingerprint: str = ""

    def __post_init__(self) -> None:
        if len(self.key) != len(self.value):
            raise ValueError(f"channel sets name {len(self.key)} key layers but {len(self.value)} value layers")
        width = self.kv_heads * self.head_dim
        for side, layers in (("key", self.key), ("value", self.value)):
            for layer, ids in enumerate(layers):
                if list(ids) != sorted(set(ids)) or (ids and not 0 <= ids[0] <= ids[-1] < width):
                    raise ValueError(
                        f"{side} channels of layer {layer} must be sorted, distinct and within 0 … {width - 1}"
                    )

    def save(self, path: str | os.PathLike) -> None:
        """Write as JSON, atomically."""
        layers = [{"k": list(k), "v": list(v)} for k, v in zip(self.key, self.value)]
        about = {"format": FORMAT, "model": self.model, "fingerprint": self.model_fingerprint}
        about |= {"head_dim": self.head_dim, "num_kv_heads": self.kv_heads, "layers": layers}  # type: ignore[dict-item]
        temporary = Path(f"{os.fspath(path)}.{os.getpid()}.part")
        with naming(path):
            temporary.write_text(json.dumps(about))
            temporary.replace(path)


def load_channels(path: str | os.PathLike, model: PreTrainedModel | None = None) -> ChannelSets:
    """The channel sets in a file. With `model`, checks that they were made on it.

    Raises:
        OSError: the file cannot be read. ValueError: not a channel file, sets out of range, or made on another model.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"channels={os.fspath(path)!r}: no such file; make one with search_channels(model, …)")
    try:
        about: dict[str, Any] = json.loads(Path(path).read_text())
        if about["format"] != FORMAT:
            raise KeyError("format")
        sets = ChannelSets(
            tuple(tuple(layer["k"]) for layer in about["layers"]),
            tuple(tuple(layer["v"]) for layer in about["layers"]),
            about["num_kv_heads"],
            about["head_dim"],
            about["model"],
            about["fingerprint"],
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"channels={os.fspath(path)!r} is not a channel file of this library: {error!r}") from None
    if model is not None and sets.model_fingerprint != fingerprint(model):
        raise ValueError(
            f"channels={os.fspath(path)!r} were found on {sets.model or 'an unnamed model'} (fingerprint "
            f"{sets.model_fingerprint}), not on this model ({fingerprint(model)}), or by an older Fathom that "
            f"looked at fewer weights: run search_channels on it{HALF_PRECISION}"
        )
    return sets


def paper_ratios(layers: int) -> list[tuple[float, float]]:
    """Shares (of keys, of values) of channels that are compressed, layer by layer.

    The first 4 layers have 0.90 and 0.95, the last 8 have 0.50 and 0.70, all others 0.80 and 0.80. In a model of fewer
    than 16 layers the first eighth and the last quarter stand for the first 4 and the last 8.
    """
    first, last = (4, 8) if layers >= 16 else (layers // 8, layers // 4)
    return [
        (0.90, 0.95) if layer < first else (0.50, 0.70) if layer >= layers - last else (0.80, 0.80)
        for layer in range(layers)
    ]


def default_channels(shape: CacheShape) -> ChannelSets:
    """Channel sets without data: in every head the first ρ·D channels in RoPE order (pair j is j and j + D/2)."""
    half = shape.key_dim // 2
    order = [channel for pair in range(half) for channel in (pair, pair + half)]
    sides: list[list[tuple[int, ...]]] = [[], []]
    for ratios in paper_ratios(shape.layers):
        for side, ratio in zip(sides, ratios):
            chosen = order[: portion(ratio, shape.key_dim)]
            side.append(tuple(sorted(head * shape.key_dim + c for head in range(shape.kv_heads) for c in chosen)))
    return ChannelSets(tuple(sides[0]), tuple(sides[1]), shape.kv_heads, shape.key_dim)


@torch.no_grad()
def search_channels(
    model: nn.Module,
    prompts: list[Tensor],
    frequencies: int = 512,
    n_sink: int = 4,
    n_local: int = 1024,
    calibration: str = "pre_rope",
    ratios: list[tuple[float, float]] | None = None,
) -> ChannelSets:
    """Channel sets from data: in every layer the share ρ of channels with the smallest error on prompts (each [1,T]).

    calibration: "pre_rope" (faithful: the projections' outputs) or "post_rope" (what is compressed in the end).

    Raises:
        ValueError: a prompt shorter than n_sink + n_local + 2 tokens, or an unknown calibration.
    """
    if calibration not in ("pre_rope", "post_rope"):
        raise ValueError(f"calibration={calibration!r}: use 'pre_rope' or 'post_rope'")
    inner = versions.causal_lm(model)
    shape = cache_shape(inner)
    check_widths(shape)
    errors: list[list[Tensor]] | None = None
    for prompt in prompts:
        middle = prompt.shape[1] - n_sink - n_local
        if middle < 2:
            raise ValueError(f"a calibration prompt has {prompt.shape[1]} tokens: use more than {n_sink + n_local + 1}")
        found = [
            [channel_error(flatten_heads(x)[:, n_sink : n_sink + middle], frequencies) for x in pair]
            for pair in record(model, prompt, pre_rope=calibration == "pre_rope")
        ]
        errors = found if errors is None else [[a + b for a, b in zip(x, y)] for x, y in zip(errors, found)]
    if errors is None:
        raise ValueError("prompts is empty: give at least one calibration text")
    sides: list[list[tuple[int, ...]]] = [[], []]
    for pair, chosen in zip(errors, ratios or paper_ratios(shape.layers)):
        for side, error, ratio in zip(sides, pair, chosen):
            best = error.argsort(stable=True)[: portion(ratio, len(error))]
            side.append(tuple(sorted(best.tolist())))
    name = versions.text_config(inner)._name_or_path
    return ChannelSets(tuple(sides[0]), tuple(sides[1]), shape.kv_heads, shape.key_dim, name, fingerprint(inner))


def check_widths(shape: CacheShape) -> None:
    """Refuse a model whose keys and values have heads of different widths: channel sets know one width."""
    if shape.key_dim != shape.value_dim:
        raise ValueError(
            f"FourierAttention: heads of {shape.key_dim} channels for keys and {shape.value_dim} for values are not "
            "supported; use another method, such as KIVI or TreeKV"
        )


def flatten_heads(x: Tensor) -> Tensor:
    """[B,G,T,D] → [B,T,G·D]."""
    return x.transpose(1, 2).flatten(2)


def channel_error(middle: Tensor, frequencies: int) -> Tensor:
    """MSE of every channel [M] after compression with Tw = its length and the affine repair."""
    middle = middle.to(torch.promote_types(middle.dtype, torch.float32))
    window = middle.shape[1]
    weight = fourier.weights("affine", frequencies, window, middle.dtype, middle.device)
    rebuilt = fourier.rebuild(fourier.transform(middle, frequencies, window), weight, 0, window, window)
    scale, shift = affine_repair(middle, rebuilt)
    return (rebuilt * scale + shift - middle).square().mean((0, 1))


def affine_repair(original: Tensor, rebuilt: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, shift) [B,1,M] that give the rebuilt channel [B,t,M] the original's mean and greatest deviation.

    k̃ = (x̂ − m_d)·(d_u/d_d) + m_u;   a channel whose d_d is round-off next to its values keeps scale 1
    """
    mean, mean_rebuilt = original.mean(1, keepdim=True), rebuilt.mean(1, keepdim=True)
    spread = (original - mean).abs().amax(1, keepdim=True)
    spread_rebuilt = (rebuilt - mean_rebuilt).abs().amax(1, keepdim=True)
    constant = spread_rebuilt <= 1e-5 * rebuilt.abs().amax(1, keepdim=True)
    scale = torch.where(constant, 1.0, spread / torch.where(constant, 1.0, spread_rebuilt))
    return scale, mean - scale * mean_rebuilt

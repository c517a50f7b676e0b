"""The release's checkpoints, read and written: names of weights, one for one, and the fields of the parts' configs.

A release is a diffusers folder with parts `video_dit`, `video_dit_2`, `audio_dit`, `dual_tower_bridge`, … whose class
names are the release's own. They are read by the folder's name: the names of classes in its JSON are never imported.
Towers get diffusers' names, of which ours are the same; the bridge keeps the release's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fathom.audiovideo.bridge import Bridge
from fathom.audiovideo.codecs import NeuralCodec
from fathom.audiovideo.dac import Dac
from fathom.audiovideo.mova import Mova
from fathom.audiovideo.towers import AudioTower, VideoTower
from fathom.writing import new_folder, write_json

TOWERS: dict[str, Any] = {"video_dit": VideoTower, "video_dit_2": VideoTower, "audio_dit": AudioTower}
BRIDGE = "dual_tower_bridge"
WEIGHTS = "diffusion_pytorch_model"
_IN_BLOCKS = {
    **{f"self_attn.{name}": f"attn1.to_{name}" for name in "qkv"},
    **{f"cross_attn.{name}": f"attn2.to_{name}" for name in "qkv"},
    "self_attn.o": "attn1.to_out.0",
    "cross_attn.o": "attn2.to_out.0",
    **{f"self_attn.{name}": f"attn1.{name}" for name in ("norm_q", "norm_k")},
    **{f"cross_attn.{name}": f"attn2.{name}" for name in ("norm_q", "norm_k")},
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "modulation": "scale_shift_table",
}
_ABOVE = {
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "patch_embedding": "patch_embedding",
}
_BLOCK = re.compile(r"(blocks\.\d+\.)(.+)")


def _renamed(key: str, in_blocks: dict[str, str], above: dict[str, str]) -> str:
    found = _BLOCK.fullmatch(key)
    start, rest, table = (found[1], found[2], in_blocks) if found else ("", key, above)
    for end in ("", ".weight", ".bias"):
        stem = rest.removesuffix(end) if end else rest
        if rest.endswith(end) and stem in table:
            return f"{start}{table[stem]}{end}"
    raise ValueError(f"{key!r}: no weight of a tower has this name; towers have {', '.join(list(above)[:4])} …")


def to_diffusers(key: str) -> str:
    """diffusers' name of a tower's weight, from the release's. Raises ValueError for a name that no tower has."""
    return _renamed(key, _IN_BLOCKS, _ABOVE)


def to_release(key: str) -> str:
    """The release's name of a tower's weight, from diffusers'."""
    return _renamed(key, {b: a for a, b in _IN_BLOCKS.items()}, {b: a for a, b in _ABOVE.items()})


# field of ours: fields of the release, of which the first that a config has is taken
_TOWER_FIELDS = {
    "num_attention_heads": ("num_heads",),
    "in_channels": ("in_dim",),
    "out_channels": ("out_dim",),
    "text_dim": ("text_dim",),
    "freq_dim": ("freq_dim",),
    "ffn_dim": ("ffn_dim",),
    "num_layers": ("num_layers",),
    "eps": ("eps",),
    "patch_size": ("patch_size",),
}
_BRIDGE_FIELDS = {
    "video_layers": ("visual_layers",),
    "audio_layers": ("audio_layers",),
    "video_width": ("visual_hidden_dim",),
    "audio_width": ("audio_hidden_dim",),
    "head_dim": ("head_dim",),
    "audio_rate": ("audio_fps",),
    "strategy": ("interaction_strategy",),
    "pooled_adaln": ("pooled_adaln",),
}


def tower_config(part: str, released: dict[str, Any]) -> dict[str, Any]:
    """Our fields of a tower's config. Raises ValueError for a field that is missing."""
    fields = {name: _field(part, released, names) for name, names in _TOWER_FIELDS.items()}
    if part == "audio_dit":
        fields.pop("patch_size")
    width = _field(part, released, ("dim",))
    return {**fields, "attention_head_dim": width // fields["num_attention_heads"]}


def bridge_config(released: dict[str, Any]) -> dict[str, Any]:
    """Our fields of the bridge's config. A missing field does not get the default of the release's constructor, as its
    defaults differ from its checkpoint's."""
    fields = {name: _field(BRIDGE, released, names) for name, names in _BRIDGE_FIELDS.items()}
    rotary = "none"
    if _field(BRIDGE, released, ("apply_cross_rope",)):
        rotary = "first_frame" if released.get("apply_first_frame_bias_in_rope") else "aligned"
    if released.get("trainable_condition_scale"):
        raise ValueError("dual_tower_bridge/config.json: trainable_condition_scale=true is not supported; set it false")
    return {**fields, "rotary": rotary}


def _field(part: str, released: dict[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if name in released:
            return released[name]
    raise ValueError(f"{part}/config.json: {names[0]!r} is missing; it has {', '.join(released)}")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Weights of a part's safetensors file, or of its shards by their index. Raises OSError or ValueError."""
    index = folder / f"{WEIGHTS}.safetensors.index.json"
    if not index.exists():
        return dict(_weights(folder / f"{WEIGHTS}.safetensors"))
    where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    for name in set(where.values()):
        if Path(name).name != name:
            raise ValueError(f"{index}: shard {name!r} lies outside the folder")
    found = {key: value for name in sorted(set(where.values())) for key, value in _weights(folder / name)}
    missing, more = sorted(set(where) - set(found)), sorted(set(found) - set(where))
    if missing or more:
        raise ValueError(f"{index}: shards and index differ, first in {(missing or more)[0]!r}")
    return found


def _weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  it is no mapping
            yield key, file.get_tensor(key)


def read_part(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A tower or the bridge of a release, from the sub-folder of its name."""
    part, released = folder.name, json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = read_weights(folder)
    if part == BRIDGE:
        kind, config = Bridge, bridge_config(released)
    else:
        kind, config = TOWERS[part], tower_config(part, released)
        weights = {to_diffusers(key): value for key, value in weights.items()}
    with torch.device("meta"):
        module = kind(**config)
    expected = set(module.state_dict())
    for what, keys in (("has no", expected - set(weights)), ("has", set(weights) - expected)):
        if keys:
            raise ValueError(f"{folder}: {what} weight {sorted(keys)[0]!r} (and {len(keys) - 1} more)")
    module.load_state_dict(weights, strict=True, assign=True)
    return module.to(dtype) if dtype is not None else module


def read_release(folder: str | Path, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Towers and bridge of a release by name: `MovaPipeline(**parts, …)` takes them beside the codecs, tokenizer and
    text encoder. Raises OSError or ValueError that names the file."""
    folder = Path(folder)
    found = {}
    for part in (*TOWERS, BRIDGE):
        if not (folder / part / "config.json").is_file():
            raise FileNotFoundError(f"{folder / part / 'config.json'}: no such file; a release has {', '.join(TOWERS)}")
        found[part] = read_part(folder / part, dtype)
    return found


def read_codec(folder: str | Path, frame_rate: float = 24.0) -> NeuralCodec:
    """The codec of a release, for `MovaPipeline.codec`: diffusers' autoencoder in `video_vae`, the DAC in `audio_vae`.
    Raises OSError or ValueError."""
    from diffusers import AutoencoderKLWan

    folder = Path(folder) / "audio_vae"
    released = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    try:
        audio = Dac.from_release(released, read_weights(folder))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return NeuralCodec(AutoencoderKLWan.from_pretrained(folder.with_name("video_vae")), audio, frame_rate)


def write_release(parts: dict[str, Any], folder: str | Path, shard: int = 2**33) -> None:
    """Write towers and bridge in the release's layout, in shards of at most `shard` bytes. Raises ValueError for a
    bridge that the layout cannot express (one direction, unaligned).
    """
    with new_folder(Path(folder)) as work:
        for name, module in parts.items():
            (work / name).mkdir()
            weights = module.state_dict()
            if name == BRIDGE:
                config = _released_bridge(module)
            else:
                weights = {to_release(key): value for key, value in weights.items()}
                config = _released_tower(module)
            write_json(work / name / "config.json", config)
            _write_weights(weights, work / name, shard)


def _released_tower(module: Any) -> dict[str, Any]:
    own = module.config
    fields = {names[0]: own[name] for name, names in _TOWER_FIELDS.items() if name in own}
    kind = "WanModel" if isinstance(module, VideoTower) else "WanAudioModel"
    fields.setdefault("patch_size", [1])
    return {"_class_name": kind, "dim": own.num_attention_heads * own.attention_head_dim, **fields}


def _released_bridge(module: Bridge) -> dict[str, Any]:
    own = module.config
    if own.directions != "both" or own.rotary == "unaligned" or tuple(own.layers) != Mova.layers:
        raise ValueError(
            f"dual_tower_bridge: directions={own.directions!r}, rotary={own.rotary!r}, layers={list(own.layers)} have "
            "no place in the release's layout; save the pipeline instead"
        )
    return {
        "_class_name": "DualTowerConditionalBridge",
        **{names[0]: own[name] for name, names in _BRIDGE_FIELDS.items()},
        "apply_cross_rope": own.rotary != "none",
        "apply_first_frame_bias_in_rope": own.rotary == "first_frame",
        "trainable_condition_scale": False,
    }


def _write_weights(weights: dict[str, Tensor], folder: Path, shard: int) -> None:
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, value in weights.items():
        size += value.nbytes
        if size > shard and parts[-1]:
            parts.append({})
            size = value.nbytes
        parts[-1][key] = value.contiguous()
    if len(parts) == 1:
        save_file(parts[0], folder / f"{WEIGHTS}.safetensors", {"format": "pt"})
        return
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"{WEIGHTS}-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / name, {"format": "pt"})
        where |= dict.fromkeys(part, name)
    total = sum(value.nbytes for value in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    write_json(folder / f"{WEIGHTS}.safetensors.index.json", index)

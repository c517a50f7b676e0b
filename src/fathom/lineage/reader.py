"""A checkpoint, opened but not loaded: every weight by its role, in one layout, read from disk when asked for.

model = open_checkpoint("folder, .gguf file or hub name")
model.read(3, "q")       # [heads · head_dim, hidden], float32, rotate-half rows
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathom.lineage.errors import CheckpointError
from fathom.lineage.families import (
    Family,
    Geometry,
    family_of,
    geometry,
    gguf_config,
    gguf_family,
    roles,
    stored_layers,
    without_role,
)
from fathom.lineage.store import (
    GGUFStore,
    LoRAStore,
    TensorStore,
    files_beside,
    hub_snapshot,
    json_object,
    model_file,
    open_store,
)
from fathom.lineage.token_rows import gguf_vocabulary, read_vocabulary
from fathom.models.local_paths import is_local


def open_checkpoint(
    source: str | Path,
    *,
    base: str | Path | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> "Checkpoint":
    """Open a folder, file or hub name without loading weights.

    source: folder with config.json and weights, a `.gguf` file, a PEFT adapter folder, or a hub name `org/model`.
    base:   the base model of an adapter; default: what its adapter_config.json names.
    dtype:  what `read` returns; float32 or, for tests, float64.

    Raises CheckpointError (PackedWeightsError for packed 4-bit weights) when it cannot be read, ValueError for a device
    that is not there.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch raises depends on how it was built
        raise ValueError(f"device: {str(device)!r} cannot be used here ({str(error).splitlines()[0]})") from error
    path = Path(source)
    if not path.exists():
        if "/" not in str(source) or is_local(str(source)):
            raise CheckpointError(f"{source}: no such file or folder")
        path = hub_snapshot(str(source))
    if not (path / "adapter_config.json").is_file():
        return _open_whole(path, str(source), device, dtype)
    # Weights beside an adapter are its base, whatever name the adapter's configuration has for that: so transformers.
    if (path / "config.json").is_file() and model_file(path) is not None:
        model = _open_whole(path, str(source), device, dtype)
    else:
        base = base or _named_base(path)
        if Path(base).is_dir() and (Path(base) / "adapter_config.json").is_file():
            raise CheckpointError(f"{base}: the base of adapter {path} is an adapter itself; merge it with peft first")
        model = open_checkpoint(base, device=device, dtype=dtype)
    vocabulary = read_vocabulary(path) or model.vocabulary
    merged = LoRAStore(model.store, path)
    return Checkpoint(
        str(source), merged, model.config, model.family, model.geometry, vocabulary, torch.device(device), dtype
    )


def _named_base(adapter: Path) -> str:
    """What an adapter's configuration names as its base: a hub name, or a folder inside its own."""
    file = adapter / "adapter_config.json"
    named = json_object(file).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise CheckpointError(
            f"{adapter}: a LoRA adapter without its base; name it as base_model_name_or_path in adapter_config.json"
        )
    inside = (adapter / named).resolve()
    if inside.exists() and inside.is_relative_to(adapter.resolve()) and inside != adapter.resolve():
        return str(inside)
    if Path(named).exists() or named.count("/") != 1 or named.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{file}: names {named!r} as base, which is outside its folder and no hub name; name the base yourself "
            "(--base, or base= in Python)"
        )
    return named


def _open_whole(path: Path, source: str, device: str | torch.device, dtype: torch.dtype) -> "Checkpoint":
    """A model that is no adapter."""
    store = open_store(path)
    if isinstance(store, GGUFStore):
        arch = store.metadata("general.architecture", "")
        metadata = {k: store.metadata(f"{arch}.{k}") for k in _GGUF_KEYS}
        family = gguf_family(arch)
        config = gguf_config(metadata, arch)
        vocabulary = gguf_vocabulary(store)
    else:
        folder = path if path.is_dir() else path.parent
        config = _read_config(folder)
        family = family_of(config)
        vocabulary = read_vocabulary(folder)
    try:
        shape = geometry(config, family)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: sizes in its configuration are missing or malformed ({error!r})") from error
    if missing := sorted(set(range(shape.layers)) - stored_layers(list(store.names()))):
        raise CheckpointError(
            f"{path}: {len(missing)} of {shape.layers} layers have no tensors (first: layer {missing[0]}); is a shard "
            "missing?"
        )
    return Checkpoint(source, store, config, family, shape, vocabulary, torch.device(device), dtype)


_GGUF_KEYS = (
    "embedding_length", "block_count", "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.key_length_mla", "attention.value_length_mla", "attention.kv_lora_rank",
    "rope.dimension_count", "feed_forward_length", "expert_count", "attention.layer_norm_rms_epsilon", "rope.freq_base",
    "context_length",
)  # fmt: skip


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder}: no config.json; it is needed to know heads and layers")
    config = json_object(file)
    for tower in ("text_config", "language_config", "llm_config", "thinker_config"):
        if isinstance(config.get(tower), dict):  # multimodal: the language tower is the model that is compared
            inner = config[tower]
            config = inner.get("text_config", inner)
    return config


@dataclass
class Checkpoint:
    """An opened checkpoint. `read(layer, role)` gives one weight; `embedding()`, `head()` and `norms` the rest."""

    source: str
    store: TensorStore
    config: dict[str, Any]
    family: Family
    geometry: Geometry
    vocabulary: dict[bytes, int] | None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    _layer_names: dict[tuple[int, str], str] = field(init=False, repr=False)
    _names: dict[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._layer_names, self._names = roles(list(self.store.names()), self.family, self.geometry.layers)
        if "embed" not in self._names:
            raise CheckpointError(
                f"{self.source}: no input embedding ({self.family.embed}.weight, as model type "
                f"{self.config.get('model_type')!r} is read here) in the checkpoint; is a shard missing?"
            )
        if (shape := self.store.shape(self._names["embed"]))[1:] != (self.geometry.hidden,):
            raise CheckpointError(
                f"{self.source}: the embedding has shape {shape}, but config.json says {self.geometry.hidden} wide"
            )

    @property
    def files(self) -> list[Path]:
        """The files that hold the weights."""
        return self.store.files

    @property
    def files_beside(self) -> list[Path]:
        """Weight files in the same folder that were not read, because transformers would not load them."""
        return files_beside(self.store)

    @property
    def extra(self) -> list[str]:
        """Names of stored tensors that have no role: what `read` cannot give and no method compares."""
        return without_role(list(self.store.names()), [*self._layer_names.values(), *self._names.values()])

    @property
    def places(self) -> dict[tuple[int, str], str]:
        """Stored names by (layer, stored role); layer −1 for what lies outside the layers."""
        return {(-1, role): name for role, name in self._names.items()} | self._layer_names

    def stored(self, name: str) -> Tensor:
        """A tensor by the name it is stored under."""
        return self._load(name)

    def _load(self, name: str, rows: slice | None = None) -> Tensor:
        # Stored values travel as they are (bf16: half the bytes) and are widened and checked where they arrive.
        tensor = self.store.read(name, rows).to(self.device).to(self.dtype)
        # One NaN or infinity makes the sum one. The reverse may be overflow, so only then every entry is looked at.
        if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"{self.source}: tensor {name!r} has NaN or infinite entries; the file is damaged or training diverged"
            )
        return tensor

    def layer_roles(self, layer: int) -> set[str]:
        """Raw roles stored for a layer (fused ones under their fused name)."""
        return {role for l, role in self._layer_names if l == layer}

    def unfused_roles(self, layer: int) -> list[str]:
        """Roles of a layer as `read` takes them: fused matrices and stacked experts by their parts, sorted."""
        found: list[str] = []
        for stored in self.layer_roles(layer):
            base, bias = stored.removesuffix(".bias"), ".bias" if stored.endswith(".bias") else ""
            if parts := [role for role, fused in _FUSED.items() if fused == base]:
                found += [role + bias for role in parts]
            elif base == "experts.gate_up":
                found += [f"experts.{e}.{part}" for e in range(self.geometry.experts) for part in ("gate", "up")]
            elif base.startswith("experts.") and base.count(".") == 1:
                found += [f"experts.{e}.{base.split('.')[1]}{bias}" for e in range(self.geometry.experts)]
            else:
                found.append(stored)
        return sorted(found)

    def outer_roles(self) -> list[str]:
        """Roles outside the layers that `outer` takes."""
        return sorted(set(self._names) - {"embed", "head"})

    def has(self, layer: int, role: str) -> bool:
        """Whether `read(layer, role)` would succeed."""
        if role.removesuffix(".bias") in _FUSED and (layer, _fused(role)) in self._layer_names:
            return True
        if role in _LATENT and (layer, "kv_b") in self._layer_names:
            return role != "q" or any((layer, r) in self._layer_names for r in ("q", "q_b"))
        if (expert := _expert(role)) and self._stacked(layer, expert[1]):
            return expert[0] < self.geometry.experts
        return (layer, role) in self._layer_names

    def _stacked(self, layer: int, part: str) -> str | None:
        """The role of the tensor that holds this part of all experts of a layer, if one does."""
        roles = [f"experts.{part}", *(["experts.gate_up"] if part in ("gate", "up") else [])]
        return next((role for role in roles if (layer, role) in self._layer_names), None)

    def read(self, layer: int, role: str, rows: slice | None = None) -> Tensor:
        """One weight in canonical layout: [out, in], q/k/v unfused, rotary pairs in halves, norm gains with their
        offset.

        rows: read this slice of the first axis only, where stored tensors allow it without a detour (`o`, `down`).
        Raises CheckpointError when the layer has no such weight.
        """
        names, base = self._layer_names, role.removesuffix(".bias")
        if (layer, role) not in names and base in _FUSED and (layer, _fused(role)) in names:
            fused = self._oriented(names[layer, _fused(role)])
            tensor = split_fused(fused, base, self.family, self.geometry)
        elif role in _LATENT and (layer, "kv_b") in names:
            return self._latent(layer, role)
        elif (expert := _expert(role)) and (stacked := self._stacked(layer, expert[1])):
            tensor = self._load(names[layer, stacked], slice(expert[0], expert[0] + 1))[0]
            return tensor.chunk(2)[expert[1] == "up"] if stacked == "experts.gate_up" else tensor
        elif (layer, role) in names:
            tensor = self._oriented(names[layer, role], rows)
        else:
            raise CheckpointError(f"{self.source}: layer {layer} has no {role!r}")
        self._check_shape(layer, role, tensor)
        if base in {"q", "k"} and self.family.interleaved:
            tensor = halves_from_pairs(tensor, self.geometry.head_dim, self.geometry.rotary(layer))
        if base.endswith("norm") and not role.endswith(".bias"):
            tensor = tensor + self.family.gain_offset
            if base in {"q_norm", "k_norm"} and self.family.interleaved:
                tensor = halves_from_pairs(tensor, self.geometry.head_dim, self.geometry.rotary(layer))
        return tensor

    def _check_shape(self, layer: int, role: str, tensor: Tensor) -> None:
        """A weight that the sizes in config.json cannot make raises CheckpointError before it is taken for another."""
        g = self.geometry
        out = {"q": g.heads * g.head_dim, "k": g.kv_heads * g.head_dim}.get(role, 0)
        if role not in {"q", "k", "v", "gate", "up", "attn_norm", "ffn_norm"}:
            return
        found = tuple(tensor.shape)
        rank = 1 if role.endswith("norm") else 2
        if len(found) != rank or found[-1] != g.hidden or (out and found[0] != out):
            raise CheckpointError(
                f"{self.source}: layer {layer} {role!r} has shape {found}, which does not fit config.json "
                f"({g.hidden} wide, {g.heads} heads and {g.kv_heads} key-value heads of {g.head_dim})"
            )

    def _oriented(self, name: str, rows: slice | None = None) -> Tensor:
        if not self.family.transposed or len(self.store.shape(name)) != 2:
            return self._load(name, rows)
        transposed = self._load(name).T
        return (transposed if rows is None else transposed[rows]).contiguous()

    def _latent(self, layer: int, role: str) -> Tensor:
        """Effective full matrices of multi-head latent attention: products of the low-rank factors, gain between
        them."""
        g, names = self.geometry, self._layer_names

        def factor(role: str) -> Tensor:
            return self._load(names[layer, role])

        if role == "q":
            q = factor("q") if (layer, "q") in names else factor("q_b") * factor("q_a_norm") @ factor("q_a")
            return nope_last(q.reshape(g.heads, g.head_dim, -1), self.family, g).flatten(0, 1)
        down = factor("kv_a")
        latent, rope = down[: -g.rotary_dim], down[-g.rotary_dim :]
        up = (factor("kv_b") * factor("kv_a_norm")).reshape(g.heads, g.nope_dim + g.value_dim, -1)
        if role == "v":
            return (up[:, g.nope_dim :] @ latent).flatten(0, 1)
        # One rotating key serves all heads; repeated, it meets each head's own non-rotating part.
        key = torch.cat([up[:, : g.nope_dim] @ latent, rope.expand(g.heads, -1, -1)], dim=1)
        return nope_last(key, self.family, g).flatten(0, 1)

    @cached_property
    def tied(self) -> bool:
        """Whether the output head is the embedding itself. A stored head that differs is used, as transformers does,
        even where the configuration ties it."""
        if "head" not in self._names:
            return True
        if not self.config.get("tie_word_embeddings") or isinstance(self.store, GGUFStore):
            return False
        embed, head = (self._names[name] for name in ("embed", "head"))
        if self.store.shape(embed) != self.store.shape(head):
            return False
        parts = (slice(i, i + 4096) for i in range(0, self.vocab_rows, 4096))
        return all(torch.equal(self.store.read(embed, rows), self.store.read(head, rows)) for rows in parts)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding table (padding included)."""
        return self.store.shape(self._names["embed"])[0]

    def embedding(self, rows: slice | None = None) -> Tensor:
        """Input embedding [rows, hidden]."""
        return self._load(self._names["embed"], rows)

    def head(self, rows: slice | None = None) -> Tensor:
        """Output head [rows, hidden]; the embedding when tied."""
        return self._load(self._names["embed" if self.tied else "head"], rows)

    def outer(self, role: str) -> Tensor | None:
        """`final_norm`, `final_norm.bias`, `positions`, `head.bias`, or None where the model has none."""
        if role not in self._names:
            return None
        tensor = self._load(self._names[role])
        return tensor + self.family.gain_offset if role == "final_norm" else tensor

    def feed_forwards(self, layer: int) -> Iterator[str]:
        """Role prefixes of the layer's feed-forward networks: "" when dense, else "experts.0." …, "shared."."""
        if self.has(layer, "up"):
            yield ""
        yield from (f"experts.{e}." for e in range(self.geometry.experts) if self.has(layer, f"experts.{e}.up"))
        if self.has(layer, "shared.up"):
            yield "shared."


_FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
_LATENT = {"q", "k", "v"}


def _fused(role: str) -> str:
    base = role.removesuffix(".bias")
    return _FUSED[base] + role[len(base) :]


def _expert(role: str) -> tuple[int, str] | None:
    """`experts.3.gate` → (3, "gate")."""
    parts = role.split(".")
    return (int(parts[1]), parts[2]) if parts[0] == "experts" and len(parts) == 3 else None


def split_fused(fused: Tensor, role: str, family: Family, g: Geometry) -> Tensor:
    """The rows of `role` in a fused matrix or bias, in the order of the unfused weight."""
    if role in {"gate", "up"}:
        return fused.chunk(2)[0 if role == "gate" else 1]
    group, total = g.heads // g.kv_heads, (g.heads + 2 * g.kv_heads) * g.head_dim
    if len(fused) != total:
        raise CheckpointError(f"fused q, k, v: {len(fused)} rows, but config.json makes {total}")
    if family.fused == "blocks":
        sizes = [g.heads * g.head_dim, g.kv_heads * g.head_dim, g.kv_heads * g.head_dim]
        return fused.split(sizes)["qkv".index(role)]
    # per_head is grouped attention with one query head a group
    blocks = fused.reshape(g.kv_heads, group + 2, g.head_dim, *fused.shape[1:])
    picked = {"q": blocks[:, :group], "k": blocks[:, group : group + 1], "v": blocks[:, group + 1 :]}[role]
    return picked.reshape(-1, *fused.shape[1:])


def join_fused(q: Tensor, k: Tensor, v: Tensor, family: Family, g: Geometry) -> Tensor:
    """The inverse of `split_fused` for q, k, v."""
    if family.fused == "blocks":
        return torch.cat([q, k, v])
    rest = q.shape[1:]
    parts = [t.reshape(g.kv_heads, -1, g.head_dim, *rest) for t in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def nope_last(heads: Tensor, family: Family, g: Geometry) -> Tensor:
    """Latent attention's [H, nope + rope, d] → rotating dims first, in halves, as in every other family."""
    rope = heads[:, g.nope_dim :]
    if family.interleaved:
        rope = torch.cat([rope[:, 0::2], rope[:, 1::2]], dim=1)
    return torch.cat([rope, heads[:, : g.nope_dim]], dim=1)


def nope_first(rows: Tensor, family: Family, g: Geometry) -> Tensor:
    """The inverse of `nope_last`, for rows [H·(rope + nope), d]."""
    if family.interleaved:
        rows = pairs_from_halves(rows, g.head_dim, g.rotary_dim)
    return rows.reshape(g.heads, g.head_dim, -1).roll(g.nope_dim, 1).flatten(0, 1)


def halves_from_pairs(rows: Tensor, head_dim: int, rotary: int) -> Tensor:
    """Rotary pair i at rows (2i, 2i+1) → rows (i, i + rotary/2), within every head; [heads·head_dim, …] keeps its
    shape."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    turning = heads[:, :rotary]
    return torch.cat([turning[:, 0::2], turning[:, 1::2], heads[:, rotary:]], dim=1).reshape(rows.shape)


def pairs_from_halves(rows: Tensor, head_dim: int, rotary: int) -> Tensor:
    """The inverse of `halves_from_pairs`."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    half = rotary // 2
    turning = torch.stack([heads[:, :half], heads[:, half:rotary]], dim=2).flatten(1, 2)
    return torch.cat([turning, heads[:, rotary:]], dim=1).reshape(rows.shape)

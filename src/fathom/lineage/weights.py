"""A whole model in memory, by role: what the attack bench changes, and writes back as an ordinary Hugging Face
checkpoint."""

import json
import shutil
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fathom.lineage.errors import CheckpointError
from fathom.lineage.families import Family, Geometry, family_of, geometry
from fathom.lineage.reader import Checkpoint, join_fused, nope_first, pairs_from_halves
from fathom.lineage.store import GGUFStore
from fathom.lineage.token_rows import spelled
from fathom.writing import new_folder

_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
                    "tokenizer.model", "generation_config.json", "chat_template.jinja")  # fmt: skip
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                  "gemma3_text": "Gemma3ForCausalLM"}  # fmt: skip


@dataclass
class Weights:
    """Every tensor of a causal LM. Keys: `embed`, `head` (when untied), `final_norm`, `positions`, `layers.{l}.{role}`.

    Layouts are those of `Checkpoint.read`; norm gains are effective (Gemma's 1 is included).
    """

    config: dict[str, Any]
    family: Family
    tensors: dict[str, Tensor]
    vocabulary: dict[bytes, int] | None = None
    source: Path | None = None  # folder whose tokenizer files go along
    renumbering: list[int] | None = None  # new id of every old token id (T12)
    fused: set[str] = field(default_factory=set)  # "qkv", "gate_up": stored fused by this family

    @classmethod
    def load(cls, model: Checkpoint) -> "Weights":
        """Read everything. GGUF models become their Hugging Face family (llama, qwen2, qwen3, gemma3).

        Raises CheckpointError for tensors without a role: they would be missing from the changed model.
        """
        if extra := model.extra:
            raise CheckpointError(
                f"{model.source}: {len(extra)} tensors have no role here (first: {extra[0]!r}), so the whole model "
                "cannot be rewritten; compare and fingerprint still read what they need"
            )
        config, family = deepcopy(model.config), model.family
        if isinstance(model.store, GGUFStore):
            config, family = _hub_config(model)
        tensors = {"embed": model.embedding()}
        if not model.tied:
            tensors["head"] = model.head()
        for role in model.outer_roles():
            if (tensor := model.outer(role)) is not None:
                tensors[role] = tensor
        fused = set()
        for layer in range(model.geometry.layers):
            fused |= {"qkv", "gate_up"} & {role.removesuffix(".bias") for role in model.layer_roles(layer)}
            tensors |= {f"layers.{layer}.{role}": model.read(layer, role) for role in model.unfused_roles(layer)}
        path = Path(model.source)
        source = path if path.is_dir() else path.parent
        return cls(config, family, tensors, model.vocabulary, source, None, fused)

    # ── reading and changing ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def geometry(self) -> Geometry:
        return geometry(self.config, self.family)

    @property
    def depth(self) -> int:
        return self.geometry.layers

    def clone(self) -> "Weights":
        """A copy that can be changed; tensors are shared until replaced (never changed in place)."""
        return replace(self, config=deepcopy(self.config), tensors=dict(self.tensors), fused=set(self.fused))

    def get(self, layer: int, role: str) -> Tensor | None:
        return self.tensors.get(f"layers.{layer}.{role}")

    def set(self, layer: int, role: str, value: Tensor) -> None:
        self.tensors[f"layers.{layer}.{role}"] = value

    def roles(self, layer: int) -> list[str]:
        prefix = f"layers.{layer}."
        return [key[len(prefix) :] for key in self.tensors if key.startswith(prefix)]

    def readers(self, layer: int, norm: str) -> list[str]:
        """Roles of the matrices that read the residual stream behind `attn_norm` or `ffn_norm`."""
        attention = {"q", "k", "v", "q_a", "kv_a"}
        feed = {"gate", "up", "router", "shared_router"}
        if "q_a" in self.roles(layer) or "kv_a" in self.roles(layer):
            attention -= {"k", "v"}
        found = [r for r in self.roles(layer) if not r.endswith(".bias")]
        attn, ffn = [r for r in found if r in attention], [r for r in found if r.split(".")[-1] in feed]
        if self.get(layer, "ffn_norm") is None and not self.family.post_norm:
            return attn + ffn if norm == "attn_norm" else []  # parallel blocks with one norm
        return attn if norm == "attn_norm" else ffn

    def writers(self, layer: int) -> list[str]:
        """Roles of the matrices that write the residual stream."""
        return [r for r in self.roles(layer) if r == "o" or r.split(".")[-1] == "down"]

    def networks(self, layer: int) -> list[str]:
        """Prefixes of the feed-forward networks: "", "experts.0.", …, "shared."."""
        return [r.removesuffix("up") for r in self.roles(layer) if r.split(".")[-1] == "up"]

    def untie(self) -> None:
        """Give the output head its own weights."""
        self.tensors.setdefault("head", self.tensors["embed"])
        self.config["tie_word_embeddings"] = False

    def matrices(self) -> Iterator[str]:
        """Keys of all matrices of the layers (what noise, quantisation and pruning act on)."""
        return (key for key, tensor in self.tensors.items() if key.startswith("layers.") and tensor.ndim == 2)

    def to(self, dtype: torch.dtype) -> "Weights":
        other = self.clone()
        other.tensors = {key: tensor.to(dtype) for key, tensor in self.tensors.items()}
        return other

    # ── back to a checkpoint ──────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors under the family's own names and layouts."""
        family, g = self.family, self.geometry
        root = family.blocks[: family.blocks.rstrip(".").rfind(".") + 1]  # "model.layers." → "model."
        outer = {"embed": root + family.embed, "head": family.head, "final_norm": root + family.final_norm,
                 "positions": root + family.positions}  # fmt: skip
        state: dict[str, Tensor] = {}
        waiting: dict[tuple[str, str, str], Tensor] = {}
        for key, tensor in self.tensors.items():
            role = key.split(".", 2)[2] if key.startswith("layers.") else key
            base, bias = role.removesuffix(".bias"), ".bias" if role.endswith(".bias") else ".weight"
            if base.endswith("norm") and bias == ".weight":
                tensor = tensor - family.gain_offset
            if not key.startswith("layers."):
                state[outer[base] + bias] = tensor
                continue
            layer = key.split(".")[1]
            if base == "q" and g.nope_dim:  # latent attention without a low rank for queries
                tensor = nope_first(tensor, family, g)
            elif base in {"q", "k", "q_norm", "k_norm"} and family.interleaved:
                tensor = pairs_from_halves(tensor, g.head_dim, g.rotary(int(layer)))
            if fused := next((f for f in self.fused if base in _FUSED[f]), None):
                waiting[layer, base, bias] = tensor
                parts = [waiting.get((layer, r, bias)) for r in _FUSED[fused]]
                if any(p is None for p in parts):
                    continue
                found = [p for p in parts if p is not None]
                tensor = join_fused(found[0], found[1], found[2], family, g) if fused == "qkv" else torch.cat(found)
                base = fused
            expert = base.split(".")[1] if base.startswith("experts.") else ""
            tail = family.names[base.replace(f"experts.{expert}.", "experts.{e}.")].replace("{e}", expert)
            if family.transposed and tensor.ndim == 2:
                tensor = tensor.T
            # DeepSeek's e_score_correction_bias is a name of its own, not the bias of a module
            state[f"{family.blocks}{layer}.{tail}{'' if tail.endswith('_bias') else bias}"] = tensor
        return {name: tensor.contiguous() for name, tensor in state.items()}

    def checkpoint(self, dtype: torch.dtype = torch.float32) -> Checkpoint:
        """The same weights behind the reader's interface, without a file."""
        vocabulary = self.vocabulary
        store = MemoryStore(self.state_dict())
        return Checkpoint(
            "memory", store, self.config, self.family, self.geometry, vocabulary, torch.device("cpu"), dtype
        )

    def save(self, folder: str | Path, dtype: torch.dtype | None = None, shard_bytes: int = 4 << 30) -> Path:
        """Write config.json, sharded safetensors and tokenizer files; the folder appears only when complete.

        Raises FileExistsError when the folder exists and is not empty.
        """
        with new_folder(Path(folder)) as work:
            state = {n: t if dtype is None else t.to(dtype) for n, t in self.state_dict().items()}
            _save_shards(state, work, shard_bytes)
            kept = {k: v for k, v in self.config.items() if k not in {"quantization_config", "_name_or_path"}}
            first = next(iter(state.values()))
            kept["dtype"] = str(first.dtype).removeprefix("torch.")
            (work / "config.json").write_text(json.dumps(kept, indent=2))
            self._save_tokenizer(work)
        return Path(folder)

    def _save_tokenizer(self, folder: Path) -> None:
        for name in _TOKENIZER_FILES:
            if self.source is not None and (self.source / name).is_file():
                shutil.copyfile(self.source / name, folder / name)
        new = self.renumbering
        if (file := folder / "tokenizer.json").is_file() and new is not None:
            content = json.loads(file.read_text(encoding="utf-8"))
            vocab = content["model"]["vocab"]
            if not isinstance(vocab, dict):
                raise CheckpointError(
                    "tokenizer.json: a Unigram vocabulary is ordered by id and cannot be renumbered here"
                )
            content["model"]["vocab"] = {t: new[i] for t, i in vocab.items()}
            for token in content.get("added_tokens", ()):
                token["id"] = new[token["id"]]
            file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        if (file := folder / "vocab.json").is_file() and new is not None:
            vocab = json.loads(file.read_text(encoding="utf-8"))
            file.write_text(json.dumps({t: new[i] for t, i in vocab.items()}, ensure_ascii=False), encoding="utf-8")
        if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file() and self.vocabulary:
            # GGUF carries its tokenizer inside; which bytes each id stands for is all that lineage needs.
            text = json.dumps({spelled(token): i for token, i in self.vocabulary.items()}, ensure_ascii=False)
            (folder / "vocab.json").write_text(text, encoding="utf-8")


class MemoryStore:
    """Tensors that are already in memory, as a store."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.files: list[Path] = []
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self._tensors[name] if rows is None else self._tensors[name][rows]


def _save_shards(state: dict[str, Tensor], folder: Path, limit: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in state.items():
        if used + tensor.nbytes > limit and shards[-1]:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for t in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _hub_config(model: Checkpoint) -> tuple[dict[str, Any], Family]:
    """The Hugging Face configuration of a GGUF model."""
    arch = model.config["model_type"]
    kind = {"gemma3": "gemma3_text"}.get(arch, arch)
    if kind not in _ARCHITECTURES:
        raise CheckpointError(
            f"{model.source}: GGUF architecture {arch!r} cannot be written as a Hugging Face checkpoint"
        )
    config = {k: v for k, v in model.config.items() if k not in {"model_type", "rotary_dim", "num_experts"}}
    config |= {"model_type": kind, "architectures": [_ARCHITECTURES[kind]], "vocab_size": model.vocab_rows}
    config |= {"tie_word_embeddings": model.tied, "head_dim": model.geometry.head_dim}
    if theta := config.pop("rope_theta", None):
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        if kind == "gemma3_text":  # sliding layers turn faster; GGUF keeps only the global base
            slow, fast = {"rope_type": "default", "rope_theta": theta}, {"rope_type": "default", "rope_theta": 10_000.0}
            config["rope_parameters"] = {"full_attention": slow, "sliding_attention": fast}
    return config, family_of(config)

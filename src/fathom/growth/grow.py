"""Growing a dense checkpoint layer by layer: memory holds the embeddings, or one layer before and after, never all."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from fathom.cost import parameter_counts
from fathom.growth.base import GrowthMethod
from fathom.growth.sample import Seen, statistics
from fathom.growth.surgery import Network
from fathom.models.causal_lm import FathomForCausalLM
from fathom.models.checkpoints.stock import config_from_stock
from fathom.models.configuration import FathomConfig
from fathom.models.local_paths import refuse_absent
from fathom.writing import new_folder, write_json

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
SAME_NAMES = ("llama", "qwen2", "qwen3", FathomConfig.model_type)  # stock tensors have the decoder's names
# What lies beside a checkpoint's weights and config, and goes with them.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
SEED_OF_LAYER = 1_000_003  # layers draw from streams of their own, so that one can be made without the others


class Source:
    """A dense checkpoint in a folder, opened but not loaded."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        refuse_absent(str(folder), f"checkpoint {folder}")
        if not (self.folder / "config.json").is_file():
            raise ValueError(f"{folder}: no folder with a config.json; give a checkpoint that lies here")
        stored = AutoConfig.from_pretrained(self.folder)
        if stored.model_type not in SAME_NAMES:
            raise ValueError(f"{folder}: a {stored.model_type!r} model; growth reads {', '.join(SAME_NAMES)}")
        self.config = stored if isinstance(stored, FathomConfig) else config_from_stock(stored)
        for field, only in (("gated_mlp", True), ("mlp_bias", False)):
            if getattr(self.config, field) != only:
                raise ValueError(f"{folder}: {field}={getattr(self.config, field)}: growth needs {field}={only}")
        network = self.config.feed_forward["name"]  # type: ignore[index]
        if network != "dense":
            raise ValueError(f"{folder}: its networks are feed_forward={network!r}; growth needs dense ones")
        if (self.folder / INDEX).is_file():
            self.files = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        elif (self.folder / ONE_FILE).is_file():
            with safe_open(self.folder / ONE_FILE, framework="pt") as file:
                self.files = dict.fromkeys(file.keys(), ONE_FILE)
        else:
            raise ValueError(f"{folder}: no {ONE_FILE}; save it in that format (save_pretrained does)")

    def read(self, name: str) -> Tensor:
        """One tensor. Raises ValueError where there is none of that name."""
        if name not in self.files:
            raise ValueError(f"{self.folder}: weights are missing from the checkpoint: {name}")
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            return file.get_tensor(name)

    def network(self, layer: int) -> Network:
        """A layer's feed-forward network."""
        return Network(*(self.read(f"model.layers.{layer}.mlp.{part}_proj.weight") for part in Network._fields))

    def others(self, layer: int | None) -> list[str]:
        """Names of the tensors outside the feed-forward networks, of a layer or outside all layers."""

        def place(name: str) -> int | None:
            return int(name.split(".")[2]) if name.startswith("model.layers.") else None

        return sorted(name for name in self.files if place(name) == layer and ".mlp." not in name)


class Shards:
    """The weights of a checkpoint, written one file after the other."""

    def __init__(self, folder: Path, number: int):
        self.folder, self.number, self.size = folder, number, 0
        self.files: dict[str, str] = {}

    def write(self, tensors: dict[str, Tensor]) -> None:
        written = len(set(self.files.values())) + 1
        file = f"model-{written:05d}-of-{self.number:05d}.safetensors"
        save_file({k: t.contiguous() for k, t in tensors.items()}, self.folder / file, metadata={"format": "pt"})
        self.files.update(dict.fromkeys(tensors, file))
        self.size += sum(tensor.nbytes for tensor in tensors.values())

    def close(self) -> None:
        write_json(self.folder / INDEX, {"metadata": {"total_size": self.size}, "weight_map": self.files})


def grow(
    checkpoint: str | Path,
    method: GrowthMethod,
    folder: str | Path,
    branches: Sequence[str | Path] = (),
    seed: int = 0,
    texts: Sequence[str] = (),
) -> dict[str, Any]:
    """Write the grown checkpoint to a new folder. Returns `start`, `parameters` and `active_parameters`.

    Args:
        checkpoint: folder of the dense model, stock (Llama, Qwen2, Qwen3) or Fathom's.
        branches: folders of models trained from it, for methods that take some.
        seed: of all random numbers.
        texts: those run through the base for options that need them (`router="prompt"`: one for each discipline, in
            order; `split="clustered"`). The whole base is then in memory.

    Raises:
        ValueError: a checkpoint of another kind; branches or texts that the method does not take, or branches that
            differ from the base in what may not differ; sizes that do not fit.
        FileExistsError: `folder` is not empty.
    """
    base, others = Source(checkpoint), [Source(branch) for branch in branches]
    check_branches(base, others, method)
    check_texts(texts, method)
    config = FathomConfig.from_dict({**base.config.to_dict(), "feed_forward": method.section(base.config, len(others))})
    with new_folder(Path(folder)) as work:
        if method.fresh:
            torch.manual_seed(seed)
            model: Any = FathomForCausalLM(config)
            model.to(base.config.dtype or torch.float32).save_pretrained(work)
        else:
            write_layers(base, others, method, config, work, seed, statistics(base.folder, texts) if texts else [])
            config.architectures = [FathomForCausalLM.__name__]
            config.save_pretrained(work)
        for pattern in COMPANIONS:
            for file in base.folder.glob(pattern):
                shutil.copyfile(file, work / file.name)
        counts = parameter_counts(config)
        made = {
            "method": method.name,
            "options": dataclasses.asdict(method),
            "base": str(checkpoint),
            "branches": [str(branch) for branch in branches],
            **({"texts": list(texts)} if texts else {}),
            "seed": seed,
            "start": method.start(len(others)),
            "parameters": counts.total,
            "active_parameters": counts.active,
        }
        write_json(work / "growth.json", made)
    return made


def write_layers(
    base: Source,
    branches: Sequence[Source],
    method: GrowthMethod,
    config: FathomConfig,
    folder: Path,
    seed: int,
    seen: Sequence[Seen] = (),
) -> None:
    """Write the grown weights: those outside the layers, then one file for each layer."""
    shards = Shards(folder, config.num_hidden_layers + 1)
    mixed = method.changes == "everything"

    def outside(layer: int | None) -> dict[str, Tensor]:
        return {
            name: method.other(base.read(name), [branch.read(name) for branch in branches] if mixed else [])
            for name in base.others(layer)
        }

    shards.write(outside(None))
    for layer in range(config.num_hidden_layers):
        generator = torch.Generator().manual_seed(seed * SEED_OF_LAYER + layer)
        networks = [branch.network(layer) for branch in branches]
        made = method.network(base.network(layer), networks, generator, config, seen[layer] if seen else None)
        prefix = f"model.layers.{layer}.mlp."
        shards.write({**outside(layer), **{prefix + name: tensor for name, tensor in made.items()}})
    shards.close()


def check_texts(texts: Sequence[str], method: GrowthMethod) -> None:
    """Raise ValueError for texts that the method does not read, or too few of them."""
    wanted = method.reads
    if wanted == 0 and texts:
        raise ValueError(f"method {method.name!r} with these options reads no texts; leave --text out")
    if (wanted is None and not texts) or (wanted and len(texts) != wanted):
        many = "at least one" if wanted is None else f"{wanted}, one for each discipline in order"
        raise ValueError(
            f"method {method.name!r} with these options reads texts, {many}; there are {len(texts)}: --text"
        )


def check_branches(base: Source, branches: Sequence[Source], method: GrowthMethod) -> None:
    """Raise ValueError for branches that the method does not take, or that differ from the base where they may not."""
    if branches and method.branches == "none":
        raise ValueError(f"method {method.name!r} takes no branches; leave --branch out")
    if not branches and method.branches == "needed":
        raise ValueError(f"method {method.name!r} needs branches: give --branch for each")
    for branch in branches:
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            ours, theirs = getattr(base.config, field), getattr(branch.config, field)
            if ours != theirs:
                raise ValueError(f"{branch.folder}: {field}={theirs}, the base has {ours}; a branch keeps its shape")
        for name in ("tokenizer.json", "vocab.json"):
            files = [source.folder / name for source in (base, branch)]
            if all(file.is_file() for file in files) and files[0].read_bytes() != files[1].read_bytes():
                raise ValueError(f"{branch.folder}: its {name} is not the base's; a branch keeps the tokenizer")
        if method.changes == "everything":
            continue
        for layer in (None, *range(base.config.num_hidden_layers)):
            for name in base.others(layer):
                if not torch.equal(base.read(name), branch.read(name)):
                    raise ValueError(
                        f"{branch.folder}: {name} differs from the base's, but {method.name!r} takes branches that "
                        "trained feed-forward networks alone (training.trains: feed_forward); btx averages the rest"
                    )

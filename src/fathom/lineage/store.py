"""Tensors on disk, one at a time: safetensors (sharded), PyTorch .bin (weights_only), GGUF, and a LoRA adapter on
a base.

A store answers three questions — which names, which shape, which values — and never holds more than the tensor
asked for.
`rows` reads only a slice of the first axis where the format allows it (safetensors and GGUF do, without reading
the rest).
"""

import json
import math
import os
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fathom.lineage.errors import CheckpointError, PackedWeightsError

# Marks of packed formats: GPTQ and AWQ, bitsandbytes 4-bit, compressed-tensors, MXFP4.
_PACKED = re.compile(r"\.(qweight|qzeros|weight\.quant_state\.\w+|weight_packed|\w+_blocks)$")
# GGUF value types as struct codes; 8 is a string, 9 an array
_GGUF_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))
_FP8_BLOCK = 128  # DeepSeek-V3's scale_inv holds one scale for each 128 × 128 tile


# The names under which transformers looks for weights, in its order: the first that is there is the model.
_MODEL_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"
)  # fmt: skip
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")  # what may be taken for a model's weights


class TensorStore(Protocol):
    """Named tensors on disk, and the files that hold them."""

    files: list[Path]

    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, rows: slice | None = None) -> Tensor: ...


def open_store(path: Path) -> TensorStore:
    """The store behind a checkpoint folder, a `.gguf`, `.safetensors` or `.bin` file.

    Of a folder it reads the file that transformers would load, and nothing that lies beside it; a folder with one GGUF
    file and no other weights is read too.

    Raises CheckpointError when nothing readable is there and PackedWeightsError for packed 4-bit formats.
    """
    if path.is_file():
        if path.suffix == ".gguf":
            return GGUFStore(path)
        if path.suffix == ".safetensors":
            return _checked(SafetensorsStore([path]))
        if path.suffix in {".bin", ".pt", ".pth"}:
            return _checked(BinStore([path]))
        raise CheckpointError(f"{path}: unknown checkpoint format; expected .safetensors, .bin or .gguf")
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder")
    if (file := model_file(path)) is not None:
        kind = SafetensorsStore if ".safetensors" in file.name else BinStore
        if file.suffix != ".json":
            return _checked(kind([file]))
        return _checked(_complete(kind(_shards(file)), file))
    if len(files := sorted(path.glob("*.gguf"))) == 1:
        return GGUFStore(files[0])
    if files:
        raise CheckpointError(f"{path}: {len(files)} GGUF files here; name the one you mean")
    found = ", ".join(f.name for f in _weights_in(path))
    raise CheckpointError(
        f"{path}: no {', '.join(_MODEL_FILES[:3])} (or index of shards), which is what transformers loads"
        + (f"; found {found}: name the file you mean" if found else ", and no .gguf")
    )


def model_file(folder: Path) -> Path | None:
    """The file from which transformers would load the folder's weights (an index when they are in shards), or None.

    Raises CheckpointError when config.json names a file that is not in the folder.
    """
    config = folder / "config.json"
    if config.is_file() and (named := json_object(config).get("transformers_weights")) is not None:
        file = _inside(folder, named, config)
        if not file.is_file() or not file.name.endswith((".safetensors", ".safetensors.index.json")):
            raise CheckpointError(f"{config}: transformers_weights names {named!r}, which is no safetensors file here")
        return file
    return next((folder / name for name in _MODEL_FILES if (folder / name).is_file()), None)


def _weights_in(folder: Path) -> list[Path]:
    return sorted(f for pattern in _WEIGHTS for f in folder.glob(pattern))


def files_beside(store: TensorStore) -> list[Path]:
    """Weight files in the same folders that are not part of the model: an older copy, averaged weights, another
    format."""
    return [
        f for folder in sorted({f.parent for f in store.files}) for f in _weights_in(folder) if f not in store.files
    ]


def _inside(folder: Path, name: Any, source: Path) -> Path:
    """`folder / name`, refused when that is elsewhere. Links are followed: the hub's cache is made of them."""
    if not isinstance(name, str):
        raise CheckpointError(f"{source}: a file name is expected where it has {name!r}")
    root, file = os.path.abspath(folder), os.path.abspath(folder / name)
    if os.path.commonpath([root, file]) != root:
        raise CheckpointError(f"{source}: names {name!r}, which is outside its folder; nothing there is read")
    return folder / name


def json_object(file: Path) -> dict[str, Any]:
    """The keys and values of a JSON file. Raises CheckpointError when it holds anything else."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of JSON and of UTF-8
        raise CheckpointError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{file}: holds a {type(record).__name__}, not the keys of a configuration")
    return record


def _shards(index: Path) -> list[Path]:
    try:
        files = sorted({_inside(index.parent, f, index) for f in json_object(index)["weight_map"].values()})
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index}: not a shard index ({error})") from error
    if missing := [f.name for f in files if not f.is_file()]:
        raise CheckpointError(
            f"{index.parent}: shard(s) {', '.join(missing)} named in {index.name} are missing; download again"
        )
    return files


def _complete(store: TensorStore, index: Path) -> TensorStore:
    if missing := sorted(set(json_object(index)["weight_map"]) - set(store.names())):
        raise CheckpointError(f"{index}: names {missing[0]!r}, which no shard holds; download the shards again")
    return store


def _refuse_twice(known: Iterable[str], names: Iterable[str], path: Path) -> None:
    if twice := sorted(set(known) & set(names)):
        raise CheckpointError(
            f"{path}: tensor {twice[0]!r} is both in this shard and in one before it, so it is unclear which is meant; "
            "save the model again"
        )


def _checked(store: TensorStore) -> TensorStore:
    if packed := next((n for n in store.names() if _PACKED.search(n)), None):
        raise PackedWeightsError(
            f"weights are packed (tensor {packed!r}); dequantise the checkpoint first: load it in transformers"
            " with its quantiser and call model.dequantize().save_pretrained(...)"
        )
    return store


class _Shards(ABC):
    """Tensors of a Hugging Face checkpoint; int8 (`SCB`) and block-fp8 (`weight_scale_inv`) weights are dequantised on
    read."""

    files: list[Path]

    @abstractmethod
    def names(self) -> Iterable[str]: ...

    @abstractmethod
    def _raw(self, name: str, rows: slice | None) -> Tensor:
        """The stored numbers, not dequantised."""

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        tensor, names = self._raw(name, rows), self.names()
        if tensor.dtype == torch.int8 and (scale := name.removesuffix("weight") + "SCB") in names:
            row_max = self._raw(scale, rows)  # bitsandbytes LLM.int8(): one absolute maximum for each row
            tensor = tensor.float() * (row_max.float() / 127)[:, None]
        elif (scale := name + "_scale_inv") in names:
            # A slice may start inside a tile, so the whole tensor is scaled first.
            tensor, tiles = self._raw(name, None).float(), self._raw(scale, None).float()
            tiles = tiles.repeat_interleave(_FP8_BLOCK, 0).repeat_interleave(_FP8_BLOCK, 1)
            tensor = (tensor * tiles[: tensor.shape[0], : tensor.shape[1]])[rows or slice(None)]
        elif not tensor.is_floating_point():
            raise PackedWeightsError(
                f"tensor {name!r} has dtype {tensor.dtype} and no scale that Fathom knows; dequantise it"
            )
        return tensor


class SafetensorsStore(_Shards):
    """Memory-mapped safetensors shards."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self._file_of: dict[str, Any] = {}
        for path in files:
            try:
                handle = safe_open(path, framework="pt")
                _refuse_twice(self._file_of, handle.keys(), path)
                self._file_of.update(dict.fromkeys(handle.keys(), handle))
            except SafetensorError as error:
                raise CheckpointError(f"{path}: corrupt or truncated shard ({error}); download it again") from error
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be opened ({error}); check who may read it") from error

    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def _raw(self, name: str, rows: slice | None) -> Tensor:
        handle = self._file_of[name]
        try:
            return handle.get_tensor(name) if rows is None else handle.get_slice(name)[rows]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"tensor {name!r}: cannot be read ({error}); the shard is damaged") from error


class BinStore(_Shards):
    """PyTorch shards, opened with `weights_only=True` (nothing is unpickled but tensors) and memory-mapped if
    possible."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self._tensors: dict[str, Tensor] = {}
        for path in files:
            try:
                try:
                    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                except RuntimeError:  # the format before torch 1.6 is no zip file and cannot be mapped
                    state = torch.load(path, map_location="cpu", weights_only=True)
                if not isinstance(state, dict):
                    raise TypeError(f"it holds a {type(state).__name__}, not named tensors")
            except Exception as error:  # torch raises pickle, EOF, OS, runtime and attribute errors for damaged files
                reason = str(error).splitlines()[0]
                raise CheckpointError(
                    f"{path}: cannot be read as tensors only ({reason}); convert it to safetensors"
                ) from error
            state = state.get("state_dict", state)
            _refuse_twice(self._tensors, state, path)
            self._tensors.update({n: t for n, t in state.items() if isinstance(t, Tensor)})

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def _raw(self, name: str, rows: slice | None) -> Tensor:
        tensor = self._tensors[name]
        return tensor if rows is None else tensor[rows]


class GGUFStore:
    """llama.cpp's GGUF; every quantisation type that the `gguf` package can decode.

    The header is parsed here: that package's own reader takes seconds for a 50k vocabulary.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError as error:
            raise CheckpointError(
                f"{path}: reading GGUF needs the gguf package; pip install 'fathom-lm[gguf]'"
            ) from error
        self.files = [path]
        self._dequantize = dequantize
        try:
            self._data = np.memmap(path, np.uint8, "r")
            header = _GGUFHeader(self._data)
            self._fields = header.fields
            self._tensors = {}
            for name, shape, kind, start in header.tensors:
                block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
                row_bytes = shape[-1] // block * size
                stop = start + row_bytes * math.prod(shape[:-1])
                if stop > len(self._data):
                    raise ValueError(f"tensor {name} ends at byte {stop}, the file at {len(self._data)}")
                self._tensors[name] = (shape, GGMLQuantizationType(kind), start, row_bytes)
        except (
            ValueError,
            LookupError,
            TypeError,
            ArithmeticError,
            struct.error,
            MemoryError,
            RecursionError,
        ) as error:
            raise CheckpointError(f"{path}: corrupt or truncated GGUF ({error}); download it again") from error

    def metadata(self, key: str, default: Any = None) -> Any:
        """One metadata field, as a plain Python value."""
        return self._fields.get(key, default)

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][0]

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        shape, kind, start, row_bytes = self._tensors[name]
        # Quantisation blocks never cross a row, so a slice of the first axis is a slice of bytes.
        data = self._data[start : start + row_bytes * math.prod(shape[:-1])].reshape(*shape[:-1], row_bytes)
        data = data if rows is None or len(shape) == 1 else data[rows]
        try:
            if kind.name in {"F32", "F16"}:
                data = data.view(np.float32 if kind.name == "F32" else np.float16)
            values = np.ascontiguousarray(self._dequantize(data, kind), dtype=np.float32)
        except (NotImplementedError, ValueError) as error:
            message = f"tensor {name!r}: GGUF type {kind.name} cannot be dequantised here ({error})"
            raise PackedWeightsError(message) from error
        return torch.from_numpy(values if values.flags.writeable else values.copy())


class _GGUFHeader:
    """Key-value fields and the tensor directory of a GGUF file (version 2 and 3, little endian)."""

    def __init__(self, data: np.ndarray) -> None:
        self._view, self._at = memoryview(data.data), 4
        if bytes(self._view[:4]) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if (version := self._scalar("I")) not in {2, 3}:
            raise ValueError(f"version {version} is not 2 or 3")
        tensors, fields = self._scalar("Q"), self._scalar("Q")
        self.fields: dict[str, Any] = {}
        for _ in range(fields):
            key = self._string()
            self.fields[key] = self._value(self._scalar("I"))
        directory = []
        for _ in range(tensors):
            name, rank = self._string(), self._scalar("I")
            shape = tuple(reversed([self._scalar("Q") for _ in range(rank)]))  # stored fastest axis first
            directory.append((name, shape, self._scalar("I"), self._scalar("Q")))
        align = self.fields.get("general.alignment", 32)
        base = -(-self._at // align) * align
        self.tensors = [(name, shape, kind, base + offset) for name, shape, kind, offset in directory]

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._view, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        size = self._scalar("Q")
        self._at += size
        return str(self._view[self._at - size : self._at], "utf-8", "surrogateescape")

    def _value(self, kind: int) -> Any:
        if kind == 8:
            return self._string()
        if kind != 9:
            return self._scalar(_GGUF_SCALARS[kind])
        inner, count = self._scalar("I"), self._scalar("Q")
        if inner in _GGUF_SCALARS:  # one call for all entries
            code = f"<{count}{_GGUF_SCALARS[inner]}"
            values = list(struct.unpack_from(code, self._view, self._at))
            self._at += struct.calcsize(code)
            return values
        return [self._value(inner) for _ in range(count)]


def _patterns(config: dict[str, Any], key: str, adapter: Path) -> dict[re.Pattern[str], float]:
    """PEFT's module patterns. Only such are compiled as cannot keep a matcher busy for ever: short, few repetitions,
    none of a group."""
    table, found = config.get(key) or {}, {}
    file = adapter / "adapter_config.json"
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: {key} is a {type(table).__name__}, not patterns with numbers")
    for text, value in table.items():
        repeats = re.findall(r"[*+?{]", text.replace("(?:", ""))
        if len(text) > 200 or len(repeats) > 3 or re.search(r"\)[*+?{]|\(\?[^:]|\\[1-9]", text):
            raise CheckpointError(
                f"{file}: {key} {text[:60]!r} repeats more than is read here; merge it with peft first"
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise CheckpointError(f"{file}: {key} {text[:60]!r} has {value!r}, where a positive number belongs")
        try:
            found[re.compile(rf"(.*\.)?{text}")] = value
        except re.error as error:
            raise CheckpointError(f"{file}: {key} {text[:60]!r} is no pattern ({error})") from error
    return found


class LoRAStore:
    """A PEFT adapter merged on the fly: W + s·B·A, with s = α/r, or α/√r when `use_rslora`.

    Raises CheckpointError for what is not plain LoRA (DoRA, other PEFT types): merge those with peft first.
    """

    def __init__(self, base: TensorStore, adapter: Path) -> None:
        config = json_object(adapter / "adapter_config.json")
        if missing := [k for k in ("r", "lora_alpha") if config.get("peft_type") == "LORA" and not config.get(k)]:
            raise CheckpointError(f"{adapter}/adapter_config.json: no value for {missing[0]!r}; is it a PEFT adapter?")
        for key in ("r", "lora_alpha"):
            if config.get("peft_type") == "LORA" and not (
                isinstance(config[key], (int, float)) and 0 < config[key] < math.inf
            ):
                raise CheckpointError(f"{adapter}/adapter_config.json: {key} is {config[key]!r}, not a positive number")
        if config.get("peft_type") != "LORA" or config.get("use_dora"):
            kind = "DoRA" if config.get("use_dora") else config.get("peft_type")
            raise CheckpointError(
                f"{adapter}: adapter type {kind} is not supported; merge it with peft and pass the result"
            )
        self._base, self._config = base, config
        self._patterns = {key: _patterns(config, f"{key}_pattern", adapter) for key in ("rank", "alpha")}
        files = [f for f in (adapter / "adapter_model.safetensors", adapter / "adapter_model.bin") if f.is_file()]
        if not files:
            raise CheckpointError(f"{adapter}: no adapter_model.safetensors or adapter_model.bin")
        self._adapter = open_store(files[0])
        self.files = [*base.files, files[0]]
        self._pairs: dict[str, tuple[str, str]] = {}
        self._replaced: dict[str, str] = {}
        known = set(base.names())
        for name in self._adapter.names():
            inner = name.removeprefix("base_model.model.")
            if ".lora_A." in inner:
                target = re.sub(r"\.lora_A\..*$", ".weight", inner)
                self._pairs[target] = (name, name.replace(".lora_A.", ".lora_B."))
            elif ".lora_" in inner:  # lora_B is the partner of lora_A; embedding adapters and biases have other rules
                if ".lora_B." not in inner or inner.endswith(".bias"):
                    raise CheckpointError(f"{adapter}: {name!r} cannot be merged here; merge it with peft first")
            else:
                target = inner.replace(".modules_to_save.default", "").replace(".modules_to_save", "")
                self._replaced[target] = name
        if missing := [t for t in self._pairs if t not in known]:
            raise CheckpointError(
                f"{adapter}: adapter targets {missing[0]!r}, which the base lacks; is this the right base?"
            )
        ours = set(self._adapter.names())
        for target, (a, b) in self._pairs.items():
            shapes = [self._adapter.shape(n) if n in ours else () for n in (b, a)]
            want, swap = base.shape(target), bool(config.get("fan_in_fan_out"))
            fits = [len(s) == 2 for s in shapes] == [True, True] and shapes[0][1] == shapes[1][0]
            if not fits or (shapes[0][0], shapes[1][1]) != (want[::-1] if swap else want):
                raise CheckpointError(
                    f"{adapter}: B {shapes[0]} and A {shapes[1]} do not make the {want} of {target!r}; is this the "
                    "right base, and the adapter whole?"
                )

    def names(self) -> Iterable[str]:
        return dict.fromkeys([*self._base.names(), *self._replaced]).keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._adapter.shape(self._replaced[name]) if name in self._replaced else self._base.shape(name)

    def _scale(self, module: str) -> float:
        def pattern(key: str, default: float) -> float:
            return next((v for p, v in self._patterns[key].items() if p.fullmatch(module)), default)

        rank = pattern("rank", self._config["r"])
        alpha = pattern("alpha", self._config["lora_alpha"])
        return alpha / (rank**0.5 if self._config.get("use_rslora") else rank)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        if name in self._replaced:
            return self._adapter.read(self._replaced[name], rows)
        weight = self._base.read(name, rows)
        if name not in self._pairs:
            return weight
        a, b = (self._adapter.read(n).float() for n in self._pairs[name])
        scale, rows = self._scale(name.removesuffix(".weight")), rows or slice(None)
        if self._config.get("fan_in_fan_out"):  # Conv1D layers store [in, out]
            return weight.float() + scale * (b @ a).T[rows]
        return weight.float() + scale * (b[rows] @ a)


def hub_snapshot(name: str) -> Path:
    """A hub name such as `org/model` to its local snapshot; downloads configuration, tokenizer and safetensors."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "tokenizer.model", "*.tiktoken", "merges.txt"]
    with suppress(HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        if model_file(folder) is None and not (folder / "adapter_model.safetensors").is_file():
            folder = Path(snapshot_download(name, allow_patterns=["*.bin", *patterns]))
        return folder
    raise CheckpointError(f"{name!r} is neither a local folder or file nor a hub model that can be reached from here")

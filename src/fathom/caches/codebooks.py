"""Codebooks of VQKV: learned once per model on text ("SimVQ": a frozen random table times a learned matrix).

    stage i:  Q_i = E_i W_iᵀ,  E_i ~ N(0, 1/D) frozen;    x̂ = Σ_i Q_i[z_i],  z greedy (ops.residual_vq)
    loss = λ ‖x − Σ_i e_i‖² + β Σ_i ‖sg(r_i) − e_i‖²,   e_i = W_i E_i[z_i],   r_{i+1} = sg(r_i − e_i)

W_i starts at rms(r_i)·√D·I, so that codewords have the size of the residual they encode. Keys and values have separate
sets.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from fathom.caches import versions
from fathom.caches.record import HALF_PRECISION, fingerprint, record
from fathom.ops.autocast import without_autocast
from fathom.ops.residual_vq import decode, encode
from fathom.writing import naming

FORMAT = "fathom.vqkv.1"


@dataclasses.dataclass(frozen=True)
class Codebooks:
    """The codebooks of a model.

    keys, values: one tensor [G or 1, N, S, D] for each compressed layer (the same object where a set is shared).
    share: "layer" (one set a layer, pooled over heads), "head" or "model". rope: "post" (rotated keys) or "pre".
    tokens: length of the calibration texts, 0 if unknown. Rotated keys at later positions were not seen in training.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    share: str
    rope: str
    model: str
    model_fingerprint: str
    tokens: int = 0

    def nbytes(self) -> int:
        """Bytes of the distinct tables: held once per model, not per sequence."""
        tables = {id(table): table for table in (*self.keys, *self.values)}
        return sum(table.untyped_storage().nbytes() for table in tables.values())

    def save(self, path: str | os.PathLike) -> None:
        """Write as safetensors, atomically."""
        count = 1 if self.share == "model" else len(self.keys)
        tensors = {}
        for layer in range(count):
            tensors[f"keys.{layer}"] = self.keys[layer].contiguous().clone()
            tensors[f"values.{layer}"] = self.values[layer].contiguous().clone()
        about: dict[str, Any] = {"format": FORMAT, "share": self.share, "rope": self.rope, "model": self.model}
        about |= {"fingerprint": self.model_fingerprint, "layers": len(self.keys), "tokens": self.tokens}
        temporary = Path(f"{os.fspath(path)}.{os.getpid()}.part")
        with naming(path):
            save_file(tensors, temporary, metadata={"fathom": json.dumps(about)})
            temporary.replace(path)


def load_codebooks(path: str | os.PathLike, model: PreTrainedModel | None = None) -> Codebooks:
    """The codebooks in a file. With `model`, checks that they were made on it and moves them to its devices and dtype.

    Raises:
        OSError: the file cannot be read. ValueError: it is not a codebook file, or was made on another model.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"codebooks={os.fspath(path)!r}: no such file; make one with train_codebooks(model, …)")
    dtype = None if model is None else model.dtype

    file = os.fspath(path), Path(path).stat().st_mtime_ns
    devices = ["cpu"] if model is None else [str(device) for device in versions.layer_devices(model)]
    about, _ = _read(*file, devices[0], dtype)
    if about.get("format") != FORMAT:
        raise ValueError(f"codebooks={os.fspath(path)!r} is not a codebook file of this library (format {FORMAT})")
    if model is not None and about["fingerprint"] != fingerprint(model):
        raise ValueError(
            f"codebooks={os.fspath(path)!r} were trained on {about['model'] or 'an unnamed model'} (fingerprint "
            f"{about['fingerprint']}), not on this model ({fingerprint(model)}), or by an older Fathom that "
            f"looked at fewer weights: run train_codebooks on it{HALF_PRECISION}"
        )
    layers = range(about["layers"])
    places = devices * len(layers) if model is None else devices
    tables = [_read(*file, device, dtype)[1] for device in places]
    index = [0] * len(layers) if about["share"] == "model" else layers
    keys = tuple(held[f"keys.{layer}"] for held, layer in zip(tables, index))
    values = tuple(held[f"values.{layer}"] for held, layer in zip(tables, index))
    names = about["share"], about["rope"], about["model"], about["fingerprint"]
    return Codebooks(keys, values, *names, tokens=about.get("tokens", 0))


@functools.lru_cache(maxsize=16)
def _read(path: str, modified: int, device: str, dtype: torch.dtype | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        # read once for the process: training may come after inference
        with torch.inference_mode(False), safe_open(path, framework="pt", device=device) as file:
            tensors = {name: file.get_tensor(name).to(dtype) for name in file.keys()}  # noqa: SIM118
            return json.loads((file.metadata() or {}).get("fathom", "{}")), tensors
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"codebooks={path!r} is not a readable safetensors file: {error}") from None


@dataclasses.dataclass(frozen=True)
class CodebookTraining:
    """Sizes and optimisation of codebooks. The paper (Llama-3.1-8B) has 56 stages of 1024 codewords for keys, 16 of 512
    for values, a learning rate of 1e-3 and batches of 65536 vectors.

    init: "gaussian" (the method), "samples" (codewords drawn from residuals), "kmeans" (classical residual k-means, the
    baseline: no W is trained). zero_codeword forces one zero codeword a stage, so more stages never hurt.
    key_groups: groups of a key's dims that are quantised separately, () for all dims together. An earlier version of
        the paper has two, `rope_bands(D)`. Each group gets stages in proportion to its dims. A group's codewords are 0
        in other dims, so greedy residual codes over all stages are the groups' own, which attention reads as usual.
    """

    key_stages: int = 56
    key_entries: int = 1024
    value_stages: int = 16
    value_entries: int = 512
    share: str = "layer"
    rope: str = "post"
    key_groups: tuple[tuple[int, ...], ...] = ()
    init: str = "gaussian"
    zero_codeword: bool = False
    joint: float = 1.0
    beta: float = 1.0
    learning_rate: float = 1e-3
    batch: int = 65536
    steps: int = 500
    kmeans_rounds: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in (
            ("share", ("layer", "head", "model")),
            ("rope", ("post", "pre")),
            ("init", ("gaussian", "samples", "kmeans")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"CodebookTraining({name}={getattr(self, name)!r}): use one of {', '.join(choices)}")
        for name in ("key_stages", "key_entries", "value_stages", "value_entries", "batch", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"CodebookTraining({name}={getattr(self, name)}): use at least 1")
        if max(self.key_entries, self.value_entries) > 65536:
            raise ValueError("CodebookTraining: at most 65536 entries a codebook (16-bit codes)")
        dims = [dim for group in self.key_groups for dim in group]
        if sorted(dims) != list(range(len(dims))) or not all(self.key_groups):
            raise ValueError(
                f"CodebookTraining(key_groups={self.key_groups}): groups must hold each dim 0 … D − 1 of a key once"
            )
        if len(self.key_groups) > self.key_stages:
            raise ValueError(
                f"CodebookTraining(key_stages={self.key_stages}): use one stage or more for each key group"
            )


def rope_bands(head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two `key_groups`: the faster and the slower half of the RoPE pairs (pair j is dims j and j + D/2)."""
    pairs = torch.arange(head_dim).view(2, -1).chunk(2, dim=1)
    return tuple(pairs[0].flatten().tolist()), tuple(pairs[1].flatten().tolist())


def train_codebooks(model: nn.Module, input_ids: Tensor, options: CodebookTraining) -> Codebooks:
    """Codebooks for a model's keys and values, learned on what the frozen model computes for token ids [B,T].

    Rotated keys (rope="post") differ at every position: T should be as long as the texts that the cache will hold.
    """
    inner = versions.causal_lm(model)
    recorded = list(record(model, input_ids, pre_rope=options.rope == "pre"))
    units = {"model": _pool_model, "layer": _pool_layers, "head": _pool_heads}[options.share]
    tables = []
    for which, stages, entries, groups in (
        (0, options.key_stages, options.key_entries, options.key_groups),
        (1, options.value_stages, options.value_entries, ()),
    ):
        sets = units([pair[which] for pair in recorded])
        learned = [torch.stack([learn_groups(x, stages, entries, groups, options) for x in heads]) for heads in sets]
        learned = [books.to(inner.dtype) for books in learned]
        tables.append(tuple(learned * len(recorded)) if options.share == "model" else tuple(learned))
    name = versions.text_config(inner)._name_or_path
    length = input_ids.shape[1]
    return Codebooks(tables[0], tables[1], options.share, options.rope, name, fingerprint(inner), length)


def _pool_model(layers: list[Tensor]) -> list[list[Tensor]]:
    return [[torch.cat([x.flatten(0, 2) for x in layers])]]


def _pool_layers(layers: list[Tensor]) -> list[list[Tensor]]:
    return [[x.flatten(0, 2)] for x in layers]


def _pool_heads(layers: list[Tensor]) -> list[list[Tensor]]:
    return [[head.flatten(0, 1) for head in x.unbind(1)] for x in layers]


def learn_groups(
    x: Tensor, stages: int, entries: int, groups: tuple[tuple[int, ...], ...], options: CodebookTraining
) -> Tensor:
    """Codebooks [N,S,D] for vectors x [n,D]: every group of dims has its own stages, which are 0 in other dims."""
    if not groups:
        return learn(x, stages, entries, options)
    width = sum(map(len, groups))
    if x.shape[1] != width:
        raise ValueError(f"CodebookTraining: key_groups name {width} dims, but a key has {x.shape[1]}")
    # stages up to each boundary, so that they add up; one at least for each group
    ends = [round(stages * sum(map(len, groups[: g + 1])) / width) for g in range(len(groups))]
    counts = [max(1, end - start) for start, end in zip([0, *ends], ends)]
    while sum(counts) > stages:
        counts[counts.index(max(counts))] -= 1
    books = x.new_zeros(stages, entries, width, dtype=torch.promote_types(x.dtype, torch.float32))
    for dims, part in zip(groups, books.split(counts)):
        part[..., list(dims)] = learn(x[:, list(dims)], part.shape[0], entries, options)
    return books


def learn(x: Tensor, stages: int, entries: int, options: CodebookTraining) -> Tensor:
    """Codebooks [N,S,D] in fp32 or wider for vectors x [n,D]."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    generator = torch.Generator(device=x.device).manual_seed(options.seed)
    train = _residual_kmeans if options.init == "kmeans" else _train_simvq
    with without_autocast(x.device.type):
        books = train(x, stages, entries, options, generator)
    if options.zero_codeword:
        books[:, 0] = 0
    return books


def _batch(x: Tensor, size: int, generator: torch.Generator) -> Tensor:
    return x[torch.randint(len(x), (min(size, len(x)),), generator=generator, device=x.device)]


def _train_simvq(x: Tensor, stages: int, entries: int, options: CodebookTraining, generator: torch.Generator) -> Tensor:
    width = x.shape[1]
    table = torch.randn(stages, entries, width, generator=generator, device=x.device).to(x.dtype) / width**0.5
    projection = torch.eye(width, device=x.device, dtype=x.dtype).repeat(stages, 1, 1)
    residual = _batch(x, options.batch, generator)
    for stage in range(stages):  # sizes from a first pass over one batch
        if options.init == "samples":
            table[stage] = _batch(residual, entries, generator)[torch.arange(entries) % len(residual)]
        else:
            projection[stage] *= residual.square().mean().sqrt() * width**0.5
        residual = residual - decode(*_one_stage(residual, table[stage] @ projection[stage].T))
    projection.requires_grad_()
    optimizer = torch.optim.AdamW([projection], lr=options.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    scale = x.square().mean()
    with torch.enable_grad():
        for _ in range(options.steps):
            batch = _batch(x, options.batch, generator)
            loss = simvq_loss(batch, table, projection, options.joint, options.beta) / scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return (table @ projection.transpose(1, 2)).detach()


def simvq_loss(x: Tensor, table: Tensor, projection: Tensor, joint: float, beta: float) -> Tensor:
    """λ·mean‖x − Σ e_i‖² + β·Σ mean‖sg(r_i) − e_i‖², means over numbers."""
    codes = encode(x, (table @ projection.transpose(1, 2)).detach())
    residual, total, stage_loss = x, torch.zeros_like(x), x.new_zeros(())
    for stage in range(table.shape[0]):
        word = table[stage, codes[:, stage]] @ projection[stage].T
        stage_loss = stage_loss + (residual - word).square().mean()
        total = total + word
        residual = (residual - word).detach()
    return joint * (x - total).square().mean() + beta * stage_loss


def _one_stage(x: Tensor, book: Tensor) -> tuple[Tensor, Tensor]:
    return encode(x, book.unsqueeze(0)), book.unsqueeze(0)


def _residual_kmeans(
    x: Tensor, stages: int, entries: int, options: CodebookTraining, generator: torch.Generator
) -> Tensor:
    """Lloyd's algorithm on the residual of every stage; an empty cluster is restarted at a random residual."""
    residual, books = x, []
    for _ in range(stages):
        book = _batch(residual, entries, generator)[torch.arange(entries, device=x.device) % len(residual)].clone()
        for _ in range(options.kmeans_rounds):
            codes = encode(residual, book.unsqueeze(0))[:, 0].long()
            sums = torch.zeros_like(book).index_add_(0, codes, residual)
            counts = torch.bincount(codes, minlength=entries).unsqueeze(1)
            fresh = residual[torch.randint(len(residual), (entries,), generator=generator, device=x.device)]
            book = torch.where(counts > 0, sums / counts.clamp(min=1), fresh)
        books.append(book)
        residual = residual - decode(*_one_stage(residual, book))
    return torch.stack(books)


def describe(books: Codebooks) -> dict[str, Any]:
    """Sizes for reports: stages, entries, nominal bits a number, bytes of the tables."""
    key, value = books.keys[0], books.values[0]
    bits = [t.shape[1] * (t.shape[2] - 1).bit_length() / t.shape[3] for t in (key, value)]
    return {
        "share": books.share,
        "rope": books.rope,
        "key": [key.shape[1], key.shape[2]],
        "value": [value.shape[1], value.shape[2]],
        "bits_per_key_number": bits[0],
        "bits_per_value_number": bits[1],
        "table_bytes": books.nbytes(),
    }

"""Which parts of two models are the same numbers: what a verdict over all layers would pass over.

A model may take another's embedding and draw its layers anew, or take some layers. Every stored tensor of one model is
looked for among the tensors of the same role and shape in the other, in any layer: a few rows first, the whole tensor
where those fit. Axes are taken as they are; layers that agree only after an alignment are in the result of `awm`. Norm
gains lie near one another in all models, so they count only when every bit is equal.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fathom.lineage import canonical
from fathom.lineage.reader import Checkpoint

_NEAR = 0.9  # cosine; tensors that were drawn apart stay near 0
_ROWS = 8
_NAMES = {"embed": "embedding", "head": "output head", "final_norm": "final norm", "positions": "positions"}


@dataclass(frozen=True)
class Part:
    """A tensor that both models hold: where, how alike (cosine), and whether every number is equal."""

    a: str
    b: str
    cosine: float
    equal: bool


@dataclass(frozen=True)
class SharedParts:
    """alike: parts of what both models compute. inert: parts that one of the two holds without using them."""

    alike: list[Part] = field(default_factory=list)
    inert: list[Part] = field(default_factory=list)


def shared_parts(a: Checkpoint, b: Checkpoint) -> SharedParts:
    """Parts that are equal or near in both models, axes taken as they are."""
    found = SharedParts()
    ours, theirs = _by_role(a), _by_role(b)
    for role in sorted(set(ours) & set(theirs)):
        for shape in sorted(set(ours[role]) & set(theirs[role])):
            _compare((a, ours[role][shape]), (b, theirs[role][shape]), role, found)
    silent = {side: _silent_heads(m) for side, m in (("a", a), ("b", b))}
    _find_silent(a, b, silent["b"], found, swapped=False)
    _find_silent(b, a, silent["a"], found, swapped=True)
    return found


def _by_role(model: Checkpoint) -> dict[str, dict[tuple[int, ...], list[tuple[int, str]]]]:
    """{role: {shape: [(layer, stored name)]}}; layer −1 outside the layers."""
    found: dict[str, dict[tuple[int, ...], list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
    for (layer, role), name in model.places.items():
        if not (role == "head" and model.tied):
            found[role][model.store.shape(name)].append((layer, name))
    return found


def _compare(
    ours: tuple[Checkpoint, list[tuple[int, str]]],
    theirs: tuple[Checkpoint, list[tuple[int, str]]],
    role: str,
    found: SharedParts,
) -> None:
    probes = [torch.stack([_probe(model, name) for _, name in places]) for model, places in (ours, theirs)]
    norms = [p.norm(dim=1, keepdim=True) for p in probes]
    left, right = (p / n.clamp_min(1e-30) for p, n in zip(probes, norms))
    near = (left @ right.T.to(left.device)).cpu() > _NEAR
    taken: set[int] = set()
    for i, j in sorted(torch.nonzero(near).tolist(), key=lambda at: (abs(at[0] - at[1]), at)):
        if j in taken:
            continue
        (layer, name), (other, other_name) = ours[1][i], theirs[1][j]
        x, y = ours[0].stored(name), theirs[0].stored(other_name).to(ours[0].device)
        if not _says_something(x) or not _says_something(y):
            continue
        cosine, equal = torch.cosine_similarity(x.flatten(), y.flatten(), dim=0).item(), torch.equal(x, y)
        if cosine < _NEAR or (x.ndim == 1 and not equal):
            continue
        taken.add(j)
        live = _live(ours[0], layer, role) and _live(theirs[0], other, role)
        part = Part(_name(layer, role), _name(other, role), cosine, equal)
        (found.alike if live else found.inert).append(part)


def _name(layer: int, role: str) -> str:
    return _NAMES.get(role, role) if layer < 0 else f"layer {layer} {role}"


def _probe(model: Checkpoint, name: str) -> Tensor:
    """A few rows from the middle of a tensor: the first rows of an embedding are tokens that no text has."""
    rows = model.store.shape(name)[0]
    start = max(0, rows // 2 - _ROWS // 2)
    piece = model.store.read(name, slice(start, start + _ROWS)) if len(model.store.shape(name)) > 1 else None
    tensor = model.stored(name) if piece is None else piece.to(model.device).to(model.dtype)
    return tensor.flatten()


def _says_something(x: Tensor) -> bool:
    return bool((x != x.flatten()[0]).any())


def _live(model: Checkpoint, layer: int, role: str) -> bool:
    """Whether the part reaches the residual stream at all."""
    if layer < 0:
        return True
    base = role.removesuffix(".bias").removesuffix("_norm")
    if base in {"q", "k", "v", "o", "qkv", "attn"} and model.has(layer, "q") and model.has(layer, "k"):
        return canonical.attends(model, layer)
    return layer in canonical.live_layers(model)


def _silent_heads(model: Checkpoint) -> dict[int, Tensor]:
    """{layer: indices of query heads that write nothing}, for layers that have q, k, v and o."""
    found = {}
    for layer in range(model.geometry.layers):
        if all(model.has(layer, role) for role in "qkvo"):
            silent = torch.nonzero(canonical.attention_heads(model, layer).weight == 0).flatten()
            if len(silent):
                found[layer] = silent
    return found


def _find_silent(
    owner: Checkpoint, holder: Checkpoint, silent: dict[int, Tensor], found: SharedParts, swapped: bool
) -> None:
    """Heads of `holder` that write nothing but hold queries of `owner`."""
    if (
        not silent
        or owner.geometry.hidden != holder.geometry.hidden
        or owner.geometry.head_dim != holder.geometry.head_dim
    ):
        return
    heads = {l: _queries(owner, l) for l in range(owner.geometry.layers) if owner.has(l, "q")}
    for layer, indices in silent.items():
        held = _queries(holder, layer)[indices]
        best = {l: (held @ q.T.to(held.device)).amax(1) for l, q in heads.items()}
        origin = max(best, key=lambda l: float(best[l].mean()))
        close = best[origin] > _NEAR
        if not bool(close.any()):
            continue
        cosine = float(best[origin][close].mean())
        source, copy = f"layer {origin} heads", f"layer {layer} {int(close.sum())} heads that write nothing"
        first, second = (copy, source) if swapped else (source, copy)
        found.inert.append(Part(first, second, cosine, cosine > 1 - 1e-6))


def _queries(model: Checkpoint, layer: int) -> Tensor:
    """Queries of each head as one unit row [H, h·d]."""
    q = model.read(layer, "q").reshape(model.geometry.heads, -1)
    return q / q.norm(dim=1, keepdim=True).clamp_min(1e-30)


def sentence(parts: list[Part]) -> str:
    """The shared parts in words, with layers grouped: "embedding, layers 0–3 (q, k, v)"."""
    outside = [p.b for p in parts if not p.b.startswith("layer ")]
    inside: dict[str, set[int]] = defaultdict(set)
    for part in parts:
        if part.b.startswith("layer "):
            number, _, role = part.b.removeprefix("layer ").partition(" ")
            inside[role].add(int(number))
    by_layers: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for role, layers in inside.items():
        by_layers[tuple(sorted(layers))].append(role)
    return ", ".join(
        [*outside, *(f"layer{'s' * (len(l) > 1)} {_ranges(l)} ({', '.join(r)})" for l, r in by_layers.items())]
    )


def _ranges(numbers: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)

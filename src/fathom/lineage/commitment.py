r"""Commit to a model without showing it, and show only what an auditor needs.

Tier 0 — commitment. Every weight, by role and as float32 (so shard order, file format and lossless dtype changes
do not matter),
is cut into leaves; leaf = SHA-256(0 ‖ salt ‖ name ‖ shape ‖ offset ‖ bytes), node = SHA-256(1 ‖ left ‖ right); the
root goes into a
signed statement (Ed25519) together with the fingerprint vector. Salts come from one secret by HMAC, so an opened
leaf says
nothing about others and public bases cannot be guessed by dictionary.
    Proves: whoever holds the signing key had fixed these weights when the statement was signed, and — by
    recomputation with
    the weights in hand — that the vector is theirs. Does not prove: that the key's holder trained them, or serves them.

Tier 1 — selective opening. The embedding rows of the token list and the two layers that HuRef reads, with Merkle paths.
    Proves to someone without the other weights: the published vector is computed from values under the root, taken from
    the rows and layers that the statement names.
    Does not prove: that those rows are those tokens' (the tokenizer is not under the root; the statement fixes the map,
    tier 0 compares it with the model's tokenizer), nor that the layers are the last two live ones of the model.
"""

import base64
import hashlib
import hmac
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fathom.lineage.errors import CheckpointError
from fathom.lineage.families import family_of
from fathom.lineage.huref import DEFAULT, VECTOR, Fingerprint, HuRefOptions, fingerprint
from fathom.lineage.reader import Checkpoint
from fathom.lineage.weights import Weights

_CHUNK = 1 << 20  # bytes of a leaf; the embedding is cut by rows, because single rows are opened
_OPENED = ("q", "k", "v", "o", "gate", "up", "down", "attn_norm", "ffn_norm", "q_norm", "k_norm", "post_attn_norm",
           "post_ffn_norm", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b")  # fmt: skip


class CommitmentError(ValueError):
    """A root, signature, path or recomputed vector does not match."""


def _tensors(model: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Every weight by role (those without one by their stored name), in the order of their names, one at a time."""
    names = ["embed", *(["head"] if not model.tied else []), *model.outer_roles()]
    entries: list[tuple[str, int, str]] = [(name, -1, name) for name in names]
    for layer in range(model.geometry.layers):
        entries += [(f"layers.{layer:05d}.{role}", layer, role) for role in model.unfused_roles(layer)]
    entries += [(f"extra.{name}", -1, name) for name in model.extra]
    for key, layer, role in sorted(entries):
        if key.startswith("extra."):
            yield key, model.stored(role)
        elif layer >= 0:
            yield key, model.read(layer, role)
        elif role == "embed":
            yield key, model.embedding()
        else:
            tensor = model.head() if role == "head" else model.outer(role)
            assert tensor is not None
            yield key, tensor


def _pieces(name: str, tensor: Tensor) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of the leaves of a tensor, little-endian float32."""
    data = tensor.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)
    step = data.itemsize * data.shape[1] if name == "embed" else _CHUNK
    raw = data.tobytes()
    return ((start, raw[start : start + step]) for start in range(0, len(raw), step))


def _salt(secret: bytes, name: str, offset: int) -> bytes:
    return hmac.digest(secret, f"{name}@{offset}".encode(), "sha256")


def _leaf(salt: bytes, name: str, shape: tuple[int, ...], offset: int, data: bytes) -> bytes:
    head = json.dumps([name, list(shape), offset]).encode()
    return hashlib.sha256(b"\0" + salt + len(head).to_bytes(4, "big") + head + data).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def _levels(leaves: list[bytes]) -> list[list[bytes]]:
    """All levels of the tree, leaves first; an odd last node moves up unchanged."""
    levels = [leaves]
    while len(levels[-1]) > 1:
        row = levels[-1]
        above = [_node(row[i], row[i + 1]) for i in range(0, len(row) - 1, 2)]
        levels.append(above + ([row[-1]] if len(row) % 2 else []))
    return levels


def _leaves(model: Checkpoint, secret: bytes) -> tuple[list[bytes], list[tuple[str, int]]]:
    leaves, places = [], []
    for name, tensor in _tensors(model):
        for offset, data in _pieces(name, tensor):
            leaves.append(_leaf(_salt(secret, name, offset), name, tuple(tensor.shape), offset, data))
            places.append((name, offset))
    return leaves, places


def merkle_root(model: Checkpoint, secret: bytes) -> str:
    """The root over all weights, hexadecimal. secret: at least 16 bytes, kept by the owner."""
    if len(secret) < 16:
        raise ValueError(f"secret: {len(secret)} bytes; at least 16 random bytes are needed to hide the leaves")
    return _levels(_leaves(model, secret)[0])[-1][0].hex()


def statement(model: Checkpoint, mark: Fingerprint, secret: bytes, version: str) -> dict[str, Any]:
    """The statement that gets signed: root, vector, token list and its rows, layers, sizes, time."""
    return {
        "format": "fathom-lineage-1",
        "fathom": version,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "nonce": os.urandom(16).hex(),
        "root": merkle_root(model, secret),
        "vector": [float(f"{x:.7g}") for x in mark.vector.tolist()],
        "tokens": [base64.b64encode(t).decode() for t in mark.tokens],
        "tokens_sha256": mark.token_digest,
        "rows": mark.rows,  # which row of the embedding each token is: fixed before anything is opened
        "layers": mark.layers,
        "opened": _opened_names(
            model, mark.layers
        ),  # what an opening must show: a norm left out would change the terms
        "config": _public_config(model),
    }


def _opened_names(model: Checkpoint, layers: list[int]) -> list[str]:
    """Every weight that the vector is made of, beside the embedding."""
    return sorted(
        f"layers.{layer:05d}.{role}"
        for layer in set(layers)
        for role in model.unfused_roles(layer)
        if role.split(".")[-1] in _OPENED
    )


def _public_config(model: Checkpoint) -> dict[str, Any]:
    """The parts of the configuration that the terms depend on."""
    return {k: v for k, v in sorted(model.config.items()) if isinstance(v, (int, float, str, bool))}


def _canonical(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def sign(record: dict[str, Any], key: Ed25519PrivateKey) -> dict[str, str]:
    """Ed25519 signature over the canonical JSON of a statement."""
    public = key.public_key().public_bytes_raw()
    return {"algorithm": "Ed25519", "public_key": public.hex(), "signature": key.sign(_canonical(record)).hex()}


def check_signature(record: dict[str, Any], signature: dict[str, str], trusted: Ed25519PublicKey | None = None) -> str:
    """The signer's public key (hexadecimal). Raises CommitmentError when the signature is wrong or not by `trusted`."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature["public_key"]))
        key.verify(bytes.fromhex(signature["signature"]), _canonical(record))
    except (InvalidSignature, KeyError, ValueError, TypeError) as error:
        raise CommitmentError("signature: it does not fit the statement; one of the two was changed") from error
    if trusted is not None and trusted.public_bytes_raw() != key.public_bytes_raw():
        raise CommitmentError("signature: it is valid, but not by the key that you trust")
    return signature["public_key"]


def load_key(path: Path) -> Ed25519PrivateKey:
    """An Ed25519 private key from a PEM file (`openssl genpkey -algorithm ed25519`)."""
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as error:  # TypeError: it is encrypted
        raise ValueError(f"{path}: not a private key in PEM without a password ({error})") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(
            f"{path}: not an Ed25519 key; make one with: openssl genpkey -algorithm ed25519 -out {path.name}"
        )
    return key


def load_public_key(path: Path) -> Ed25519PublicKey:
    """An Ed25519 public key from a PEM file."""
    try:
        key = load_pem_public_key(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not a public key in PEM ({error})") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"{path}: not an Ed25519 public key")
    return key


def check_model(record: dict[str, Any], model: Checkpoint, secret: bytes | None) -> dict[str, float]:
    """Recompute from the weights: {"cosine": …, "root": 1.0 when checked}. Raises CommitmentError when something
    differs.

    Without the secret only the vector can be checked: then "root" is missing from the result.
    """
    found = {"cosine": _check_vector(record, model)}
    if secret is not None:
        if (root := merkle_root(model, secret)) != record.get("root"):
            raise CommitmentError(
                f"root: these weights give {root[:16]}…, the statement says {record.get('root')!s:.16}…"
            )
        if record["tokens"]:
            _check_rows(record, model)
        found["root"] = 1.0
    return found


def _check_rows(record: dict[str, Any], model: Checkpoint) -> None:
    vocabulary = model.vocabulary or {}
    if [vocabulary.get(base64.b64decode(t)) for t in record["tokens"]] != record.get("rows"):
        raise CommitmentError("rows: this model's tokenizer gives the tokens other embedding rows than the statement")


def _check_vector(record: dict[str, Any], model: Checkpoint, options: HuRefOptions = DEFAULT) -> float:
    try:
        tokens = [base64.b64decode(t) for t in record["tokens"]]
        want = torch.tensor(record["vector"], dtype=torch.float64)
        if want.shape != (VECTOR,) or not torch.isfinite(want).all():
            raise ValueError(
                f"a vector of {tuple(want.shape)} numbers, {int(torch.isfinite(want).sum())} of them finite"
            )
    except (KeyError, TypeError, ValueError) as error:
        raise CommitmentError(f"statement: it is incomplete or malformed ({error!r})") from error
    mark = fingerprint(model, options, tokens or None)
    cosine = torch.cosine_similarity(mark.vector.double(), want, dim=0).item()
    if not cosine >= 0.9999:  # also where it is no number
        raise CommitmentError(
            f"vector: these weights give another fingerprint (cosine {cosine:.4f} to the published one)"
        )
    return cosine


# ── tier 1 ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Opening:
    """Part of a committed model: `tensors` (safetensors bytes) and `proof` (salts, places and Merkle paths of its
    leaves)."""

    tensors: bytes
    proof: dict[str, Any]


def open_selected(model: Checkpoint, record: dict[str, Any], secret: bytes) -> Opening:
    """Open the embedding rows of the token list and the layers HuRef reads.

    Raises CommitmentError when the model is not the committed one.
    """
    leaves, places = _leaves(model, secret)
    levels = _levels(leaves)
    if levels[-1][0].hex() != record["root"]:
        raise CommitmentError("root: this model or secret is not the one that was committed")
    tokens = [base64.b64decode(t) for t in record["tokens"]]
    if model.vocabulary is None or not tokens:
        raise CheckpointError(f"{model.source}: without a tokenizer there is no token list to open")
    _check_rows(record, model)
    rows = record["rows"]
    where = {place: i for i, place in enumerate(places)}
    table = model.embedding()
    width = table.shape[1] * 4
    opened = {"embed": table[torch.tensor(rows, device=table.device)].cpu()}
    indices = [where["embed", row * width] for row in rows]
    shapes = {"embed": list(table.shape)}
    for name in _opened_names(model, record["layers"]):
        _, layer, role = name.split(".", 2)
        opened[name] = model.read(int(layer), role).cpu().contiguous()
        shapes[name] = list(opened[name].shape)
        indices += [where[name, offset] for offset, _ in _pieces(name, opened[name])]
    salts = {f"{places[i][0]}@{places[i][1]}": _salt(secret, *places[i]).hex() for i in indices}
    proof = {"shapes": shapes, "salts": salts, "leaves": len(leaves), "nodes": _multiproof(levels,
    indices),
             "index": {f"{places[i][0]}@{places[i][1]}": i for i in indices}}  # fmt: skip
    return Opening(save(opened), proof)


def _multiproof(levels: list[list[bytes]], indices: list[int]) -> list[str]:
    """The sibling nodes, level by level and left to right, that a verifier of these leaves cannot compute."""
    known, missing = sorted(set(indices)), []
    for row in levels[:-1]:
        here = set(known)
        missing += [row[i ^ 1].hex() for i in known if i ^ 1 < len(row) and i ^ 1 not in here]
        known = sorted({i // 2 for i in known})
    return missing


def _root_from(known: dict[int, bytes], count: int, nodes: list[str]) -> bytes:
    """Climb from the opened leaves with the missing siblings; the inverse of `_multiproof`."""
    rest = iter(nodes)
    while count > 1:
        above: dict[int, bytes] = {}
        for i in sorted(known):
            if i // 2 in above:
                continue
            if i ^ 1 >= count:
                above[i // 2] = known[i]
                continue
            sibling = known[i ^ 1] if i ^ 1 in known else bytes.fromhex(next(rest))
            above[i // 2] = _node(known[i], sibling) if i % 2 == 0 else _node(sibling, known[i])
        known, count = above, (count + 1) // 2
    return known[0]


def check_opening(record: dict[str, Any], opening: Opening) -> float:
    """Verify an opening against the root and recompute the vector from it; returns the cosine.

    Raises CommitmentError when a value, path or the vector does not fit.
    """
    proof = opening.proof
    known: dict[int, bytes] = {}
    try:
        tensors = load(opening.tensors)
        if "opened" not in record:
            raise ValueError("the statement does not list what must be opened; make the fingerprint again")
        if differ := set(tensors) ^ {"embed", *record["opened"]}:
            raise ValueError(f"{min(differ)} is shown or stated, not both")
        if {int(n.split(".")[1]) for n in record["opened"]} != set(record["layers"]):
            raise ValueError("the statement names other layers than it opens")
        if bad := next((n for n, t in tensors.items() if not torch.isfinite(t).all()), None):
            raise ValueError(f"{bad} has NaN or infinite numbers")
        for name, tensor in tensors.items():
            shape = tuple(proof["shapes"][name])
            pieces = _pieces(name, tensor)
            if name == "embed":
                offsets = (row * tensor.shape[1] * 4 for row in record["rows"])
                pieces = ((at, data) for at, (_, data) in zip(offsets, pieces, strict=True))
            for offset, data in pieces:
                key = f"{name}@{offset}"
                leaf, at = _leaf(bytes.fromhex(proof["salts"][key]), name, shape, offset, data), proof["index"][key]
                # A leaf outside the tree, or in the place of another, would not reach the root and could say anything.
                if at not in range(proof["leaves"]) or known.setdefault(at, leaf) != leaf:
                    raise ValueError(f"{key} has no place of its own in the tree")
        root = _root_from(known, proof["leaves"], proof["nodes"]).hex()
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, StopIteration, SafetensorError) as error:
        raise CommitmentError(f"proof: it is incomplete or malformed ({error!r})") from error
    if root != record["root"]:
        raise CommitmentError("root: the opened values do not belong to the committed model")
    try:
        return _check_vector(record, _opened_model(record, tensors))
    except CheckpointError as error:
        raise CommitmentError(f"opening: no vector follows from it ({error})") from error


def _opened_model(record: dict[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    """A model of which only some rows and layers are known; enough for HuRef."""
    config = dict(record["config"])
    family = family_of(config)
    renamed = {}
    for name, tensor in tensors.items():
        part = name.split(".", 2)
        renamed[name if name == "embed" else f"layers.{int(part[1])}.{part[2]}"] = tensor
    tokens = [base64.b64decode(t) for t in record["tokens"]]
    fused = set() if "q" in family.names else {"qkv"}
    weights = Weights(config, family, renamed, {t: i for i, t in enumerate(tokens)}, fused=fused)
    return weights.checkpoint()

"""Attacks that change the function a little: what real descendants go through, and what a detector must still
recognise.

Each takes `Weights` and a seeded generator and returns changed `Weights`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from fathom.lineage.families import FAMILIES
from fathom.lineage.weights import Weights
from fathom.ops import merging

Perturbation = Callable[[Weights, Generator], Weights]


def _map_matrices(w: Weights, change: Callable[[Tensor], Tensor], outer: bool = False) -> Weights:
    w = w.clone()
    for key in [*w.matrices(), *(("embed", "head") if outer else ())]:
        if key in w.tensors:
            w.tensors[key] = change(w.tensors[key])
    return w


def noise(w: Weights, generator: Generator, level: float = 0.5) -> Weights:
    """Gaussian noise on every matrix and the embeddings, relative to the standard deviation of each."""

    def add(t: Tensor) -> Tensor:
        return t + level * t.std() * torch.randn(t.shape, generator=generator, dtype=t.dtype)

    return _map_matrices(w, add, outer=True)


def quantise(w: Weights, generator: Generator, bits: int = 8, group: int = 0) -> Weights:
    """Round to nearest, symmetric, one scale for each row or for each `group` of a row's columns; then dequantise."""
    top = 2 ** (bits - 1) - 1

    def round_trip(t: Tensor) -> Tensor:
        size = group if group and t.shape[1] % group == 0 else t.shape[1]
        blocks = t.reshape(len(t), -1, size)
        step = blocks.abs().amax(2, keepdim=True).clamp_min(1e-30) / top
        return ((blocks / step).round().clamp(-top - 1, top) * step).reshape(t.shape)

    return _map_matrices(w, round_trip)


def prune_magnitude(w: Weights, generator: Generator, part: float = 0.5) -> Weights:
    """The smallest entries of every matrix set to zero."""

    def cut(t: Tensor) -> Tensor:
        limit = t.abs().flatten().kthvalue(max(1, int(part * t.numel()))).values
        return torch.where(t.abs() > limit, t, 0)

    return _map_matrices(w, cut)


def prune_depth(w: Weights, generator: Generator, part: float = 1 / 3) -> Weights:
    """A run of layers before the last two removed (what depth pruning usually finds redundant)."""
    depth = w.depth
    drop = max(1, round(part * depth))
    start = max(0, depth - 2 - drop)
    kept = [l for l in range(depth) if not start <= l < start + drop]
    source, w = w, w.clone()
    w.tensors = {k: v for k, v in w.tensors.items() if not k.startswith("layers.")}
    for new, old in enumerate(kept):
        for role in source.roles(old):
            w.tensors[f"layers.{new}.{role}"] = source.tensors[f"layers.{old}.{role}"]
    for key in ("num_hidden_layers", "n_layer"):
        if key in w.config:
            w.config[key] = len(kept)
    for key, value in w.config.items():
        if isinstance(value, list) and len(value) == depth:
            w.config[key] = [value[l] for l in kept]
    return w


def prune_width(w: Weights, generator: Generator, part: float = 1 / 3) -> Weights:
    """Residual dims with the smallest embedding norm removed everywhere; head count and size stay."""
    d = w.geometry.hidden
    keep_count = max(w.geometry.heads, int(d * (1 - part)) // w.geometry.heads * w.geometry.heads)
    keep = w.tensors["embed"].norm(dim=0).topk(keep_count).indices.sort().values
    head_dim = w.geometry.head_dim
    w = w.clone()
    inner = {"o", "down", "q_norm", "k_norm", "q_b", "kv_b", "q_a_norm", "kv_a_norm"}
    for key, tensor in w.tensors.items():
        role, bias = key.removesuffix(".bias").split(".")[-1], key.endswith(".bias")
        if role in {"o", "down"}:
            w.tensors[key] = tensor[keep]
        elif role not in inner and not (bias and "norm" not in role):
            w.tensors[key] = tensor[..., keep]
    w.config["n_embd" if w.family.transposed else "hidden_size"] = keep_count
    w.config["head_dim"] = head_dim
    return w


def upcycle(w: Weights, generator: Generator, experts: int = 4, level: float = 0.1) -> Weights:
    """A dense Llama-like model to Mixtral: every expert a noisy copy of the feed-forward, a random router."""
    if w.config.get("model_type") not in {"llama", "mistral"}:
        raise ValueError("perturbation 'upcycle': only Llama and Mistral models become a Mixtral here")
    w = w.clone()
    for layer in range(w.depth):
        d = w.tensors["embed"].shape[1]
        w.set(layer, "router", 0.02 * torch.randn(experts, d, generator=generator, dtype=w.tensors["embed"].dtype))
        for role in ("gate", "up", "down"):
            dense = w.tensors.pop(f"layers.{layer}.{role}")
            for e in range(experts):
                copy = dense + level * dense.std() * torch.randn(dense.shape, generator=generator, dtype=dense.dtype)
                w.set(layer, f"experts.{e}.{role}", copy)
    w.family = FAMILIES["mixtral"]
    w.config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": experts,
                 "num_experts_per_tok": 2}  # fmt: skip
    w.config.pop("mlp_bias", None)
    return w


def extend_vocabulary(w: Weights, generator: Generator, part: float = 0.1) -> Weights:
    """New tokens appended with the mean embedding plus noise."""
    w = w.clone()
    for key in ("embed", "head"):
        if key in w.tensors:
            table = w.tensors[key]
            extra = int(part * len(table))
            fresh = table.mean(0) + table.std() * torch.randn(
                extra, table.shape[1], generator=generator, dtype=table.dtype
            )
            w.tensors[key] = torch.cat([table, fresh])
            w.config["vocab_size"] = len(table) + extra
    return w


def replace_embedding(w: Weights, generator: Generator) -> Weights:
    """The input embedding drawn anew; a tied head keeps the old one, as its own tensor."""
    w = w.clone()
    w.untie()
    old = w.tensors["embed"]
    w.tensors["embed"] = old.std() * torch.randn(old.shape, generator=generator, dtype=old.dtype)
    return w


def lora(w: Weights, generator: Generator, rank: int = 16, level: float = 0.3) -> Weights:
    """A random low-rank update merged into every matrix, with `level` times the matrix's Frobenius norm."""

    def add(t: Tensor) -> Tensor:
        a = torch.randn(rank, t.shape[1], generator=generator, dtype=t.dtype)
        b = torch.randn(len(t), rank, generator=generator, dtype=t.dtype)
        update = b @ a
        return t + level * t.norm() / update.norm() * update

    return _map_matrices(w, add)


def merge(parents: Sequence[Weights], weights: Sequence[float], how: str = "linear", density: float = 0.5) -> Weights:
    """Merge models of one shape. The first is the base of task vectors for "ties" and "dare".

    how: "linear" (Σ wᵢPᵢ); "slerp" (two models, angle weights[1]); "ties" (trim to `density`, elect signs, average;
    arXiv 2306.01708); "dare" (drop entries with probability 1 − density, rescale; arXiv 2311.03099).
    """
    base = parents[0].clone()
    generator = torch.Generator().manual_seed(0)
    for key in base.tensors:
        stack = [p.tensors[key] for p in parents]
        if how == "linear":
            base.tensors[key] = merging.linear(stack, weights)
        elif how == "slerp":
            base.tensors[key] = merging.slerp(stack[0], stack[1], weights[1])
        elif how in {"ties", "dare"}:
            tasks = [c * (t - stack[0]) for c, t in zip(weights[1:], stack[1:])]
            base.tensors[key] = stack[0] + (
                merging.ties(tasks, density) if how == "ties" else merging.dare(tasks, density, generator)
            )
        else:
            raise ValueError(f"how: {how!r} is unknown; choose linear, slerp, ties or dare")
    return base


def fine_tune(
    w: Weights, batches: Sequence[Tensor], folder: Path, lr: float = 1e-4, rank: int | None = None
) -> Weights:
    """Train on token batches [n, T] with AdamW: all weights, or LoRA of the given rank merged afterwards (needs
    peft)."""
    from transformers import AutoModelForCausalLM

    from fathom.lineage.reader import open_checkpoint

    path = w.save(folder / "before", torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    if rank is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    model.train()
    for batch in batches:
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    if rank is not None:
        model = model.merge_and_unload()
    model.save_pretrained(folder / "after")
    after = Weights.load(open_checkpoint(folder / "after"))
    after.vocabulary, after.source = w.vocabulary, w.source
    return after


INEXACT: dict[str, Perturbation] = {
    "noise": noise,
    "noise_1": partial(noise, level=1.0),
    "int8": quantise,
    "int4": partial(quantise, bits=4, group=32),
    "prune_magnitude": prune_magnitude,
    "prune_depth": prune_depth,
    "prune_width": prune_width,
    "upcycle": upcycle,
    "extend_vocabulary": extend_vocabulary,
    "replace_embedding": replace_embedding,
    "lora": lora,
}

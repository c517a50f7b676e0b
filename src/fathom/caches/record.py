"""Keys and values of a model on a text, rotated or not, layer by layer: what calibration reads.

A calibration file names its model by a fingerprint of shapes and of a few numbers of every weight, so that a file made
on another model is noticed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fathom.caches import versions
from fathom.caches.base import LayerContext
from fathom.caches.compress import cache_shape, compress
from fathom.caches.methods.full import Full, FullState
from fathom.caches.rope import SlotRope
from fathom.ops.cached_attention import causal_attention

SAMPLES, EMBEDDINGS = 64, 64  # numbers of every parameter, spread over it, and rows of the embeddings
HALF_PRECISION = (
    ". A model loaded in fp16 may have a fingerprint of its own (in fp32 and bf16 it is the same): make the file in "
    "the dtype it is used in"
)


@dataclasses.dataclass(frozen=True)
class Unrotated(Full):
    """The full cache with unrotated keys: same outputs, and the cache holds what the projections gave."""

    pre_rope_remedy = (
        "calibrate on keys as they are cached: calibration='post_rope' (channels) or rope='post' (codebooks)"
    )

    @property
    def pre_rope(self) -> bool:
        return True

    def new_state(self, context: LayerContext) -> _UnrotatedState:
        return _UnrotatedState(context.rope)


class _UnrotatedState(FullState):
    def __init__(self, rope: SlotRope | None):
        super().__init__()
        self.rope = rope

    @property
    def appends(self) -> bool:
        return False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
        start = self.seen
        keys, values = self.append(key, value)
        if self.rope is not None:
            query, keys = self.rope(query, start), self.rope(keys)
        return causal_attention(query, keys, values, scaling, dropout)


@torch.no_grad()
def record(
    model: nn.Module, input_ids: Tensor, pre_rope: bool, chunk_size: int = 2048
) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values [B,G,T,D] of every full-attention layer for these tokens [B,T], in layer order."""
    with compress(model, Unrotated() if pre_rope else Full()):
        cache = None
        for part in input_ids.split(chunk_size, dim=1):
            out = model(input_ids=part, use_cache=True, logits_to_keep=1, **{versions.CACHE_NAME: cache})
            cache = out[versions.CACHE_NAME]
    assert cache is not None
    for layer in cache.compressed_layers():
        yield layer.states[0].key, layer.states[0].value


def fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits from the cache's shape and some numbers (as bf16) of every weight that keys and values depend on.

    Embeddings count with their first rows only, as a vocabulary may grow while keys of old tokens stay. A model has the
    same fingerprint in fp32 and bf16; in fp16 it may differ, as numbers are rounded twice.
    """
    shape = cache_shape(model)
    digest = hashlib.sha256(f"{shape.layers} {shape.kv_heads} {shape.key_dim} {shape.value_dim}".encode())
    embedding, decoder = model.get_input_embeddings(), versions.decoder(model)
    rows = next(versions.weights(embedding))[:EMBEDDINGS]  # type: ignore[arg-type]
    names = [parameter is embedding.weight for parameter in decoder.parameters()]  # type: ignore[union-attr]
    layers = (weight for is_embedding, weight in zip(names, versions.weights(decoder)) if not is_embedding)
    for weight in itertools.chain([rows], layers):
        numbers = weight.flatten()[:: max(1, weight.numel() // SAMPLES)].to("cpu", torch.bfloat16)
        digest.update(numbers.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]

"""A report of what a cache holds: tokens, slots, bytes, and its bytes divided by the full cache's."""

from __future__ import annotations

import dataclasses
from typing import Any

from fathom.caches.base import CompressedCache, CompressedLayer, layer_bytes


@dataclasses.dataclass(frozen=True)
class CompressionReport:
    """What a cache holds. `str(report)` is a table; `to_dict()` is ready for JSON.

    nominal ratio: slots stored / tokens seen, pads excluded, over compressed layers and rows. It is 1 for a method that
    keeps every token in fewer bytes.
    real ratio: bytes held, with statistics, indices and scales / bytes of the same tokens uncompressed.
    """

    method: dict[str, Any]
    tokens_seen: int
    rows: int
    slots: tuple[float, ...]  # by compressed layer, mean over rows
    compressed_bytes: int
    full_bytes: int
    untouched_layers: int
    untouched_bytes: int
    tokens_a_row: float | None = None  # mean over rows, pads excluded; None: tokens_seen, as no row is padded

    @property
    def nominal_ratio(self) -> float:
        tokens = self.tokens_seen if self.tokens_a_row is None else self.tokens_a_row
        return sum(self.slots) / max(1, len(self.slots) * tokens)

    @property
    def real_ratio(self) -> float:
        return self.compressed_bytes / max(1, self.full_bytes)

    @property
    def note(self) -> str:
        """Why the cache is no smaller than a full one; "" if it is."""
        if self.compressed_bytes < self.full_bytes or self.method["name"] == "full":
            return ""
        if self.compressed_bytes == self.full_bytes:
            return f"as large as a full cache: nothing was compressed, all {self.tokens_seen:,} tokens fit"
        records = "the method's own records (scores, positions, scales)"
        if self.nominal_ratio >= 1:
            return (
                f"larger than a full cache: nothing was evicted, all {self.tokens_seen:,} tokens fit, beside {records}"
            )
        return f"larger than a full cache: {records} outweigh what was evicted"

    def to_dict(self) -> dict[str, Any]:
        derived = {"nominal_ratio": self.nominal_ratio, "real_ratio": self.real_ratio, "note": self.note}
        return {**dataclasses.asdict(self), **derived}

    def __str__(self) -> str:
        low, high = min(self.slots), max(self.slots)
        spread = f"{low:g}" if low == high else f"{low:g} … {high:g}"
        padded = "" if self.tokens_a_row is None else f" (pads included; {self.tokens_a_row:g} a row without them)"
        lines = [
            f"method            {self.method['name']}",
            f"rows              {self.rows}",
            f"tokens seen       {self.tokens_seen}{padded}",
            f"slots per head    {spread} in each of {len(self.slots)} compressed layers",
            f"bytes             {self.compressed_bytes:,} (full cache: {self.full_bytes:,})",
            f"ratio             {self.nominal_ratio:.4f} nominal, {self.real_ratio:.4f} real",
        ]
        if self.note:
            lines.append(f"note              {self.note}")
        if self.untouched_layers:
            lines.append(
                f"uncompressed      {self.untouched_layers} other layers (sliding …), {self.untouched_bytes:,} bytes"
            )
        return "\n".join(lines)


def compression_report(cache: CompressedCache) -> CompressionReport:
    """The report of a cache. Raises ValueError if it is empty or not a compressed one."""
    if not isinstance(cache, CompressedCache):
        raise ValueError(f"cache is a {type(cache).__name__}: compression_report reads caches of fathom.caches")
    ours = cache.compressed_layers()
    if not ours or not ours[0].is_initialized:
        raise ValueError("the cache is empty: run the model with it first")
    others = [layer for layer in cache.layers if not isinstance(layer, CompressedLayer)]
    tokens = ours[0].mean_over_rows([state.seen for state in ours[0].states])
    return CompressionReport(
        method=cache.method.to_dict(),
        tokens_seen=cache.get_seq_length(),
        rows=ours[0].batch_size,
        slots=tuple(layer.mean_over_rows([state.stored for state in layer.states]) for layer in ours),
        compressed_bytes=sum(layer.nbytes() for layer in ours),
        full_bytes=sum(layer.full_bytes() for layer in ours),
        untouched_layers=len(others),
        untouched_bytes=sum(layer_bytes(layer) for layer in others),
        tokens_a_row=None if tokens == cache.get_seq_length() else tokens,
    )

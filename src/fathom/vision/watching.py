"""The attention of a tower and of the language model, for compressors that read more than features.

Like the classes of `families.py` these go before an instance's own class while a compressor is active. Instances of one
model share a `Watch`.

    TowerAttention      notes the CLS token's query and all keys of one layer of the tower
    WatchedModel        notes where the vision tokens of a prompt are
    WatchedAttention    gives the weights of a layer after which tokens are left out: it runs eagerly
    ThinnedLayer        runs on the tokens that are left, and leaves some out after such a layer
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fathom.vision.base import LanguageCompressor, Seen

BACKENDS = ("eager", "sdpa")  # of the language model, whose masks are known here


@dataclasses.dataclass
class Watch:
    """Data that the modules of one model pass to one another within a forward."""

    layers: int = 0  # of the language model
    seen: Seen | None = None  # by the tower
    image: Tensor | None = None  # where vision tokens are in the prompt [B, T]; None outside a prompt with pictures
    counts: list[int] = dataclasses.field(default_factory=list)  # vision tokens of each row
    grid: int = 0  # vision tokens of one picture, as the projector has last seen
    raters: list[Tensor] = dataclasses.field(default_factory=list)  # of each row
    weights: Tensor | None = None  # of the layer that has just run [B, heads, T, T]
    whole: Tensor | None = None  # states of all tokens, those left out as they were then
    kept: tuple[Tensor, Tensor] | None = None  # places of the tokens left, and which of these count [B, t]


def query_and_key(attention: Any) -> tuple[nn.Module, nn.Module] | None:
    """The query and key projections of a tower's attention, or None for another module. Older versions of transformers
    have other names for DINOv2's."""
    for names in (("q_proj", "k_proj"), ("query", "key")):
        query, key = (getattr(attention, name, None) for name in names)
        if isinstance(query, nn.Module) and isinstance(key, nn.Module):
            return query, key
    return None


class TowerAttention:
    """Keeps the CLS token's query and all keys of a tower's layer."""

    watch: Watch

    def forward(self, hidden_states: Tensor, *arguments: Any, **kwargs: Any) -> Any:
        query, key = query_and_key(self)  # type: ignore[misc]
        queries, keys = query(hidden_states[:, :1])[:, 0], key(hidden_states)
        width = self.head_dim if hasattr(self, "head_dim") else self.attention_head_size  # type: ignore[attr-defined]
        self.watch.seen = Seen(queries, keys, queries.shape[-1] // width)
        return super().forward(hidden_states, *arguments, **kwargs)  # type: ignore[misc]


class WatchedModel:
    """Finds a prompt's vision tokens before its forward, and forgets them after."""

    compressor: LanguageCompressor
    watch: Watch

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        watch, name = self.watch, self.compressor.name
        watch.image = None
        if any(kwargs.get(given) is not None for given in ("pixel_values", "mm_encoder_outputs")):
            if input_ids is None:
                raise ValueError(f"inputs_embeds: method {name!r} finds vision tokens by input_ids; give these")
            mask = kwargs.get("attention_mask")
            if mask is not None and mask.ndim == 2 and not bool(mask[:, -1].all()):
                raise ValueError(f"attention_mask: method {name!r} chooses by a prompt's last tokens; pad on the left")
            watch.image = input_ids == self.config.image_token_id  # type: ignore[attr-defined]
            watch.counts = watch.image.sum(-1).tolist()
        try:
            return super().forward(input_ids=input_ids, **kwargs)  # type: ignore[misc]
        finally:
            watch.image = watch.weights = watch.whole = watch.kept = None


class WatchedAttention:
    """Keeps a layer's attention weights where a method asks for them."""

    watch: Watch

    def forward(self, *arguments: Any, **kwargs: Any) -> Any:
        watch, stock = self.watch, self.config  # type: ignore[has-type]
        if watch.image is None:
            return super().forward(*arguments, **kwargs)  # type: ignore[misc]
        check_backend(stock)
        states = kwargs["hidden_states"] if "hidden_states" in kwargs else arguments[0]
        mask = kwargs.get("attention_mask")
        if mask is None:
            mask = _causal(states.shape[1], states.device)
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=states.dtype, device=mask.device).masked_fill(
                ~mask, torch.finfo(states.dtype).min
            )
        self.config = copy.copy(stock)
        self.config._attn_implementation = "eager"
        try:
            output = super().forward(*arguments, **{**kwargs, "attention_mask": mask})  # type: ignore[misc]
        finally:
            self.config = stock
        watch.weights = output[1]
        return output


class ThinnedLayer:
    """A layer of the language model that may run on fewer tokens.

    The layer's cache holds the tokens that it has read. Their indices are stored on the cache, for the steps after the
    prompt.
    """

    compressor: LanguageCompressor
    watch: Watch

    def forward(self, hidden_states: Tensor, *arguments: Any, **kwargs: Any) -> Tensor:
        watch, number = self.watch, self.self_attn.layer_idx  # type: ignore[attr-defined]
        cache = next((kwargs[name] for name in ("cache", "past_key_values") if kwargs.get(name) is not None), None)
        run: Callable[..., Tensor] = super().forward  # type: ignore[misc]
        if watch.image is None:  # a step after the prompt, or text alone
            noted = getattr(cache, "thinned", {}).get(number)
            if noted is not None and not cache.get_seq_length(number):  # type: ignore[union-attr]
                del cache.thinned[number]  # type: ignore[union-attr]  # the cache was reset
                noted = None
            if noted is not None:
                index, counts, prompt = noted
                queries = hidden_states.shape[1]
                since = cache.get_seq_length(number) - index.shape[1] + queries  # type: ignore[union-attr]
                if since < queries:
                    raise ValueError(
                        f"cache: it was cropped into a prompt that method {self.compressor.name!r} has thinned; "
                        "start with a new one"
                    )
                kwargs["attention_mask"] = _grown(kwargs.get("attention_mask"), index, counts, prompt, since, queries)
            return run(hidden_states, *arguments, **kwargs)
        if number == 0:
            self.begin(hidden_states, cache)
        if watch.kept is not None:
            index, counts = watch.kept
            kwargs["attention_mask"] = _thinned(kwargs.get("attention_mask"), index, counts)
            kwargs["position_embeddings"] = tuple(_at(part, index) for part in kwargs["position_embeddings"])
            if kwargs.get("position_ids") is not None:
                kwargs["position_ids"] = kwargs["position_ids"].expand(len(index), -1).gather(1, index)
            if cache is not None:
                if not hasattr(cache, "thinned"):
                    cache.thinned = {}
                cache.thinned[number] = index, counts, watch.image.shape[1]
        states = run(hidden_states, *arguments, **kwargs)
        if watch.kept is not None:
            index, counts = watch.kept
            assert watch.whole is not None
            real = torch.where(counts[..., None], states, _at(watch.whole, index))
            watch.whole = watch.whole.scatter(1, index[..., None].expand_as(real), real)
        else:
            watch.whole = states
        left = self.compressor.stages(watch.grid, watch.layers).get(number)
        if left is not None:
            states = self.thin(states, left)
        return watch.whole if number == watch.layers - 1 else states

    def begin(self, embeddings: Tensor, cache: Any) -> None:
        watch, name = self.watch, self.compressor.name
        assert watch.image is not None
        if self.training and getattr(self, "gradient_checkpointing", False):  # type: ignore[attr-defined]
            raise ValueError(f"gradient_checkpointing: method {name!r} cannot run layers again; switch it off")
        if getattr(cache, "is_compileable", False):
            raise ValueError(f"cache_implementation='static': method {name!r} keeps a cache that grows; leave it out")
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(
                f"method {name!r} leaves out tokens of a prompt that is read at once: start with a new cache"
            )
        if watch.image.shape[1] != embeddings.shape[1]:
            raise ValueError(f"method {name!r}: the prompt was cut to {embeddings.shape[1]} tokens; read it at once")
        watch.kept = watch.whole = None
        watch.raters = [
            self.compressor.raters(row, image) if count else row.new_zeros(0, dtype=torch.long)
            for row, image, count in zip(embeddings, watch.image, watch.counts)
        ]

    def thin(self, states: Tensor, left: int) -> Tensor:
        """Drop tokens. Rows that keep fewer than others are filled with tokens that are masked."""
        watch = self.watch
        assert watch.image is not None and watch.weights is not None and watch.whole is not None
        batch, length = watch.image.shape
        every = torch.arange(length, device=states.device).expand(batch, -1)
        index, counts = watch.kept or (every, torch.ones_like(every, dtype=torch.bool))
        rows = []
        for row in range(batch):
            place, real = index[row], counts[row]
            image = watch.image[row][place] & real
            if not watch.counts[row]:
                rows.append(place[real])
                continue
            asks = (place[:, None] == watch.raters[row]).to(watch.weights.dtype).argmax(0)
            weights = watch.weights[row].to(torch.promote_types(watch.weights.dtype, torch.float32))
            scores = weights.mean(0)[asks].mean(0)[image]
            pictures = watch.counts[row] // watch.grid
            kept, changed = self.compressor.keep(scores, states[row][image], left * pictures)
            stay = place[image][kept]
            watch.whole = watch.whole.index_put(
                (torch.tensor(row, device=states.device), stay), changed.to(states.dtype)
            )
            rows.append(torch.cat((place[~image & real], stay)).sort().values)
        most = max(len(row) for row in rows)
        index = torch.stack([torch.cat((row[:1].expand(most - len(row)), row)) for row in rows])
        counts = torch.stack([every[row, :most] >= most - len(one) for row, one in enumerate(rows)])
        watch.kept = index, counts
        return _at(watch.whole, index)


def check_backend(config: Any) -> None:
    """Raise ValueError if the attention implementation returns no weights to read."""
    if config._attn_implementation not in BACKENDS:
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r}: this method reads attention weights, which it does "
            f"not give; load the model with attn_implementation={' or '.join(map(repr, BACKENDS))}"
        )


def _at(values: Tensor, index: Tensor) -> Tensor:
    return values.expand(len(index), -1, -1).gather(1, index[..., None].expand(-1, -1, values.shape[-1]))


def _causal(length: int, device: Any) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]


def _hidden(mask: Tensor, counts: Tensor) -> Tensor:
    """The mask [B, 1, q, k] without the keys that do not count."""
    if mask.dtype == torch.bool:
        return mask & counts[:, None, None]
    return mask.masked_fill(~counts[:, None, None], torch.finfo(mask.dtype).min)


def _thinned(mask: Tensor | None, index: Tensor, counts: Tensor) -> Tensor | None:
    """The mask for the tokens left in a prompt."""
    if mask is None:
        if bool(counts.all()):
            return None
        mask = _causal(int(index.max()) + 1, index.device)
    mask = mask.expand(len(index), *mask.shape[1:])
    rows = mask.gather(2, index[:, None, :, None].expand(-1, 1, -1, mask.shape[-1]))
    columns = rows.gather(3, index[:, None, None].expand(-1, 1, rows.shape[2], -1))
    return _hidden(columns, counts)


def _grown(mask: Tensor | None, index: Tensor, counts: Tensor, prompt: int, since: int, queries: int) -> Tensor | None:
    """The mask for a step after the prompt: over the tokens left of it and all later ones."""
    if mask is None:
        if bool(counts.all()) and queries == 1:
            return None
        old = torch.ones(len(index), 1, queries, index.shape[1], dtype=torch.bool, device=index.device)
        new = _causal(since, index.device)[:, :, -queries:].expand(len(index), -1, -1, -1)
        return torch.cat((_hidden(old, counts), new), -1)
    mask = mask.expand(len(index), *mask.shape[1:])
    old = mask.gather(3, index[:, None, None].expand(-1, 1, mask.shape[2], -1))
    return torch.cat((_hidden(old, counts), mask[..., prompt : prompt + since]), -1)

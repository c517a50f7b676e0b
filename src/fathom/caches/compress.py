"""`compress(model, method)`: the context manager under which a stock model generates from a compressed cache.

What it installs on the model, and takes away again on exit:
- the attention implementation "fathom_cache": hands queries to the layer's state (stock SDPA for layers left alone);
- a hook before the model's forward: gives it a compressed cache and reads the padding mask;
- for methods that store unrotated keys, a hook on each compressed attention that replaces cos, sin by 1, 0.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from fathom.caches import versions
from fathom.caches.base import CacheMethod, CacheShape, CompressedCache, CompressedLayer, LayerContext, RowGroups
from fathom.caches.rope import SlotRope
from fathom.caches.trial import lent_attention, pads_are_exact, rotates_half_split
from fathom.decoding import entry

ATTENTION = "fathom_cache"
LOCK = threading.RLock()  # a model is looked at and bound by one thread at a time


class Forward(threading.local):
    """The forward under way in this thread. Each thread has its own, as a server may run one model in several."""

    def __init__(self) -> None:
        self.depth = 0  # nested forwards of the hooked modules: the outermost opens and closes
        self.entered: nn.Module | None = None  # that one, while it runs
        self.cache: CompressedCache | None = None
        self.seen = 0  # tokens of the cache before this forward
        self.unturned: tuple[Tensor, tuple[Tensor, Tensor]] | None = None  # cos of this forward, and 1 and 0 for it


class Hook:
    """A hook of `compress`. In a copy of the model (deepcopy, pickle) it does nothing: copies are stock models.

    only_python: it launches nothing that a replay of the step would lack (`fathom.decoding.fixed`).
    """

    only_python = True

    def __init__(self, call: Callable[..., Any] | None):
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return None if self.call is None else self.call(*args)

    def __reduce__(self) -> Any:
        return Hook, (None,)


class Binding:
    """One model under one method: the contexts of its compressed layers, and the forward that is under way."""

    def __reduce__(self) -> Any:
        return type(None), ()  # in a copy of the model

    def __init__(self, model: nn.Module, method: CacheMethod):
        self.outer, self.method = model, method
        self.model = versions.causal_lm(model)
        layers = versions.stock_layers(self.model)
        compressed = [index for index, layer in enumerate(layers) if versions.is_full_attention(layer)]
        self.modules = versions.attention_modules(self.model)
        _check_model(self.model, self.modules, layers, compressed)
        self.shape = cache_shape(self.model)
        ropes = _ropes(self.model, self.modules, compressed, method) if method.pre_rope else {}
        prepared = method.prepare(self.model, self.shape)
        self.contexts = {
            layer: LayerContext(index, len(compressed), ropes.get(layer), prepared)
            for index, layer in enumerate(compressed)
        }
        self.takes_positions = versions.takes_positions(self.model)
        self.pads_are_exact = True  # until `compress` has tried
        self.forward = Forward()

    def cut(self, rows: int, length: int, padded: bool) -> int | None:
        """Tokens of a prompt of `length` tokens that are read at once; None: all of them."""
        depth = getattr(self.model, "depth", None)
        if depth is not None and not depth.parts_are_exact:
            return None
        return self.method.prompt_part(rows, length, padded)

    def new_cache(self, into: DynamicCache | None = None, equal_rows: bool = False) -> CompressedCache:
        """An empty cache. An empty DynamicCache `into` becomes it in place, so that its owner holds the result."""
        groups = RowGroups()
        layers = [
            CompressedLayer(self.method, self.contexts[index], groups, equal_rows) if index in self.contexts else layer
            for index, layer in enumerate(versions.stock_layers(self.model))
        ]
        cache = CompressedCache.__new__(CompressedCache) if into is None else into
        cache.__class__ = CompressedCache
        cache.__init__(layers, self.method, groups, id(self.model))  # type: ignore[misc]
        return cache  # type: ignore[return-value]

    def open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of the outermost forward, with the cache chosen and the padding read."""
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        cache: Any = next((given[name] for name in versions.CACHE_NAMES if given.get(name) is not None), None)
        tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if tokens is None:
            raise ValueError("compress: pass input_ids or inputs_embeds to the model")
        _check_positions(given.get("position_ids"), given.get("attention_mask"))
        theirs = cache if type(cache) is DynamicCache and cache.get_seq_length() == 0 else None
        use_cache = given.get("use_cache")
        if use_cache is None:
            use_cache = getattr(versions.text_config(self.model), "use_cache", True) and not self.model.training
            if cache is None and not use_cache and ("use_cache" in kwargs or "use_cache" not in given):
                kwargs = {**kwargs, "use_cache": False}  # else the model would keep a DynamicCache of its own
        if cache is None and use_cache:
            cache = self.new_cache()
            kwargs = {**kwargs, versions.CACHE_NAME: cache}
        elif theirs is not None:
            if theirs.offloading:
                raise ValueError(
                    "cache is an offloaded DynamicCache: compressed caches stay on the device; pass DynamicCache(), "
                    "and set cache_implementation=None where generate() made it"
                )
            held = dict(vars(theirs))
            cache = self.new_cache(into=theirs)
        elif isinstance(cache, CompressedCache):
            self._check_cache(cache)
        elif cache is not None:
            raise ValueError(
                f"cache is a {type(cache).__name__} with {cache.get_seq_length()} tokens: under compress, pass none, "
                f"an empty DynamicCache, or one from build_cache(model, {self.method!r}); if you passed none, "
                "generate() made it: set cache_implementation=None there and in model.generation_config"
            )
        try:
            if cache is not None:
                self.forward.seen = cache.compressed_layers()[0].seen
                if torch.compiler.is_compiling():
                    cache.groups.begin(given.get("attention_mask"), tokens.shape[1], seen=self.forward.seen)
                else:
                    cache.begin(given.get("attention_mask"), *tokens.shape[:2])
            if given.get("position_ids") is None:
                kwargs = {**kwargs, **self._positions(cache, given.get("attention_mask"), tokens)}
        except BaseException:  # what is refused changes nothing
            if cache is not None and cache.before is not None:
                cache.end(failed=True)
            if theirs is not None:
                theirs.__class__ = DynamicCache
                vars(theirs).clear()
                vars(theirs).update(held)
            raise
        self.forward.cache = cache
        if cache is not None:
            for layer in cache.compressed_layers():
                layer.fused = True
        return kwargs

    def _positions(self, cache: CompressedCache | None, mask: Tensor | None, tokens: Tensor) -> dict[str, Tensor]:
        """Positions of padded rows, counted from each row's first token. The model would count the pads, so a row's
        rotated keys, and the codes, coefficients and scores made from them, would differ from those of the row alone.

        Raises:
            ValueError: a padded row, in a model that cannot be given its positions.
        """
        rows, length = tokens.shape[:2]
        positions: Tensor | None = None
        if cache is not None:
            positions = cache.groups.positions(self.forward.seen, length, rows, tokens.device)
        elif mask is not None and mask.ndim == 2:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        if positions is None:
            return {}
        if self.pads_are_exact:
            return {"position_ids": positions} if self.takes_positions else {}
        if cache is not None or bool((mask[:, -length] == 0).any()):  # type: ignore[index]
            raise ValueError(
                f"attention_mask has pads on the left, and {type(self.model).__name__} counts positions in its own "
                "way, so that a padded row would not be the row alone: give rows of one length, or one at a time"
            )
        return {}

    def close(self, failed: bool) -> None:
        forward = self.forward
        if forward.cache is not None:
            layers = forward.cache.compressed_layers()
            if forward.cache.before is not None:
                forward.cache.end(failed)
            elif layers[0].seen > forward.seen:  # compiled
                forward.cache.groups.filled(layers[0].seen - forward.seen)
            for layer in layers:
                layer.fused, layer.pending = False, None
        forward.cache = forward.unturned = forward.entered = None

    def _check_cache(self, cache: CompressedCache) -> None:
        if cache.owner != id(self.model):
            raise ValueError("cache was built for another model: build_cache(model, method) with this one")
        if cache.method != self.method:
            raise ValueError(f"cache holds {cache.method!r}, but compress was entered with {self.method!r}")
        if not torch.compiler.is_compiling():  # token counts of all layers would make every count a trace of its own
            cache.check()

    def attend_without_cache(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any
    ) -> Tensor:
        """Attention of a forward that keeps nothing (training, scoring), computed as a prompt on an empty cache.

        The padding is an argument because activation checkpointing calls again in backward, outside any forward.
        """
        if key.shape[2] != query.shape[2]:
            raise ValueError("compress: this cache was not made under compress; call the model itself, not its layers")
        groups = getattr(mask, "_fathom_groups", None)
        if groups is None:
            groups = RowGroups()
            groups.begin(mask, query.shape[2], stays=False)
            if mask is not None:  # one device sync a forward, not a layer; `_mask` made this tensor for the forward
                mask._fathom_groups = groups  # type: ignore[attr-defined]
        layer = CompressedLayer(self.method, self.contexts[module.layer_idx], groups)
        layer.pending = layer.take(key, value)
        return layer.attend(query, *rest)


def cache_shape(model: nn.Module, batch: int = 1) -> CacheShape:
    """The shape of one compressed layer of this model, with the number of such layers, for closed forms of bytes."""
    model = versions.causal_lm(model)
    config = versions.text_config(model)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    layers = sum(versions.is_full_attention(layer) for layer in versions.stock_layers(model))
    value_width = getattr(config, "v_head_dim", None) or width
    return CacheShape(batch, heads, width, value_width, model.dtype.itemsize, layers)


@contextlib.contextmanager
def compress(model: nn.Module, method: CacheMethod) -> Iterator[nn.Module]:
    """A context in which the model keeps keys and values as `method` says: in `generate`, `pipeline` and training.

        with compress(model, TreeKV(budget=1024)) as model:
            out = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=256)

    Left-padded batches are exact (every row equals the row alone). A cache made under the context can be passed to
    later calls. Hooks, attention implementation and config are restored on exit, also after an exception.

    Raises:
        ValueError: no layer of the model can be compressed, layers share keys, the method does not suit the model's
            positions, or the model is under `compress` already.
    """
    with contextlib.ExitStack() as stack:
        with LOCK:
            binding = Binding(model, method)
            inner = binding.model
            previous = versions.text_config(inner)._attn_implementation
            if previous is not None and not previous.startswith(("sdpa", "eager")):
                warnings.warn(
                    "compress: inside this context attention runs in Fathom's own function (SDPA) instead of "
                    f"{previous!r}",
                    stacklevel=3,
                )
            binding.pads_are_exact = pads_are_exact(inner, _mask)
            AttentionMaskInterface.register(ATTENTION, _mask)
            for module in {id(m): m for m in (model, inner, inner.base_model) if _has_forward(m)}.values():
                handle = module.register_forward_pre_hook(Hook(_before(binding)), with_kwargs=True)
                stack.callback(handle.remove)
                handle = module.register_forward_hook(Hook(_after(binding)), with_kwargs=True, always_call=True)
                stack.callback(handle.remove)
            for module in binding.modules:
                object.__setattr__(module, "_fathom_binding", binding)
                stack.callback(module.__dict__.pop, "_fathom_binding", None)
                if module.layer_idx in binding.contexts and binding.contexts[module.layer_idx].rope is not None:
                    handle = module.register_forward_pre_hook(Hook(_without_rotation(binding)), with_kwargs=True)
                    stack.callback(handle.remove)
            stack.enter_context(lent_attention(inner, ATTENTION, _attention))
            inner.__dict__["generate"] = Generate(inner)
            stack.callback(inner.__dict__.pop, "generate", None)
        yield model


class Generate:
    """`model.generate` under `compress`: Fathom's decoding loop (`fathom.decoding`), which reads long prompts in parts.

    A copy of the model is a stock model; there this calls transformers' own `generate`.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        stock = functools.partial(GenerationMixin.generate, model)
        binding = _binding(versions.attention_modules(model)[0])
        if binding is None:
            return type(model).generate(model, *args, **kwargs)  # type: ignore[attr-defined]
        return entry.generate(model, stock, *args, cut=binding.cut, **kwargs)


def build_cache(model: nn.Module, method: CacheMethod, equal_rows: bool = False) -> CompressedCache:
    """An empty cache for this model and method: pass it to `generate` under `compress`, or outside for `method.plain`.

    Outside `compress` the cache never sees the padding mask, so it takes one row at a time unless `equal_rows=True`
    states that no row is padded.

    Raises:
        ValueError: as `compress`.
    """
    modules = versions.attention_modules(versions.causal_lm(model))
    with LOCK:
        under = next((found for found in map(_binding, modules) if found is not None), None)
        binding = under if under is not None and under.method == method else Binding(model, method)
    return binding.new_cache(equal_rows=equal_rows)


def check_chunk(method: CacheMethod, chunk: int) -> None:
    """Refuse a chunk so short that the method never compresses: a full cache would be measured under its name."""
    shortest = method.shortest_call
    if chunk < shortest:
        raise ValueError(
            f"chunk={chunk}: {type(method).__name__} compresses only after calls of at least {shortest} tokens (its "
            f"window n_recent); use chunk ≥ {shortest}, or a smaller n_recent"
        )


@torch.no_grad()
def prefill(
    model: nn.Module,
    input_ids: Tensor,
    cache: CompressedCache | None = None,
    chunk_size: int = 2048,
    attention_mask: Tensor | None = None,
) -> Any:
    """Read a long prompt [B,T] in chunks, compressing after each: peak memory follows budget + chunk, not T.

    Call it inside `compress`. Returns the model's last output (logits of the last token, and the filled cache, which
    `generate` continues from when given the whole text or the new tokens). attention_mask [B, tokens of the cache + T].

    Raises:
        ValueError: chunk_size below 1, no tokens, or a mask of another length.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: use at least 1 token")
    if input_ids.shape[1] == 0:
        raise ValueError(f"input_ids of shape {tuple(input_ids.shape)}: give at least 1 token")
    held = 0 if cache is None else cache.get_seq_length()
    length = held + input_ids.shape[1]
    if attention_mask is not None and attention_mask.shape[1] != length:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)}: it must cover the {held} tokens of the cache and "
            f"the {input_ids.shape[1]} new ones, [rows, {length}]: torch.cat((mask of the text so far, new mask), 1)"
        )
    output = None
    for start in range(0, input_ids.shape[1], chunk_size):
        stop = min(start + chunk_size, input_ids.shape[1])
        output = model(
            input_ids=input_ids[:, start:stop],
            attention_mask=None if attention_mask is None else attention_mask[:, : held + stop],
            use_cache=True,
            logits_to_keep=1,
            **{versions.CACHE_NAME: cache},
        )
        cache = output[versions.CACHE_NAME]
    return output


def _binding(module: nn.Module) -> Binding | None:
    """The binding of an attention module under `compress`; None outside, and in a copied model."""
    return module.__dict__.get("_fathom_binding")


def _check_model(model: PreTrainedModel, modules: list[Any], layers: list[Any], compressed: list[int]) -> None:
    family = type(model).__name__
    if versions.execution_device(model).type == "meta":
        raise ValueError(f"{family} is on the meta device: load the weights first")
    if any(_binding(module) is not None for module in modules):
        raise ValueError(f"{family} is under compress already: leave that context first")
    if (getattr(model.config, "diffusion", None) or {}).get("name", "none") != "none":
        raise ValueError(f"{family} is a diffusion model: caches evict causally; give its generate() a block_cache")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{family} is an encoder-decoder: caches compress decoder-only models")
    if versions.shares_keys(model):
        raise ValueError(
            f"{family} shares keys and values between layers: its cache cannot be compressed layer by layer"
        )
    if versions.keeps_latents(model):
        raise ValueError(
            f"{family} keeps latents instead of keys and values, a compressed cache already: use it as it is"
        )
    if width := versions.varying_width(model):
        raise ValueError(
            f"{family} has layers of different {width}: caches compress layers of one shape; use the full cache"
        )
    if named := versions.changes_scores(modules):
        raise ValueError(
            f"{family}: attention with {named} is not supported, as caches compute plain softmax attention; use the "
            "full cache"
        )
    if getattr(model.config, "score_channels", 0):
        raise ValueError(
            f"{family} with positions={model.config.positions['name']!r} has its tokens' positions in its keys, which "
            "caches would change with them: use the full cache"
        )
    if several := versions.slots_of_depth(model):
        raise ValueError(
            f"{family} with depth={model.config.depth['name']!r} keeps {several}: caches compress models with one slot "
            "a token and pass; use its own cache"
        )
    if not compressed:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise ValueError(f"{family} has no full-attention layer to compress (its cache layers: {kinds})")
    hooked = {module.layer_idx for module in modules}
    if missing := [layer for layer in compressed if layer % versions.depth(model) not in hooked]:
        raise ValueError(
            f"{family} has no attention module that can be hooked in layer {missing[0]}: its attention does not go "
            "through transformers' AttentionInterface; use the full cache"
        )


def _ropes(
    model: PreTrainedModel, modules: list[Any], compressed: list[int], method: CacheMethod
) -> dict[int, SlotRope]:
    """The rotation of every compressed layer that has one (SmolLM3 and others have layers without positions)."""
    family, remedy = type(model).__name__, method.pre_rope_remedy
    rotary = versions.rotary_module(model)
    if rotary is None:
        raise ValueError(
            f"{type(method).__name__} stores unrotated keys, but {family} has no rotary positions: {remedy}"
        )
    if versions.positions_have_axes(model):
        raise ValueError(
            f"{type(method).__name__} gives stored keys positions of its own, but pictures of {family} have positions "
            f"on several axes (mrope_section): {remedy}"
        )
    kind, depth = versions.rope_type(model), versions.depth(model)
    if not kind:
        return {}
    rope = SlotRope(rotary, kind)
    by_layer = {module.layer_idx: module for module in modules}
    try:
        return {layer: rope for layer in compressed if rotates_half_split(by_layer[layer % depth], rotary, model)}
    except ValueError as error:
        raise ValueError(
            f"{type(method).__name__} stores unrotated keys, but {family} does not rotate in the half-split way "
            f"as its last step ({error}): {remedy}"
        ) from error


def _check_positions(position_ids: Tensor | None, mask: Tensor | None) -> None:
    """Refuse packed documents: positions that start again within a call. One sync, in calls of several tokens."""
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] == 1 or position_ids.is_meta:
        return
    if torch.compiler.is_compiling():
        return
    again = position_ids.diff(dim=-1) < 1
    if mask is not None and mask.ndim == 2 and mask.shape[1] >= position_ids.shape[1]:
        new = mask[:, mask.shape[1] - position_ids.shape[1] :].to(again.device)
        again = again & (new[:, 1:] != 0) & (new[:, :-1] != 0)  # pads stand anywhere
    if bool(again.any()):
        raise ValueError(
            "position_ids start again within a call: compress does not take packed documents, which would see each "
            "other; give each a row of its own, padded on the left, or use the full cache"
        )


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _before(binding: Binding) -> Any:
    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        forward = binding.forward
        if module is forward.entered:  # again: KeyboardInterrupt ended the forward before, and no hook was told
            forward.depth = 0
            binding.close(failed=True)
        if forward.depth == 0:
            kwargs = binding.open(module, args, kwargs)
            forward.entered = module
        forward.depth += 1
        return args, kwargs

    return hook


def _after(binding: Binding) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        forward = binding.forward
        forward.depth = max(0, forward.depth - 1)
        if forward.depth == 0:
            binding.close(failed=output is None)  # PyTorch tells the hook of an error by having no output

    return hook


def _without_rotation(binding: Binding) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cos, sin = kwargs["position_embeddings"]
        forward = binding.forward
        if forward.unturned is None or forward.unturned[0] is not cos:  # the layers of a forward share their tables
            forward.unturned = cos, (torch.ones_like(cos), torch.zeros_like(sin))
        return args, {**kwargs, "position_embeddings": forward.unturned[1]}

    return hook


def _mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor | None:
    """The 2-D padding mask for plain causal layers, whose states are causal anyway; SDPA's mask for other layers."""
    if kwargs.get("mask_function") is causal_mask_function:
        mask = kwargs.get("attention_mask")
        return None if mask is None else mask[:]  # the caller may write to its own and pass it again
    return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **kwargs)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: a state's `attend` for compressed layers, SDPA for the others."""
    binding = _binding(module)
    ours = isinstance(key, CompressedLayer)
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"compress: attention with {name} ({type(module).__name__}) is not supported; use the full cache"
            )
    if not ours and (binding is None or module.layer_idx not in binding.contexts):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            "compress: custom attention masks and packed sequences need the full cache; under torch.compile without a "
            "cache, pass attention_mask, as a trace cannot see that none are packed"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if ours:
        output = key.attend(query, scaling, dropout)
    else:
        assert binding is not None
        output = binding.attend_without_cache(module, query, key, value, attention_mask, scaling, dropout)
    return output.transpose(1, 2), None

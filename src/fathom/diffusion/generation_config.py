"""The options of the sampler that fills masks, and the blocks that they make of an answer."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fathom.diffusion.base import Block, BlockCache, Policy
from fathom.diffusion.schedules import SCHEDULES
from fathom.models.registry import nearest

# Options of transformers' generate() that mean nothing here, and what to use.
ELSEWHERE = {
    "num_beams": "text is not extended token by token, so there are no beams; leave it out",
    "do_sample": "give temperature=0 for the likeliest tokens, or above 0 to sample",
    "max_length": "give max_new_tokens, which block_length divides",
    "past_key_values": "give a block_cache",
    "use_cache": "give a block_cache",
    "streamer": "give on_block, which is called after every block",
}


@dataclasses.dataclass(frozen=True)
class DiffusionGenerationConfig:
    """Options of the sampler that fills masks.

    Attributes:
        max_new_tokens: G, masks after the prompt.
        block_length: of the blocks, which are filled from left to right; must divide G. None: one block.
        steps: S, of all blocks together, at most G; None: G, one token a step.
        temperature: T of the sampling; 0 takes the likeliest token.
        top_k, top_p: sample among the k likeliest tokens, or the fewest with this mass (at temperature T).
        policy: which tokens a step reveals; a method or its name (`fathom methods`).
        schedule: how many tokens a step reveals: "linear", "dream" or "exact" (schedules.py).
        block_cache: which columns a step computes; a method or its name. None, and "none", compute all.
        cfg_scale: w of l = l_u + (w + 1)(l_c − l_u), where l_u is for masks in place of the prompt; 0: none.
        cfg_keep_tokens: tokens of the prompt that stay under guidance.
        suppress_eos: "confidence" reveals EOS last; "logit" never predicts it; None: neither.
        stop_at_eos: a row ends with its first EOS and is padded after it; no block follows once all rows have ended.
        infill: fill the masks within the prompt instead, as one block; max_new_tokens is 0 then.
        mask_token_id, shift, eos_token_id, pad_token_id: None takes the model's own; stock models need a mask token.
        seed: of all noise; a list gives each row its own. Under one seed rows still get different noise.
        return_dict_in_generate: a `DiffusionOutput` instead of the ids alone.

    Raises ValueError for options out of range or that do not fit together.
    """

    max_new_tokens: int = 64
    block_length: int | None = 32
    steps: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    policy: Policy | str = "low_confidence"
    schedule: str = "linear"
    block_cache: BlockCache | str | None = None
    cfg_scale: float = 0.0
    cfg_keep_tokens: Sequence[int] = ()
    suppress_eos: str | None = None
    stop_at_eos: bool = False
    infill: bool = False
    mask_token_id: int | None = None
    shift: bool | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    seed: int | Sequence[int] = 0
    return_dict_in_generate: bool = False

    def __post_init__(self) -> None:
        from fathom.diffusion import BLOCK_CACHES, POLICIES

        whole = ("max_new_tokens", "block_length", "steps", "top_k", "mask_token_id", "pad_token_id")
        check_kinds(self, whole, ("temperature", "top_p", "cfg_scale"))
        caches = {"none": BlockCache, **BLOCK_CACHES}
        for axis, known, kind in (("policy", POLICIES, Policy), ("block_cache", caches, BlockCache)):
            value = getattr(self, axis)
            if not isinstance(value, str | kind) and not (value is None and kind is BlockCache):
                self._refuse(axis, f"give a name, or a method such as {[*known.values()][-1].__name__}()")
            if isinstance(value, str):
                if value not in known:
                    self._refuse(axis, f"no such method{nearest(value, list(known))}; there are {', '.join(known)}")
                object.__setattr__(self, axis, known[value]())
        if self.block_cache is None:
            object.__setattr__(self, "block_cache", BlockCache())
        if self.schedule not in SCHEDULES:
            self._refuse("schedule", f"must be one of {', '.join(SCHEDULES)}")
        if self.infill:
            if self.max_new_tokens:
                self._refuse("max_new_tokens", "infill=True fills masks of the prompt alone; give max_new_tokens=0")
            object.__setattr__(self, "block_length", None)
        elif self.max_new_tokens < 1:
            self._refuse("max_new_tokens", "must be at least 1")
        for name in ("block_length", "steps", "top_k"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                self._refuse(name, "must be at least 1")
        if not self.infill:
            length = self.block_length or self.max_new_tokens
            if self.max_new_tokens % length:
                self._refuse(
                    "max_new_tokens",
                    f"must be a multiple of block_length={length}; set block_length too, or None for one block",
                )
            steps, blocks = self.total_steps, self.max_new_tokens // length
            if steps > self.max_new_tokens:
                self._refuse("steps", f"must be at most max_new_tokens={self.max_new_tokens}: a step reveals a token")
            if steps % blocks:
                self._refuse("steps", f"must be a multiple of the {blocks} blocks (max_new_tokens / block_length)")
        if not 0 <= self.temperature < math.inf:
            self._refuse("temperature", "must be finite and at least 0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            self._refuse("top_p", "must be above 0 and at most 1")
        if not -1 <= self.cfg_scale < math.inf:
            self._refuse("cfg_scale", "must be finite and at least -1")
        if self.suppress_eos not in (None, "confidence", "logit"):
            self._refuse("suppress_eos", "must be 'confidence', 'logit' or None")

    def _refuse(self, name: str, rule: str) -> None:
        raise ValueError(f"{name}={getattr(self, name)!r}: {rule}")

    @property
    def total_steps(self) -> int:
        return self.max_new_tokens if self.steps is None else self.steps

    def blocks(self, prompt: int, masks: int, shift: bool) -> list[Block]:
        """The blocks after a prompt of `prompt` columns. masks: the most masks that a row has to infill."""
        if self.infill:
            return [Block(0, 0, prompt, self.steps or masks, shift)]
        length = self.block_length or self.max_new_tokens
        count = self.max_new_tokens // length
        starts = range(prompt, prompt + self.max_new_tokens, length)
        return [Block(i, a, a + length, self.total_steps // count, shift) for i, a in enumerate(starts)]


def check_kinds(config: Any, whole: Sequence[str], real: Sequence[str]) -> None:
    """Raise ValueError unless these fields of a config, where they are given, are whole or real numbers."""
    for names, kind, said in ((whole, numbers.Integral, "a whole number"), (real, numbers.Real, "a number")):
        for name in names:
            value = getattr(config, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
                raise ValueError(f"{name}={value!r}: must be {said}")


def configured(
    config: Any,
    options: dict[str, Any],
    kind: Any = DiffusionGenerationConfig,
    elsewhere: Mapping[str, str] = MappingProxyType(ELSEWHERE),
) -> Any:
    """A config of class `kind`, overridden by keyword arguments of generate().

    elsewhere: options of other models, and what to give instead. Raises ValueError for these, for unknown options and
    for another kind of config.
    """
    if config is not None and not isinstance(config, kind):
        raise ValueError(f"generation_config of type {type(config).__name__}: this model takes a {kind.__name__}")
    known = [field.name for field in dataclasses.fields(kind)]
    for name, value in options.items():
        if name in elsewhere:
            raise ValueError(f"{name}={value!r} is an option of autoregressive models: {elsewhere[name]}")
        if name not in known:
            raise ValueError(f"{name}={value!r}: no option of {kind.__name__}{nearest(name, known)}")
    return dataclasses.replace(config or kind(), **options)


def aligned(config: DiffusionGenerationConfig, prompt: int, begun: int, size: int) -> list[Block]:
    """The blocks after a prompt of `prompt` columns, whose last block has `begun` tokens (0 if it is whole).

    The first block completes that one, and the last may be short. Each has as many steps as a whole block, but at most
    one for each of its tokens.
    """
    stop, steps = prompt + config.max_new_tokens, config.blocks(prompt, 0, False)[0].steps
    starts = [prompt, *range(prompt - begun + size, stop, size)]
    spans = zip(starts, [*starts[1:], stop], strict=True)
    return [Block(i, a, b, min(steps, b - a), False) for i, (a, b) in enumerate(spans)]


def for_blocks(config: DiffusionGenerationConfig, size: int) -> DiffusionGenerationConfig:
    """The config for a model of block diffusion, with its exact cache."""
    from fathom.diffusion.block import Exact

    if config.infill:
        raise ValueError("infill=True: a block of this model sees no later ones; only masked diffusion fills holes")
    if (config.block_length or config.max_new_tokens) != size:
        raise ValueError(f"block_length={config.block_length!r}: the model fills blocks of {size}; give {size}")
    if type(config.block_cache) not in (BlockCache, Exact):
        raise ValueError(
            f"block_cache={config.block_cache.name!r}: a model of block diffusion keeps earlier blocks exactly; leave "  # type: ignore[union-attr]
            "it out"
        )
    return dataclasses.replace(config, block_cache=Exact())

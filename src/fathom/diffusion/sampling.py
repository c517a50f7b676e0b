"""The loop that fills masks, block by block and step by step, for every policy, schedule and cache.

    canvas = [prompt | mask × G],  nb = G / block_length blocks,  s = steps / nb steps each
    for each block, for each step:
        h      = states of the columns that the cache computes
        l      = h W_outᵀ at hidden tokens of the block;  the mask token has no probability
        x̂      = argmax(l + T · Gumbel noise) in float64;   p = softmax(l) without noise
        reveal the candidates of highest rank (policy), as many as policy and schedule say

The head runs only on hidden tokens that a pass predicts; on a GPU on all tokens of the block where that keeps the shape
of a step, so that it is recorded with its pass. A revealed token never changes. Rows are independent: noise,
histories and counts are each row's own, and padding on the left is neither seen nor counted, so a row of a batch gets
the tokens that it gets alone (up to rounding).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fathom.decoding.graphs import recorder_for, records, unrecordable
from fathom.decoding.switch import say
from fathom.diffusion.base import Block, BlockCache, Policy, View, check_tokens, own_blocks
from fathom.diffusion.generation_config import DiffusionGenerationConfig, aligned, configured, for_blocks
from fathom.diffusion.passes import Passes, sampling_attention
from fathom.diffusion.schedules import SCHEDULES


@dataclasses.dataclass(frozen=True)
class DiffusionOutput:
    """Sampled tokens, with when and how they were revealed.

    Attributes:
        sequences: prompt and answer, [B, P + G].
        revealed: at which step each token was revealed, counted over all blocks; −1: it was given, or is padding.
        confidence: the model's probability of each token when it was revealed; 0 where it was given.
        nfe: forward evaluations by kind of pass, "full" and "block"; guidance counts twice.
        columns: tokens that went through the model, of all rows.
        cache_bytes: the most that the block cache kept.
    """

    sequences: Int[Tensor, "B L"]
    revealed: Int[Tensor, "B L"]
    confidence: Float[Tensor, "B L"]
    nfe: dict[str, int]
    columns: int
    cache_bytes: int


@torch.no_grad()
def generate(
    model: Any,
    inputs: Int[Tensor, "B P"] | None,
    attention_mask: Int[Tensor, "B P"] | None = None,
    generation_config: DiffusionGenerationConfig | None = None,
    *,
    on_block: Callable[[Tensor, int], None] | None = None,
    **options: Any,
) -> Tensor | DiffusionOutput:
    """Token ids with masks filled in, after the prompts or within them, by any bidirectional model: ours, or a stock
    Llama, Qwen2 or Qwen3 model whose config says `is_causal=False`.

    inputs: prompts, padded on the left where `attention_mask` is 0.
    on_block: called after every block with the canvas and the end of its finished part.
    options: fields of the config, which override `generation_config`.

    Raises ValueError, naming the argument, for arguments that do not fit together.
    """
    sampler = Sampler(model, inputs, attention_mask, configured(generation_config, options))
    training = model.training
    model.eval()
    try:
        with sampling_attention(model):
            output = sampler.run(on_block)
    finally:
        model.train(training)
    return output if sampler.config.return_dict_in_generate else output.sequences


class Sampler:
    """One call of `generate`."""

    def __init__(self, model: Any, inputs: Any, attention_mask: Any, config: DiffusionGenerationConfig):
        self.model, self.config = model, config
        check_model(model)
        if not isinstance(inputs, Tensor) or inputs.ndim != 2 or not len(inputs):
            raise ValueError("inputs: give token ids [rows, tokens]; a prompt may have no tokens ([rows, 0])")
        self.mask_id, self.shift = mask_token(model, config)
        self.size = own_blocks(model)
        if self.size is not None:
            config = self.config = for_blocks(config, self.size)
        if attention_mask is None:
            attention_mask = torch.ones_like(inputs)
        if attention_mask.shape != inputs.shape:
            raise ValueError(
                f"attention_mask of shape {list(attention_mask.shape)}: must be that of inputs, {list(inputs.shape)}"
            )
        real = attention_mask.bool()
        check_tokens(inputs, real, model.config.vocab_size)
        ended = (real[:, :-1] & ~real[:, 1:]).any(1)
        if ended.any():
            raise ValueError(
                f"attention_mask: row {int(ended.nonzero()[0])} is padded on the right; pad on the left, where the "
                "answer does not follow"
            )
        holes = (inputs == self.mask_id) & real
        if config.infill and not holes.any():
            raise ValueError(f"infill=True: no row holds the mask token {self.mask_id}")
        if not config.infill and holes.any():
            raise ValueError(
                f"inputs: row {int(holes.any(1).nonzero()[0])} holds the mask token {self.mask_id}; pass infill=True "
                "to have it filled"
            )
        if self.shift:
            before = (real & (inputs != self.mask_id)).cumsum(1) == 0  # the first given token
            alone = ~real.any(1) | (real & before).any(1)
            if alone.any():
                raise ValueError(
                    f"inputs: row {int(alone.nonzero()[0])} has no first token, which predicts the next one of a "
                    "shifted model; begin prompts with the BOS token"
                )
        masks = inputs.new_full((len(inputs), config.max_new_tokens), self.mask_id)
        self.prompt = inputs.shape[1]
        self.canvas = torch.cat([inputs.masked_fill(~real, 0), masks], dim=1)
        self.padding = (inputs, real)
        self.real = torch.cat([real, torch.ones_like(masks, dtype=torch.bool)], dim=1)
        self.given = self.real & (self.canvas != self.mask_id)
        self.blocks = config.blocks(self.prompt, int(holes.sum(1).max()) if holes.numel() else 0, self.shift)
        if self.size is not None:
            self.blocks = self.aligned(real)
        for block in self.blocks:
            config.block_cache.check(block)  # type: ignore[union-attr]
        self.check_policy()
        self.check_positions()
        self.eos = end_tokens(model, config)
        self.ends = torch.tensor(self.eos, dtype=inputs.dtype, device=inputs.device)
        self.generators = [
            torch.Generator(device=inputs.device).manual_seed(seed) for seed in seeds(config.seed, len(inputs))
        ]

    def aligned(self, real: Bool[Tensor, "B P"]) -> list[Block]:
        """The blocks of a model of block diffusion, whose borders are counted from the first token of a row."""
        assert self.size is not None
        begun = sorted({length % self.size for length in real.sum(1).tolist()})
        if len(begun) > 1:
            raise ValueError(
                f"inputs: rows end at {begun} tokens of a block of {self.size}; give rows whose lengths differ by "
                "whole blocks, or one at a time"
            )
        return aligned(self.config, self.prompt, begun[0], self.size)

    def check_policy(self) -> None:
        policy, cache = self.config.policy, self.config.block_cache
        assert isinstance(policy, Policy) and isinstance(cache, BlockCache)
        whole = cache.whole_block and not any(cache.first_reveal(block, 0) for block in self.blocks)
        if policy.whole_block and not whole:
            remedy = "use first_step='extra_query'" if cache.whole_block else "use another cache"
            raise ValueError(
                f"policy={policy.name!r} reads the states of the whole block, which "  # type: ignore[attr-defined]
                f"block_cache={cache.name!r} does not compute; {remedy}"  # type: ignore[attr-defined]
            )

    def check_positions(self) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", 0)
        learned = getattr(self.model.config, "positions", None)
        if isinstance(learned, dict) and learned.get("name") == "learned" and self.canvas.shape[1] > limit:
            raise ValueError(
                f"max_new_tokens={self.config.max_new_tokens}: with the prompt's {self.prompt} tokens that is more "
                f"than the model's {limit} learned positions"
            )

    def run(self, on_block: Callable[[Tensor, int], None] | None) -> DiffusionOutput:
        """Token ids, or a `DiffusionOutput`, with one answer for every row."""
        config, canvas = self.config, self.canvas
        guided = config.cfg_scale != 0
        real = torch.cat([self.real, self.real]) if guided else self.real
        if guided:
            keep = torch.zeros_like(self.given)
            for token in config.cfg_keep_tokens:
                keep |= canvas == token
            self.dropped = self.given & ~keep
        passes = Passes(self.model, real, self.recorder())
        passes.times = 2 if guided else 1
        try:
            return self.fill(passes, on_block)
        finally:
            passes.release()

    def fill(self, passes: Passes, on_block: Callable[[Tensor, int], None] | None) -> DiffusionOutput:
        """Fill all blocks, one after the other."""
        config, canvas = self.config, self.canvas
        cache = config.block_cache.new_state(passes)  # type: ignore[union-attr]
        memory = config.policy.new_memory(len(canvas))  # type: ignore[union-attr]
        revealed = torch.full_like(canvas, -1)
        confidence = torch.zeros(canvas.shape, dtype=torch.float32, device=canvas.device)
        bytes_kept = 0
        for block in self.blocks:
            cache.begin(block)
            inside = slice(block.start, block.stop)
            first = self.hidden(canvas)[:, inside].sum(1)
            for step in range(block.steps):
                hidden = self.hidden(canvas)
                now = hidden[:, inside].sum(1)
                if not now.any():
                    break
                last = step == block.steps - 1
                quota = now if last else SCHEDULES[config.schedule](now, first, step, block.steps).minimum(now)
                new, probability = self.step(canvas, hidden, block, step, quota, cache, memory)
                at = new >= 0
                canvas[:, inside] = torch.where(at, new, canvas[:, inside])
                revealed[:, inside] = torch.where(at, block.index * block.steps + step, revealed[:, inside])
                confidence[:, inside] = torch.where(at, probability.float(), confidence[:, inside])
            bytes_kept = max(bytes_kept, cache.nbytes())
            if on_block is not None:
                on_block(canvas, block.stop)
            if config.stop_at_eos and self.ended(canvas[:, : block.stop]).any(1).all():
                break
        if config.stop_at_eos:
            after = self.ended(canvas).cumsum(1) - self.ended(canvas).int() > 0
            pad = config.pad_token_id if config.pad_token_id is not None else self.model.config.pad_token_id
            canvas = canvas.masked_fill(after, self.eos[0] if pad is None else pad)
            revealed, confidence = revealed.masked_fill(after, -1), confidence.masked_fill(after, 0)
        inputs, kept = self.padding
        canvas[:, : self.prompt] = torch.where(kept, canvas[:, : self.prompt], inputs)
        return DiffusionOutput(canvas, revealed, confidence, dict(passes.counts), passes.tokens, bytes_kept)

    def recorder(self) -> Any:
        """The recorder of passes of fixed shape; None if the device has none or the model cannot be recorded."""
        recorder = recorder_for(self.canvas.device)
        reason = "" if recorder is None else unrecordable(self.model)
        if reason:
            say(f"passes of the sampler are not recorded: {reason}")
        return None if reason else recorder

    def hidden(self, canvas: Tensor) -> Bool[Tensor, "B L"]:
        return (canvas == self.mask_id) & self.real

    def ended(self, canvas: Tensor) -> Bool[Tensor, "B m"]:
        """The mask of EOS tokens in the answers."""
        if not self.eos:
            raise ValueError("stop_at_eos=True: the model names no EOS token; give eos_token_id")
        ends = torch.isin(canvas, self.ends)
        return ends & ~self.given[:, : canvas.shape[1]] & self.real[:, : canvas.shape[1]]

    def step(
        self, canvas: Tensor, hidden: Tensor, block: Block, step: int, quota: Tensor, cache: Any, memory: Any
    ) -> tuple[Int[Tensor, "B n"], Float[Tensor, "B n"]]:
        """The tokens that this step reveals (−1 elsewhere), and their probabilities."""
        config, policy, rows = self.config, self.config.policy, len(canvas)
        assert isinstance(policy, Policy)
        guided = config.cfg_scale != 0
        if guided:
            free = canvas.masked_fill(self.dropped, self.mask_id)
            states, columns = cache.states(torch.cat([canvas, free]), hidden.repeat(2, 1), step, quota.repeat(2))
        else:
            states, columns = cache.states(canvas, hidden, step, quota)
        inside = hidden[:, block.start : block.stop]
        first = torch.arange(inside.shape[1], device=canvas.device) == 0
        if config.block_cache.first_reveal(block, step):  # type: ignore[union-attr]  # the first token, and it alone
            inside = inside & first
            quota = inside.sum(1)
        of_step = policy.of_step(block, step, canvas.device)
        place = self.fixed_place(block, columns)
        if place is not None:
            if place < 0:  # nothing predicts the first token
                states, inside, place = F.pad(states, (0, 0, 1, 0)), inside & ~first, 0
            inputs = [states[:, place : place + inside.shape[1]], inside, quota]
            inputs += [] if of_step is None else [of_step]
            if step == block.steps - 1:
                return self.reveal(memory, *inputs, last=True)
            return cache.passes.replayed("reveal", functools.partial(self.reveal, memory), *inputs)
        # guidance computes the same columns of both halves
        at = columns.places(block.predictors(canvas.device), canvas.shape[1])[:rows]
        candidates = inside & (at >= 0)

        def states_of(rows_at: Tensor, index: Tensor) -> Tensor:
            """The logits of some states, by row and place."""
            logits = self.head(states[rows_at, index])
            if guided:
                free = self.head(states[rows + rows_at, index])
                logits = free + (config.cfg_scale + 1) * (logits - free)
            return self.without_forbidden(logits)

        row, column = candidates.nonzero(as_tuple=True)
        logits = states_of(row, at[row, column])
        log_probs = logits.log_softmax(-1)
        found = self.choose(logits, row)
        view = View(
            candidates=candidates,
            log_probs=log_probs,
            tokens=torch.zeros_like(at),
            probability=log_probs.new_zeros(at.shape),
            hidden=states[torch.arange(rows, device=at.device)[:, None], at] if policy.whole_block else None,
            others=None,
            step=step,
            steps=block.steps,
            generators=self.generators,
            of_step=of_step,
        )
        view.tokens[row, column] = found
        view.probability[row, column] = log_probs.gather(1, found[:, None])[:, 0].exp()
        if policy.beyond_block:
            outside = hidden.clone()
            outside[:, block.start : block.stop] = False
            predictor = (torch.arange(hidden.shape[1], device=at.device) - int(self.shift)).clamp(min=0)
            other = columns.places(predictor, canvas.shape[1])[:rows]
            where, there = (outside & (other >= 0)).nonzero(as_tuple=True)
            most = [
                states_of(r, other[r, c]).log_softmax(-1).amax(-1).exp()  # not all of [M, V] at once
                for r, c in zip(where.split(1024), there.split(1024), strict=True)
            ]
            view.others = torch.cat(most), where
        return self.decide(view, quota, memory)

    def fixed_place(self, block: Block, columns: Any) -> int | None:
        """The index among the columns of a pass of the states that predict the block, in order; −1 where they lack the
        first token's, as after the official first step of shifted models. None where they do not predict the block, and
        where a step has no fixed shape."""
        config, start = self.config, block.start - int(block.shift)
        fixed = config.policy.fixed_shape and config.temperature == 0  # type: ignore[union-attr]
        if not fixed or columns.start is None or start < 0 or not records(self.canvas.device):
            return None
        place = start - columns.start
        return place if -int(block.shift) <= place <= columns.index.shape[1] - (block.stop - block.start) else None

    def reveal(
        self, memory: Any, states: Float[Tensor, "R n d"], hidden: Bool[Tensor, "B n"], quota: Int[Tensor, " B"],
        of_step: Tensor | None = None, *, last: bool = False,
    ) -> tuple[Int[Tensor, "B n"], Float[Tensor, "B n"]]:  # fmt: skip
        """The tokens that a step reveals, −1 elsewhere, and their probabilities, given the states that predict every
        token of the block. It reads no value, and all shapes are those of its arguments."""
        rows = len(hidden)
        logits = self.head(states[:rows])
        if self.config.cfg_scale != 0:
            free = self.head(states[rows:])
            logits = free + (self.config.cfg_scale + 1) * (logits - free)
        logits = self.without_forbidden(logits.flatten(0, 1))
        log_probs = logits.log_softmax(-1)
        found = logits.argmax(-1)
        probability = log_probs.gather(1, found[:, None]).exp()
        view = View(
            candidates=hidden,
            log_probs=log_probs,
            tokens=found.view_as(hidden).masked_fill(~hidden, 0),
            probability=probability.view_as(hidden).masked_fill(~hidden, 0),
            hidden=states[:rows],
            others=None,
            step=int(last),
            steps=2,
            generators=self.generators,
            of_step=of_step,
            whole=True,
        )
        return self.decide(view, quota, memory)

    def decide(
        self, view: View, quota: Int[Tensor, " B"], memory: Any
    ) -> tuple[Int[Tensor, "B n"], Float[Tensor, "B n"]]:
        """The predicted tokens to reveal (−1 elsewhere), and the probabilities of all."""
        config, policy, candidates = self.config, self.config.policy, view.candidates
        assert isinstance(policy, Policy)
        probability = view.probability
        held = None
        if config.suppress_eos == "confidence" and self.eos:
            held = candidates & torch.isin(view.tokens, self.ends)
            view.probability = probability.masked_fill(held, 0)
        rank = policy.rank(view, memory)
        if held is not None:
            rank = rank.masked_fill(held, torch.finfo(rank.dtype).min)
        rank = rank.masked_fill(~candidates, -torch.inf)
        order = rank.argsort(dim=1, descending=True, stable=True)
        count = policy.count(view, order, quota).minimum(candidates.sum(1))
        chosen = torch.zeros_like(candidates)
        chosen.scatter_(1, order, torch.arange(order.shape[1], device=order.device) < count[:, None])
        return view.tokens.masked_fill(~chosen, -1), probability

    def head(self, states: Float[Tensor, "N d"]) -> Float[Tensor, "N V"]:
        """Logits in fp32 or wider."""
        logits = self.model.get_output_embeddings()(states)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def without_forbidden(self, logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        """The logits with −∞ for the mask token, and for EOS where it is suppressed. They are changed in place."""
        for token in (self.mask_id, *(self.eos if self.config.suppress_eos == "logit" else ())):
            logits[:, token].fill_(-torch.inf)  # an assignment makes a tensor of the number, which no recording keeps
        return logits

    def choose(self, logits: Float[Tensor, "N V"], row: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
        """x̂ of the candidates. Noise is drawn row by row, in the order of their hidden tokens."""
        config = self.config
        if config.temperature == 0:
            return logits.argmax(-1)
        logits = truncate(logits.double() / config.temperature, config.top_k, config.top_p)
        counts = torch.bincount(row, minlength=len(self.generators)).tolist()
        noise = [
            torch.rand(count, logits.shape[1], dtype=torch.float64, device=logits.device, generator=generator)
            for count, generator in zip(counts, self.generators, strict=True)
        ]
        return (logits - (-torch.cat(noise).clamp(min=1e-300).log()).log()).argmax(-1)


def truncate(logits: Float[Tensor, "N V"], top_k: int | None, top_p: float | None) -> Float[Tensor, "N V"]:
    """The logits, −∞ outside the k likeliest tokens, or the fewest whose mass is at least top_p. Ties: the lower id."""
    if top_k is None and top_p is None:
        return logits
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k is not None:
        drop[:, top_k:] = True
    if top_p is not None and top_p < 1:
        probs = ordered.masked_fill(drop, -torch.inf).softmax(-1)
        drop |= probs.cumsum(-1) - probs >= top_p
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, index, drop), -torch.inf)


def seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """One seed a row. Raises ValueError for a list of another length, and for what is no whole number."""
    if isinstance(seed, str) or not all(isinstance(one, int) for one in ([seed] if isinstance(seed, int) else seed)):
        raise ValueError(f"seed={seed!r}: give a whole number, or one a row")
    if isinstance(seed, int):
        return [seed + 1_000_003 * row for row in range(rows)]
    if len(seed) != rows:
        raise ValueError(f"seed of {len(seed)} rows: inputs have {rows}; give one a row, or one number")
    return list(seed)


def mask_token(model: Any, config: DiffusionGenerationConfig) -> tuple[int, bool]:
    """The mask token and whether predictions are shifted. Raises ValueError for a token that cannot stand for masks."""
    own = getattr(model.config, "diffusion", None)
    own = own if isinstance(own, dict) else {}
    token = config.mask_token_id
    for found in (own.get("mask_token_id"), getattr(model.config, "mask_token_id", None)):
        token = found if token is None else token
    shift = config.shift if config.shift is not None else own.get("shift", getattr(model.config, "shift", False))
    size = model.config.vocab_size
    used = config.eos_token_id is not None or config.suppress_eos == "logit"  # a model's own may lie outside, unused
    asked = {
        "eos_token_id": end_tokens(model, config) if used else [],
        "pad_token_id": [] if config.pad_token_id is None else [config.pad_token_id],
        "cfg_keep_tokens": config.cfg_keep_tokens,
    }
    for name, some in asked.items():
        for one in some:
            if not 0 <= one < size:
                raise ValueError(f"{name}={one}: must be at least 0 and below vocab_size={size}")
    if token is None:
        raise ValueError(f"mask_token_id=None: {type(model).__name__} names no mask token; give its id, below {size}")
    if not 0 <= token < size:
        raise ValueError(f"mask_token_id={token}: must be below vocab_size={size}")
    if token in end_tokens(model, config) or token == getattr(model.config, "bos_token_id", None):
        raise ValueError(f"mask_token_id={token} is a real token (BOS or EOS): give the one that stands for masks")
    return token, bool(shift)


def end_tokens(model: Any, config: DiffusionGenerationConfig) -> list[int]:
    """Tokens that end a text: the generation config's, else the model's; none if neither says."""
    found = config.eos_token_id if config.eos_token_id is not None else getattr(model.config, "eos_token_id", None)
    return [] if found is None else list(found) if isinstance(found, list | tuple) else [found]


def check_model(model: Any) -> None:
    """Raise ValueError for a model that the sampler cannot run."""
    family, config = type(model).__name__, model.config
    if getattr(config, "is_causal", True):
        raise ValueError(
            f"{family}: config.is_causal=True, so tokens do not see later ones; set it to False for a model that was "
            "trained so"
        )
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        raise ValueError(f"{family}: layer_types={config.layer_types}: only layers of full attention are sampled")
    if any(module.__dict__.get("_fathom_binding") is not None for module in model.modules()):
        raise ValueError(f"{family} is under compress, whose caches evict causally; leave it, use block_cache")

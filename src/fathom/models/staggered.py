"""Greedy decoding of a batch whose rows stop at different steps, without waiting: a turn runs one slot of every row.

`generate()` runs a batch token by token, so each token takes as many forwards as its slowest row. Here a row that has
finished its token goes on with the next one while others still think: in a turn, row b runs slot (t_b, k_b). A turn has
the cost of one forward, none of it on rows that wait, and nothing is read back from the device on the way.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fathom.models.causal_lm import FathomForCausalLM
from fathom.models.decoder import Stack
from fathom.models.steps.cache import FOREVER
from fathom.models.steps.stack import mask_of
from fathom.ops.token_blocks import NOWHERE, sees

LOOK_EVERY = 16  # turns after which the loop asks whether all rows have finished


def write_column(key: Tensor, value: Tensor, earlier: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor, None]:
    """Puts one new slot of every row into the buffers, which attention reads."""
    keys, values, column = earlier
    keys[:, :, column : column + 1], values[:, :, column : column + 1] = key, value
    return keys, values, None


@torch.no_grad()
def generate_staggered(
    model: FathomForCausalLM,
    input_ids: Int[Tensor, "B T"],
    max_new_tokens: int,
    attention_mask: Int[Tensor, "B T"] | None = None,
) -> Int[Tensor, "B new"]:
    """The `max_new_tokens` greedy tokens of every row (an end of text does not stop it): those of `generate()`.

    Prompts of different lengths are padded on the left. Raises ValueError for a depth method without turns of its own
    (`adaptive_latent_cot` and `adaponderlm` with their routers and gates have them), and under FlashAttention, which
    reads no mask of slots.
    """
    depth, vocabulary = model.depth, model.vocabulary()
    if "flash" in model.config._attn_implementation:  # type: ignore[operator]
        raise ValueError(
            f"attn_implementation={model.config._attn_implementation!r}: rows that take turns need a mask of slots, "
            "which it does not read; call set_attn_implementation('sdpa')"
        )
    if not depth.takes_turns:
        raise ValueError(f"depth={depth.name!r} with these options takes no turns: use generate()")
    out = model(input_ids, attention_mask=attention_mask, use_cache=True, logits_to_keep=1)
    rows, prompt, device = len(input_ids), input_ids.shape[1], input_ids.device
    layers: list[Any] = (out.cache if hasattr(out, "cache") else out.past_key_values).layers
    held, most = layers[0], max_new_tokens * depth.slots
    buffers = [tuple(_room(x, most) for x in (layer.keys, layer.values)) for layer in layers]
    first, last = (
        torch.tensor([x for x, n in zip(ends, held.sizes, strict=True) for _ in range(n)], device=device)
        for ends in zip(*held.segments, strict=True)
    )
    token, step, until = (_columns(x, rows, most) for x in (held.token, first, last))
    padding = 0 if attention_mask is None else (attention_mask == 0).sum(1)

    new = torch.zeros(rows, max_new_tokens + 1, dtype=torch.long, device=device)  # the last column takes what is over
    new[:, :1] = current = out.logits.argmax(-1)
    number, k = torch.full((rows,), prompt, device=device), torch.zeros(rows, dtype=torch.long, device=device)
    done = torch.ones_like(number)
    embedded = model.model.embed(current)
    inputs, carry = depth.first_turn(embedded)
    for turn in range((max_new_tokens - 1) * depth.slots):
        column = held.token.shape[1] + turn
        token[:, column], step[:, column], until[:, column] = number, k, FOREVER
        visible = sees(number[:, None], token) & ((step <= k[:, None]) & (k[:, None] <= until))[:, None]
        positions = (number - padding)[:, None]
        stack = Stack(
            model.model,
            positions,
            model.model.positions.tables(inputs, positions),
            mask_of(visible, model.config, inputs.dtype),
            read=write_column,
            earlier=[(*pair, column) for pair in buffers],
            slot_ids=torch.zeros_like(positions),
        )
        goes_on, following, carry, hidden_states = depth.take_turn(stack(inputs), k, carry, vocabulary)
        if depth.replaces:
            until[:, column] = torch.where(goes_on, k, FOREVER)
        current = model.lm_head(hidden_states).argmax(-1)
        ended = ~goes_on
        new.scatter_(1, torch.where(ended, done.clamp(max=max_new_tokens), max_new_tokens)[:, None], current)
        done = done + ended
        number = torch.where(done < max_new_tokens, number + ended, number)  # a row that is done stays at its last
        k = torch.where(ended, 0, k + 1)
        started, fresh = depth.first_turn(model.model.embed(current))
        inputs = torch.where(ended[:, None, None], started, following)
        carry = tuple(
            torch.where(ended.view(-1, *(1,) * (b.ndim - 1)), a, b) for a, b in zip(fresh, carry, strict=True)
        )
        if turn % LOOK_EVERY == 0 and bool((done >= max_new_tokens).all()):
            break
    return new[:, :max_new_tokens]


def _room(x: Tensor, columns: int) -> Tensor:
    """Keys or values with room for more slots."""
    return torch.cat((x, x.new_zeros(*x.shape[:2], columns, x.shape[3])), dim=2)


def _columns(x: Tensor, rows: int, columns: int) -> Tensor:
    """What is known of every slot, one row of it a row of the batch; new ones are nowhere."""
    return torch.cat((x.expand(rows, -1), x.new_full((rows, columns), NOWHERE)), dim=1)

"""RoPE++ (arXiv 2512.07525): beside every rotary head one that reads the imaginary part of the same product.

    z = Σ_n q_n · conj(k_n) · e^{iω_n(t−s)}          q_n, k_n: the plane n of a head as a complex number
    A_re = Re z = (R_t q) · (R_s k)                  ordinary attention
    A_im = Im z = (R_t J q) · (R_s k)                J: −π/2 in every plane, [a, b] → [b, −a]

The two are separate heads, with a softmax each, in the order q⁰_re, q⁰_im, q¹_re, q¹_im, …: so to repeat every
key/value head for twice as many heads in a row is the right pairing. J commutes with R_t, so the imaginary query is the
rotated one turned back by a quarter. Keys, values and the cache are those of ordinary attention.

Equal cache (EC) and equal heads (EH) are head counts: EC is this method on a config, with twice the heads over the same
cache; EH is `equal_heads` of that config, with as many heads over half the cache. (The paper prints −Im for the other
order of q and k: similar q and k have a positive imaginary score where t > s.)
"""

from __future__ import annotations

import copy
import dataclasses

import torch

from fathom.models.configuration import FAMILIES, FathomConfig
from fathom.models.method import check_choice
from fathom.models.registry import register
from fathom.ops.rotary import quarter_turn
from fathom.positions.rotary import Rotary


@register("positions", "rope_pp")
class RopePP(Rotary):
    """Rotary positions with twice the query heads: beside each, the same head turned back by a quarter."""

    summary = "Beside every rotary head, a head that reads the imaginary part of the same query and key."
    equation = "A_re = Re Σ q k̄ e^{iω(t−s)},  A_im = Im Σ q k̄ e^{iω(t−s)} = (R_t J q)·(R_s k),  J = −π/2 a plane"
    paper = "2512.07525"
    variants = ({}, {"mode": "imagh", "imag_passthrough": "zero"})

    @dataclasses.dataclass(frozen=True)
    class Options:
        """The method, and the controls that the authors' code has.

        mode: "imag" is the method: 2H heads, real and imaginary in turn. The controls leave H heads and span what plain
            RoPE spans: "imagh" turns the second half of them, "imagx" every other one (the odd), "imago" all.
        imag_passthrough: channels of the imaginary head that partial rotary does not turn: "keep" (the query's) or
            "zero".
        """

        mode: str = "imag"
        imag_passthrough: str = "keep"

        def __post_init__(self):
            check_choice("rope_pp", "mode", self.mode, ("imag", "imagh", "imagx", "imago"))
            check_choice("rope_pp", "imag_passthrough", self.imag_passthrough, ("keep", "zero"))

    @classmethod
    def heads(cls, options):
        return 2 if options.mode == "imag" else 1

    @staticmethod
    def expand(options, tables, query, key):
        width, rest = tables[0].shape[-1], options.imag_passthrough
        if options.mode == "imag":
            return torch.stack((query, quarter_turn(query, width, rest)), dim=2).flatten(1, 2), key
        if options.mode == "imago":
            return quarter_turn(query, width, rest), key
        if options.mode == "imagh":
            half = query.shape[1] - query.shape[1] // 2
            return torch.cat((query[:, :half], quarter_turn(query[:, half:], width, rest)), dim=1), key
        pairs = query.unflatten(1, (-1, 2))
        return torch.stack((pairs[:, :, 0], quarter_turn(pairs[:, :, 1], width, rest)), dim=2).flatten(1, 2), key

    @classmethod
    def read_stock(cls, state, config, options):
        """The checkpoint's tensors with zero columns of `o_proj` for the imaginary heads: these write nothing at first,
        and the logits are the checkpoint's."""
        if options.mode != "imag":
            return state
        state = dict(state)
        for name in [name for name in state if name.endswith(".self_attn.o_proj.weight")]:
            real = state[name].unflatten(1, (config.num_attention_heads, 1, config.head_dim))
            state[name] = torch.cat((real, torch.zeros_like(real)), dim=2).flatten(1)
        return state

    @classmethod
    def unsupported(cls, config, options):
        if FAMILIES[config.backbone]["positions"] == "learned":
            rotary = [name for name, family in FAMILIES.items() if family["positions"] == "rotary"]
            return (
                f"backbone={config.backbone!r} has learned positions, and no rotary heads for imaginary ones to stand "
                f"beside; use a rotary family ({', '.join(rotary)}), whose other fields can be given"
            )
        if options.mode in ("imagh", "imagx") and config.num_attention_heads % 2:
            return (
                f"num_attention_heads={config.num_attention_heads} with mode={options.mode!r}: half of the heads are "
                "imaginary; use an even number"
            )
        return super().unsupported(config, options)


def equal_heads(config: FathomConfig) -> FathomConfig:
    """The config with RoPE++ as equal heads (EH): half the projected query and key/value heads, as wide as before.
    Attention then sees as many heads as without RoPE++, over half the cache.

    Raises ValueError where a number of heads is odd: a single key/value head has no half.
    """
    for field in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, field)
        if count % 2:
            raise ValueError(
                f"{field}={count}: equal heads project half of the heads, so the number must be even; use an even one, "
                "or equal cache (positions='rope_pp' on this config)"
            )
    fields = copy.deepcopy(config.to_dict())
    fields.pop("fathom_version", None)
    changes = {
        "num_attention_heads": config.num_attention_heads // 2,
        "num_key_value_heads": config.num_key_value_heads // 2,
        "positions": {"name": "rope_pp"} if config.positions["name"] != "rope_pp" else config.positions,
    }
    return FathomConfig.from_dict({**fields, **changes})

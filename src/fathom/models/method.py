"""Base of all methods of config sections: a name, options that check themselves, and a closed-form cost."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

if TYPE_CHECKING:
    from fathom.models.configuration import FathomConfig


def check_range(method: str, option: str, value: int, low: int, high: int | None = None) -> None:
    """Raise ValueError unless low ≤ value ≤ high, naming the method, the option, the value and the range."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{method} option {option}={value!r}: must be an integer of {bound}")


def check_number(method: str, option: str, value: float, low: float, high: float = math.inf, remedy: str = "") -> None:
    """Raise ValueError unless low ≤ value < high and finite (≤ high where `remedy` is empty and high is finite)."""
    below = value < high if remedy or high == math.inf else value <= high
    if not (low <= value and below and math.isfinite(value)):
        bound = f"finite and at least {low:g}" + (
            "" if high == math.inf else f" and {'below' if remedy else 'at most'} {high:g}"
        )
        raise ValueError(f"{method} option {option}={value!r}: must be {bound}{remedy and '; ' + remedy}")


def check_choice(method: str, option: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{method} option {option}={value!r}: must be one of {', '.join(map(repr, choices))}")


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """For methods without options."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """The cost of one token at inference, for `fathom.cost`. FLOPs count a multiply-add as 2.

    Attributes:
        passes: forwards of the layer stack (each with its own keys and values).
        slots: slots of the sequence that a token takes in every pass, with keys and values each.
        sweeps: number of forwards of the stack for each number of slots a token (a mean, where it is drawn); None:
            `slots` slots in each of `passes` forwards.
        keys: pairs of a token's slot and a slot of one earlier token (or its own) that it reads; None: computed from
            `forwards`, where all slots of a forward read each other.
        no_gradient: the part of these counts that has no backward pass; None: everything has one.
        checkpointed: the backward pass runs every other forward of the stack again.
        parallel: counts of training and of a parallel prefill (except one that sweeps until thoughts have settled), if
            these cost more than decoding token by token; None if they do not.
        final_norms: applications of learned positions and the final norm; None is one a pass.
        heads: evaluations of the output head, 2·d·V each.
        matmul: further matrix-product FLOPs per token.
        last_matmul: the part of a feed-forward network's `matmul` that its last products take, which activation
            checkpointing does not compute again.
        elementwise: further elementwise FLOPs per token, by the rule in cost/flops.py.
        recomputed: matmul FLOPs per token that the training backward pass computes again.
        recomputed_outputs: layers whose last product activation checkpointing computes again because the gradient of
            the topology's `write` reads it (plain addition does not).
        mixing: FLOPs per token of a cross-layer method's scores, projections and weighted sums alone, counted as in the
            methods' papers: 2 for a product and its addition.
        traffic: tensor elements per token that a cross-layer method reads from and writes to memory, every operand once
            (the least that a fused kernel can move).
        parameters: parameters that the method adds to the model.
        idle: how many of these parameters a token does not use (experts that the router did not choose).
        biased: a bias is added to every attention score.
    """

    passes: int = 1
    slots: float = 1
    sweeps: dict[float, float] | None = None
    keys: float | None = None
    no_gradient: Counts | None = None
    checkpointed: bool = False
    parallel: Counts | None = None
    final_norms: int | None = None
    heads: float = 1
    matmul: float = 0
    last_matmul: float = 0
    elementwise: float = 0
    recomputed: float = 0
    recomputed_outputs: int = 0
    mixing: int = 0
    traffic: int = 0
    parameters: int = 0
    idle: int = 0
    biased: bool = False

    @property
    def forwards(self) -> dict[float, float]:
        """The number of forwards of the stack for each number of slots a token."""
        return {self.slots: self.passes} if self.sweeps is None else self.sweeps


class Method(nn.Module):
    """Base of the methods of all sections: a name, a paper, options, and a closed-form cost."""

    name: ClassVar[str]
    registry: ClassVar[str]
    wing: ClassVar[str] = "depth"
    paper: ClassVar[str] = ""  # arXiv id, or "" for a baseline without one
    summary: ClassVar[str]  # one line for `fathom methods`, which reads the sources: write literals
    equation: ClassVar[str]  # the method in one line
    Options: ClassVar[type] = NoOptions
    variants: ClassVar[tuple[dict[str, Any], ...]] = ({},)  # option sets that the invariants suite runs
    identity: ClassVar[dict[str, Any] | None] = None  # options under which the model is vanilla, if any

    def __init__(self, config: FathomConfig, options: Any):
        super().__init__()
        self.options = options

    @classmethod
    def unsupported(cls, config: FathomConfig, options: Any) -> str | None:
        """Why this method cannot run with this config, or None if it can."""
        return None

    @classmethod
    def read_stock(cls, state: dict[str, Tensor], config: FathomConfig, options: Any) -> dict[str, Tensor]:
        """The tensors of a stock checkpoint, in the decoder's names, converted for this method."""
        return state

    @classmethod
    def counts(cls, config: FathomConfig, options: Any) -> Counts:
        """The closed-form cost of one token at inference. Mixers and topologies leave `passes` and `heads` at 1 and
        count their work of all passes.
        """
        return Counts()

    def initialize_parameters(self) -> None:
        """Fill the parameters that this module owns itself with their initial values; the modules inside it have this
        hook too, or (Linear, Embedding, norms) follow the model's rule. Use the functions of
        `transformers.initialization`: they leave alone what a checkpoint has filled. Values given in `__init__` are
        lost where a checkpoint is loaded, which makes the modules on the meta device."""
        own = [name for name, parameter in self._parameters.items() if parameter is not None]
        if own:
            raise TypeError(
                f"{self.registry} method {self.name!r} has parameters of its own ({', '.join(own)}) and no "
                "initialize_parameters() that fills them"
            )

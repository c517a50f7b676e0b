"""The seams of the `depth` wing: what a depth method, a cross-layer mixer and a residual topology must provide.

A method is one file in this folder: a frozen `Options` dataclass that validates itself, and one class registered by
name. Importing `fathom.depth` imports every file here, so a new file is all it takes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

if TYPE_CHECKING:
    from fathom.models.configuration import FathomConfig
    from fathom.models.decoder import Decoder, Stack
    from fathom.models.vocabulary import Vocabulary


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


@torch.compiler.disable  # a number, by which the graph around it is chosen
def draw_for_all_ranks(low: int, high: int, device: torch.device) -> int:
    """Uniform on low … high; rank 0's draw counts for all ranks, as they must run the same collectives."""
    drawn = torch.randint(low, high + 1, (1,))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        drawn = drawn.to(device)
        torch.distributed.broadcast(drawn, src=0)
    return int(drawn.item())


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """For methods without options."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """What one token costs at inference, for `fathom.cost`. FLOPs count a multiply-add as 2.

    Attributes:
        passes: forwards of the layer stack (each with its own keys and values).
        slots: slots of the sequence that a token takes in every pass, with keys and values each.
        sweeps: how many forwards of the stack run (a mean, where it is drawn) by slots a token, where they differ; None
            is `slots` in each of `passes`.
        keys: slots of one earlier token, or its own, that all slots of a token read together; None follows from
            `forwards`, where the slots of a forward read each other.
        no_gradient: the part of these counts that has no backward pass; None: all has.
        checkpointed: the backward pass runs every other forward of the stack again.
        parallel: counts where many tokens run at once (training; a parallel prefill, but for one that sweeps until its
            thoughts have settled) if that costs more than decoding them one by one; None if it does not.
        final_norms: applications of learned positions and the final norm; None is one a pass.
        heads: evaluations of the output head, 2·d·V each.
        matmul: further matrix-product FLOPs per token.
        elementwise: further elementwise FLOPs per token, by the rule in cost/flops.py.
        recomputed: matmul FLOPs per token that the training backward pass computes again.
        recomputed_outputs: layers whose last product activation checkpointing computes again because the gradient of
            the topology's `write` reads it (plain addition does not).
        mixing: of a cross-layer method, the FLOPs per token of its scores, projections and weighted sums alone, as the
            methods' papers count them: every product with its addition 2.
        traffic: of a cross-layer method, the tensor elements per token that it reads from and writes to memory, every
            operand once (a fused kernel's floor).
        parameters: parameters that the method adds to the model.
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
    elementwise: float = 0
    recomputed: float = 0
    recomputed_outputs: int = 0
    mixing: int = 0
    traffic: int = 0
    parameters: int = 0
    biased: bool = False

    @property
    def forwards(self) -> dict[float, float]:
        """How many forwards of the stack run, by slots a token."""
        return {self.slots: self.passes} if self.sweeps is None else self.sweeps


@dataclasses.dataclass
class DepthOutput:
    """What a depth method returns.

    Attributes:
        hidden_states: [B, T, d], after the final norm; the head reads them.
        losses: auxiliary losses by name, already weighted; added to the training loss as a mean over target tokens is,
            which they should be: then gradients of micro-batches add up to those of the batch.
        trace: per-token facts that plots and metrics read (passes, gates, masses), each [B, T, …].
        objective: a method's own training objective, the mean over target tokens, instead of the cross-entropy of
            `hidden_states`.
    """

    hidden_states: Float[Tensor, "B T d"]
    losses: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    trace: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    objective: Tensor | None = None


class Method(nn.Module):
    """What the three kinds share: a name, a source, options, and a closed-form cost."""

    name: ClassVar[str]
    registry: ClassVar[str]
    wing: ClassVar[str] = "depth"
    paper: ClassVar[str] = ""  # arXiv id, or "" for a baseline without one
    summary: ClassVar[str]  # one line for `fathom methods`
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
    def counts(cls, config: FathomConfig, options: Any) -> Counts:
        """Closed-form cost of one token at inference; mixers and topologies leave `passes` and `heads` at 1, and count
        their work in all passes."""
        return Counts()

    def initialize_parameters(self) -> None:
        """Fill the parameters that this module owns itself with their initial values; the modules inside it have this
        hook too, or (Linear, Embedding, norms) follow the model's rule. Use the functions of
        `transformers.initialization`: they leave alone what a checkpoint has filled."""


class DepthMethod(Method):
    """Owns the loop around the decoder: how often and on what the stack runs.

    `forward` serves training, prefill, scoring and cached decoding alike: the tokens it is given are the new ones, and
    `stack` carries the cache. Options must have a property `passes`: how often a slot runs through the stack at
    inference. A method that gives a token more than one slot says how many in `slots`, and gets a `SlotStack`
    (models/slots.py).
    """

    ragged: ClassVar[bool] = False  # tokens keep different numbers of slots in the cache, or a bias each

    # Tokens stop on their own: `counts` takes the measured shares `ran`, and the trace has `passes`, the steps that
    # every token ran.
    adaptive: ClassVar[bool] = False
    # With segments of the cache (models/step_cache.py) a method gets a `StepStack` (models/steps.py) and runs step by
    # step. A token's later slot then stands beside its earlier ones, or takes their place (`replaces`).
    segments: tuple[tuple[int, int], ...] = ()
    replaces: ClassVar[bool] = False
    progress: float | None = None  # share of the training steps that are done; `train.Phases` sets it before each

    @classmethod
    def embed_scale(cls, config: FathomConfig, options: Any) -> float:
        """What the method's option `scale_embeds=True` sets the decoder's embed_scale to."""
        return math.sqrt(config.hidden_size)

    @property
    def slots(self) -> int:
        """Slots of the sequence that a token takes."""
        return 1

    @property
    def scores(self) -> Iterable[nn.Module]:
        """What reads the states between two forwards of the stack and is worth compiling with its layers."""
        return ()

    @classmethod
    def most_steps(cls, options: Any) -> int:
        """Forwards of the stack, one on the other's output, that a token runs at inference (at most, if adaptive)."""
        return options.passes

    @classmethod
    def refuse_checkpoint(cls, stored: dict[str, Any], options: Any) -> str | None:
        """Why weights of a Fathom checkpoint with the depth section `stored` cannot go on here; None if they can."""
        return None

    def trains_alone(self) -> bool:
        """Whether only this method's own parameters train at this `progress`."""
        return False

    @property
    def takes_turns(self) -> bool:
        """Whether rows can run one slot each of tokens of their own (`generate_staggered`), by the next two methods."""
        return False

    def first_turn(self, embeddings: Float[Tensor, "B 1 d"]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The input of a token's first slot, and what its turns carry, each [B, 1, …]."""
        raise NotImplementedError  # where takes_turns

    def take_turn(
        self,
        hidden_states: Float[Tensor, "B 1 d"],
        step: Int[Tensor, " B"],
        carry: tuple[Tensor, ...],
        vocabulary: Vocabulary,
    ) -> tuple[Bool[Tensor, " B"], Tensor, tuple[Tensor, ...], Tensor]:
        """After slot `step` of every row's own token: who goes on, with what input and carry, and the output if not."""
        raise NotImplementedError  # where takes_turns

    def adapt(self, decoder: Decoder, stored: dict[str, Any] | None = None) -> None:
        """Set own parameters by those of a checkpoint that was loaded into the decoder and has none of them; `stored`
        is its depth section, None of a stock one."""

    def forward(self, stack: Stack, embeddings: Float[Tensor, "B T d"], vocabulary: Vocabulary) -> DepthOutput:
        """embeddings: c·W_in[x] of the new tokens, without positions (`stack` adds them)."""
        raise NotImplementedError  # abstract

    @classmethod
    def unsupported(cls, config: FathomConfig, options: Any) -> str | None:
        if config.residual["name"] != "standard":  # type: ignore[index]
            return f"only depth='vanilla' runs with residual={config.residual['name']!r}"  # type: ignore[index]
        return None


class Mixer(Method):
    """Cross-layer mixing between the rotation and the cache write: what keys and values attention reads.

    Layers are counted across passes: index = pass·L + layer. States travel as explicit tensors, so activation
    checkpointing and torch.compile see pure functions.
    """

    def source_layers(self, index: int) -> tuple[int, ...]:
        """Indices (all < index) whose states this layer mixes in."""
        raise NotImplementedError  # abstract

    def is_source(self, index: int) -> bool:
        """Whether any later layer reads this one's state."""
        raise NotImplementedError  # abstract

    def ask(
        self, query: Float[Tensor, "B T H D"], sources: tuple[tuple[Tensor, ...], ...]
    ) -> Float[Tensor, "B T n D"] | None:
        """What `forward` wants to know of the queries before their rotation; it gets that rotated, as [B, n, T, D].
        None: the queries themselves."""
        return None

    def forward(
        self,
        query: Float[Tensor, "B n T D"],
        key: Float[Tensor, "B G T D"],
        value: Float[Tensor, "B G T D"],
        sources: tuple[tuple[Tensor, ...], ...],
        layer: int,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Returns the key and value that attention and the cache get, and this layer's state for later layers."""
        raise NotImplementedError  # abstract


class ResidualTopology(Method):
    """How a layer reads its input from, and writes its output to, earlier layers.

    The stream is whatever the topology carries (a tensor, or a tuple of tensors). Sublayer 2ℓ is layer ℓ's attention,
    2ℓ+1 its MLP.
    """

    def start(self, hidden_states: Float[Tensor, "B T d"]) -> Any:
        """The stream before the first layer."""
        raise NotImplementedError  # abstract

    def read(self, stream: Any, sublayer: int) -> tuple[Float[Tensor, "B T d"], Any]:
        """What the sublayer's norm sees, and whatever `write` needs of the reading (gates, say)."""
        raise NotImplementedError  # abstract

    def write(self, stream: Any, sublayer: int, output: Float[Tensor, "B T d"], carry: Any) -> Any:
        """The stream with the sublayer's output added. With `parallel_residual` a layer writes once, as sublayer 2ℓ."""
        raise NotImplementedError  # abstract

    def finish(self, stream: Any) -> Float[Tensor, "B T d"]:
        """What the final norm sees."""
        raise NotImplementedError  # abstract

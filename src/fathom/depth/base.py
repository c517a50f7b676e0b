"""The seams of the `depth` wing: what a depth method, a cross-layer mixer and a residual topology must provide.

A method is one file in this folder: a frozen `Options` dataclass that validates itself, and one class registered by
name. Importing `fathom.depth` imports every file here, so a new file is all it takes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fathom.models.method import Counts, Method, NoOptions, check_choice, check_number, check_range
from fathom.models.registry import build_options, lookup

if TYPE_CHECKING:
    from fathom.models.configuration import FathomConfig
    from fathom.models.decoder import Decoder, Stack
    from fathom.models.vocabulary import Vocabulary

__all__ = [
    "Counts", "DepthMethod", "DepthOutput", "Method", "NoOptions", "check_choice",
    "check_number", "check_range", "draw_for_all_ranks",
]  # fmt: skip


@torch.compiler.disable  # a number, by which the graph around it is chosen
def draw_for_all_ranks(low: int, high: int, device: torch.device) -> int:
    """Uniform on low … high; rank 0's draw counts for all ranks, as they must run the same collectives."""
    drawn = torch.randint(low, high + 1, (1,))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        drawn = drawn.to(device)
        torch.distributed.broadcast(drawn, src=0)
    return int(drawn.item())


def reads_earlier_passes(config: FathomConfig, depth: dict[str, Any]) -> bool:
    """Whether layers of the config's mixer read those of earlier passes, under the depth section `depth`."""
    if config.mixer["name"] == "none":  # type: ignore[index]
        return False
    config = copy.copy(config)
    config.depth = depth
    layers = config.num_hidden_layers
    mixer: Any = lookup("mixer", config.mixer["name"])(config, build_options("mixer", config.mixer))  # type: ignore
    return any(
        source // layers < index // layers
        for index in range(config.passes * layers)
        for source in mixer.source_layers(index)
    )


@dataclasses.dataclass
class DepthOutput:
    """What a depth method returns.

    Attributes:
        hidden_states: [B, T, d], after the final norm; the head reads them.
        losses: auxiliary losses by name, already weighted, which are added to the training loss. They should be means
            over target tokens: then gradients of micro-batches add up to those of the batch.
        trace: per-token facts that plots and metrics read (passes, gates, masses), each [B, T, …].
        objective: a method's own training objective, the mean over target tokens, instead of the cross-entropy of
            `hidden_states`.
    """

    hidden_states: Float[Tensor, "B T d"]
    losses: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    trace: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    objective: Tensor | None = None


class DepthMethod(Method):
    """A depth method: the loop around the decoder, which decides how often and on what the stack runs.

    `forward` serves training, prefill, scoring and cached decoding alike: the tokens it is given are the new ones, and
    `stack` carries the cache. Options must have a property `passes`: how often a slot runs through the stack at
    inference. A method that gives a token more than one slot says how many in `slots`, and gets a `SlotStack`
    (models/slots.py).
    """

    ragged: ClassVar[bool] = False  # tokens keep different numbers of slots in the cache, or a bias each

    # Tokens stop on their own: `counts` takes the measured shares `ran`, and the trace has `passes`, the steps that
    # every token ran.
    adaptive: ClassVar[bool] = False
    # With segments of the cache (models/steps/cache.py) a method gets a `StepStack` (models/steps/stack.py) and runs
    # step by step. A token's later slot then stands beside its earlier ones, or takes their place (`replaces`).
    segments: tuple[tuple[int, int], ...] = ()
    replaces: ClassVar[bool] = False
    progress: float | None = None  # share of the training steps that are done; `train.Phases` sets it before each

    @classmethod
    def embed_scale(cls, config: FathomConfig, options: Any) -> float:
        """The decoder's embed_scale under the method's option `scale_embeds=True`."""
        return math.sqrt(config.hidden_size)

    @property
    def slots(self) -> int:
        """Slots of the sequence that a token takes."""
        return 1

    @property
    def parts_are_exact(self) -> bool:
        """Whether outputs are the same however a text is cut into calls."""
        return True

    @property
    def scores(self) -> Iterable[nn.Module]:
        """The modules that read states between two forwards of the stack and should be compiled with its layers."""
        return ()

    @classmethod
    def sees_anyone(cls, config: FathomConfig, options: Any) -> bool:
        """Whether the method runs under any visibility; slots and steps of a token have a causal order of their own."""
        return not cls.adaptive and cls.counts(config, options).slots == 1

    @classmethod
    def most_steps(cls, options: Any) -> int:
        """The number of forwards that follow on one another for a token at inference (at most, if adaptive)."""
        return options.passes

    @classmethod
    def refuse_checkpoint(cls, stored: FathomConfig, given: FathomConfig) -> str | None:
        """Why weights of a Fathom checkpoint with config `stored` cannot be used under `given`; None if they can."""
        return None

    def trains_alone(self) -> bool:
        """Whether only this method's own parameters train at this `progress`."""
        return False

    def adapt(self, decoder: Decoder, stored: dict[str, Any] | None = None) -> None:
        """Set the method's own parameters after a checkpoint that lacks them was loaded into the decoder.

        stored: the checkpoint's depth section; None for a stock checkpoint.
        """

    def forward(self, stack: Stack, embeddings: Float[Tensor, "B T d"], vocabulary: Vocabulary) -> DepthOutput:
        """embeddings: c·W_in[x] of the new tokens, without positions (`stack` adds them)."""
        raise NotImplementedError  # abstract

    @classmethod
    def unsupported(cls, config: FathomConfig, options: Any) -> str | None:
        if config.residual["name"] != "standard":  # type: ignore[index]
            return f"only depth='vanilla' runs with residual={config.residual['name']!r}"  # type: ignore[index]
        return None

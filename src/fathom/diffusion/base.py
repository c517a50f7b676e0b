"""The seam of the diffusion wing: the parts of a sampler.

Four independent axes, each a frozen dataclass (or a name) whose fields are its options:

    objective     what the model predicts: a method of the config's section `diffusion`
    policy        which hidden tokens a step reveals
    schedule      how many (schedules.py)
    block cache   which tokens a step computes, and what attention reads of the others

`sampling.py` has the one loop that they plug into. Shapes: B rows, R rows of the model's batch (2 B under guidance), L
columns of the canvas (prompt and answer), n tokens of the current block, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fathom.models.method import Method

if TYPE_CHECKING:
    from fathom.diffusion.passes import Columns, Passes


class Objective(Method):
    """An objective: what the model predicts. It adds no parameters; models trained by it `generate` by the sampler."""

    wing: ClassVar[str] = "diffusion"


@dataclasses.dataclass(frozen=True)
class Block:
    """The columns start … stop − 1 of the canvas, which are filled in `steps` steps.

    Attributes:
        shift: the state of a column predicts the token of the next one.
    """

    index: int
    start: int
    stop: int
    steps: int
    shift: bool

    @property
    def first(self) -> int:
        """The first column whose state predicts a token of the block."""
        return max(self.start - self.shift, 0)

    def predictors(self, device: torch.device) -> Int[Tensor, " n"]:
        """The column whose state predicts each token of the block."""
        return (torch.arange(self.start, self.stop, device=device) - int(self.shift)).clamp(min=0)


@dataclasses.dataclass
class View:
    """The facts about the current block that a step's policy reads.

    Attributes:
        candidates: tokens that are hidden, and predicted by this step's pass.
        log_probs: of the candidates, in the order of `candidates.nonzero()`, or of all tokens of the block (`whole`),
            without noise; the mask token has none.
        tokens: what would be revealed where; 0 elsewhere.
        probability: of these tokens in `log_probs`; 0 elsewhere.
        hidden: the states that predict the block's tokens, which the head reads; for policies with `whole_block`.
        others: highest probability of every hidden token outside the block that the pass predicted, and its row; for
            policies with `beyond_block`.
        step, steps: of this block.
        of_step: what the policy's `of_step` made of them.
        generators: of the rows.
        whole: in a step of fixed shape, which policies that say `fixed_shape` have on a GPU.
    """

    candidates: Bool[Tensor, "B n"]
    log_probs: Float[Tensor, "N V"]
    tokens: Int[Tensor, "B n"]
    probability: Float[Tensor, "B n"]
    hidden: Float[Tensor, "B n d"] | None
    others: tuple[Float[Tensor, " M"], Int[Tensor, " M"]] | None
    step: int
    steps: int
    generators: Sequence[torch.Generator]
    of_step: Tensor | None = None
    whole: bool = False

    def spread(self, values: Float[Tensor, " N"]) -> Float[Tensor, "B n"]:
        """Values of the candidates spread over the block; 0 elsewhere."""
        if self.whole:
            return values.view(self.candidates.shape).masked_fill(~self.candidates, 0)
        out = values.new_zeros(self.candidates.shape)
        out[self.candidates] = values
        return out

    @property
    def entropy(self) -> Float[Tensor, "B n"]:
        """Entropy of the candidates' distributions, in nats; 0 elsewhere."""
        log_probs = self.log_probs
        return self.spread(-(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0)).sum(-1))


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy: a step reveals the `count` candidates of highest rank. Among equal ranks the earlier one comes first.

    Attributes:
        fixed_shape: `rank` and `count` are of the view alone, of which they read no value and no step but whether it is
            the last, and what `of_step` says; memory stays where it is. So a step may be recorded.
        beyond_block: whether it reads `View.others`.
        whole_block: whether it reads `View.hidden` of all tokens of the block.
    """

    registry: ClassVar[str] = "policy"
    fixed_shape: ClassVar[bool] = False
    beyond_block: ClassVar[bool] = False
    whole_block: ClassVar[bool] = False

    def new_memory(self, rows: int) -> Any:
        """The object in which the policy keeps values from step to step of one generate() call."""
        return None

    def of_step(self, block: Block, step: int, device: torch.device) -> Tensor | None:
        """What `rank` needs of a step's number, in one shape for all steps of a block."""
        return None

    def rank(self, view: View, memory: Any) -> Float[Tensor, "B n"]:
        """The rank of every token: a higher one is revealed earlier. Only the candidates' ranks count."""
        raise NotImplementedError  # abstract

    def count(self, view: View, order: Int[Tensor, "B n"], quota: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        """The number of tokens that each row reveals, given the candidates sorted by rank and the schedule's quota."""
        return quota


@dataclasses.dataclass(frozen=True)
class BlockCache:
    """A block cache: which columns a step computes. The base class computes all of them and keeps nothing.

    Attributes:
        whole_block: whether every pass predicts all tokens of the block.
    """

    registry: ClassVar[str] = "block_cache"
    whole_block: ClassVar[bool] = True

    def check(self, block: Block) -> None:
        """Raise ValueError for steps or shift that the cache cannot serve."""

    def new_state(self, passes: Passes) -> BlockState:
        return BlockState(self, passes)

    def first_reveal(self, block: Block, step: int) -> bool:
        """Whether this step reveals the block's first token and nothing else (Sparse-dLLM on shifted models)."""
        return False


class BlockState:
    """The cache of one generate() call. `states` runs the pass of a step."""

    def __init__(self, method: Any, passes: Passes):
        self.method, self.passes = method, passes

    def begin(self, block: Block) -> None:
        """Begin a new block, and drop what was kept of the last one."""
        self.block = block

    def states(
        self, canvas: Int[Tensor, "R L"], hidden: Bool[Tensor, "R L"], step: int, quota: Int[Tensor, " R"]
    ) -> tuple[Float[Tensor, "R m d"], Columns]:
        """The states of the columns that this step computes.

        hidden: columns that hold the mask token.
        quota: hidden tokens of the block, by row, that the step must predict at least.
        """
        return self.passes.full(canvas, fixed=True)

    def nbytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return 0


def check_option(name: str, option: str, value: Any, fine: bool, rule: str) -> None:
    """Raise ValueError unless `fine`, naming the method, the option, the value and what would be right."""
    if not fine:
        raise ValueError(f"{name} option {option}={value!r}: must be {rule}")


def check_tokens(ids: Tensor, real: Bool[Tensor, "B L"], size: int) -> None:
    """Raise ValueError for inputs that are no tokens of a model of `size` tokens; padding may have any id."""
    if ids.dtype not in (torch.int64, torch.int32):  # embeddings look up no others, and shorter ones hold no large id
        raise ValueError(f"inputs of {ids.dtype}: give token ids of torch.int64 or torch.int32")
    wrong = (real & ((ids < 0) | (ids >= size))).nonzero().tolist()
    if wrong:
        row, column = wrong[0]
        raise ValueError(
            f"inputs: row {row} holds the id {int(ids[row, column])}, which must be at least 0 and below "
            f"vocab_size={size}; use the model's own tokenizer"
        )


def own_blocks(model: Any) -> int | None:
    """The block length that a model was trained with (`diffusion: block`); None: its tokens see the whole row."""
    section = getattr(model.config, "diffusion", None) or {}
    return section["block_length"] if section.get("name") == "block" else None


def is_diffusion(model: Any) -> bool:
    """Whether the model predicts hidden tokens instead of the next one."""
    return (getattr(model.config, "diffusion", None) or {}).get("name", "none") != "none"

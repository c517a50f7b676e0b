"""PonderLM-2: latent thoughts in continuous space (arXiv 2509.23184).

Definition, token by token (decoding, `prefill="sequential"`), with e_t = c·W_in[x_t] and F ending in the final norm:

    h = F(e_t | cache);   K times:  z = h;  h = F(z | cache, same position t);   logits_t = W_out h

Thoughts have slots of their own: [e_1, z_{1,1} … z_{1,K}, e_2, …]. All at once (training, `prefill="jacobi"`) they are
the fixed point of one causal forward over these slots, strictly triangular in slot order, found by Jacobi sweeps:

    st = [E]
    for m = 0 … K−1:   y = F(interleave(st));   st = [E, y_0, …, y_m]              (growing passes)
    J times:           y = F(interleave(st));   st = [E, y_0, …, y_{K−1}]          (sweeps)
    y = F(interleave(st));   logits = W_out y_K                                    (y_i: outputs of stage i, [B, T, d])

which is exact after J = K·(T−1) sweeps; more are never run. Training runs a few. A prefill by default sweeps until no
thought changes any more, so that scoring equals decoding. Gradients flow through every pass. No parameters are added.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init

from fathom.depth.base import Counts, DepthMethod, DepthOutput, check_choice, check_range, draw_for_all_ranks
from fathom.models.registry import register
from fathom.models.slots import SlotView, interleave
from fathom.ops.autocast import product_spacing

if TYPE_CHECKING:
    from fathom.models.decoder import Stack

# Where the options do not say it: the most sweeps of a training forward, and the change at which a prefill has settled.
SWEEPS, SETTLED = 3, 1e-4


@register("depth", "ponderlm2")
class PonderLM2(DepthMethod):
    """K latent thoughts after every token: the last hidden state, fed back as the next slot's input."""

    summary = "Latent thoughts: hidden states fed back in slots of their own, trained by Jacobi sweeps."
    equation = (
        "h_{t,0} = F(e_t | cache);  h_{t,k} = F(h_{t,k−1} | cache, position t),  k = 1 … K;  logits_t = W_out h_{t,K}"
    )
    paper = "2509.23184"
    variants = (
        {"sweeps": 12, "random_sweeps": False},  # exact up to 13 tokens, so that the suite may compare with decoding
        {
            "thoughts": 2, "sweeps": 14, "random_sweeps": False, "prefill": "sequential", "interpolation": True,
            "learned_scale": True,
        },
    )  # fmt: skip
    identity = {"thoughts": 0}  # noqa: RUF012

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of PonderLM-2; the defaults are the paper's main setting.

        thoughts: K, latent thoughts after every token; 0 is the ordinary decoder.
        sweeps: J, Jacobi sweeps in training and in a jacobi prefill, as in the papers. None: 3 in training; a prefill
            sweeps until all thoughts have settled, at most the K·(T−1) times after which they are exact.
        random_sweeps: in training, draw J uniformly from 2 … sweeps, once for all ranks.
        prefill: how several new tokens run at inference: by "jacobi" sweeps, or "sequential" (exact, slot by slot).
        tolerance: thoughts have settled once none changes by more than this, relative to its norm. Without `sweeps`
            None is 1e-4, and never is it below four times the precision of matrix products (0.03 in bf16). With
            `sweeps`, None measures no changes; given, a prefill that ends before thoughts have settled warns.
        interpolation: a thought is softmax(W_out h)·(c·W_in), the expected embedding, instead of h.
        scale_embeds: True sets embed_scale to √(2.5·d), √d with interpolation; False to 1; None leaves it.
        learned_scale: thoughts are multiplied by a learned number, for continued training of a checkpoint. It starts at
            RMS(c·W_in) / RMS(h), so that a thought is as large as an embedding; from scratch, with interpolation, or on
            a checkpoint that already has thoughts it starts at 1.
        checkpoint_passes: in training a forward keeps only its inputs, and the backward pass runs it again; a forward
            that writes a cache is excepted.
        gradient_passes: number of last forwards that have a backward pass in training; None: all, as in the paper. At
            least 2 with learned_scale, as the last forward makes no thought.
        """

        thoughts: int = 1
        sweeps: int | None = None
        random_sweeps: bool = True
        prefill: str = "jacobi"
        tolerance: float | None = None
        interpolation: bool = False
        scale_embeds: bool | None = None
        learned_scale: bool = False
        checkpoint_passes: bool = False
        gradient_passes: int | None = None
        passes: ClassVar[int] = 1

        def __post_init__(self):
            check_thoughts("ponderlm2", self)
            if self.learned_scale and self.thoughts and self.gradient_passes == 1:
                raise ValueError(
                    "ponderlm2 options learned_scale=True and gradient_passes=1: the last forward makes no thought, so "
                    "the scale would have no gradient; give gradient_passes=2 or more, or learned_scale=False"
                )

    def __init__(self, config, options):
        super().__init__(config, options)
        if options.learned_scale and options.thoughts:
            self.scale = nn.Parameter(torch.empty(1))

    @property
    def parts_are_exact(self) -> bool:
        return self.options.prefill == "sequential"  # Jacobi sweeps settle within a tolerance, over a call's thoughts

    @property
    def slots(self) -> int:
        return self.options.thoughts + 1

    def initialize_parameters(self) -> None:
        if hasattr(self, "scale"):
            init.ones_(self.scale)

    @torch.no_grad()
    def adapt(self, decoder, stored=None) -> None:
        """Start the learned scale at RMS(c·W_in) / RMS(h); gain and shift of the final norm say how large h is."""
        if not hasattr(self, "scale") or self.options.interpolation:  # an expected embedding is in embedding units
            return
        stored = stored or {"name": "vanilla"}
        if stored["name"] in ("ponderlm2", "ponderlm3") and stored["thoughts"] and not stored.get("interpolation"):
            return  # it was trained with states as thoughts, unscaled
        norm, table = decoder.norm, decoder.scale(decoder.embed_tokens.weight.float())
        thought = sum(p.float().square().mean() for p in (norm.weight, getattr(norm, "bias", None)) if p is not None)
        self.scale.copy_((table.square().mean() / thought).sqrt())

    @classmethod
    def most_steps(cls, options) -> int:
        return options.thoughts + 1

    @classmethod
    def embed_scale(cls, config, options) -> float:
        # unit-variance rows for a table of deviation √(2/(5d)): a thought is a normalised state, of unit variance too
        return math.sqrt((1.0 if options.interpolation else 2.5) * config.hidden_size)

    def forward(self, stack, embeddings, vocabulary) -> DepthOutput:
        if not self.options.thoughts:
            return DepthOutput(stack(embeddings))
        if not self.training and (embeddings.shape[1] == 1 or self.options.prefill == "sequential"):
            return DepthOutput(self.sequential(stack, embeddings, vocabulary))
        return self.jacobi(stack, embeddings, vocabulary)

    def thought(self, hidden_states, vocabulary):
        thought = vocabulary.mixture(hidden_states) if self.options.interpolation else hidden_states
        return self.scale * thought if self.options.learned_scale else thought

    def sequential(self, stack, embeddings, vocabulary):
        """The definition: K + 1 forwards of one slot for every token."""
        stack, outputs = stack.with_cache(len(embeddings)), []
        for token in range(embeddings.shape[1]):
            hidden_states = embeddings[:, token : token + 1]
            for step in range(self.slots):
                slot = self.thought(hidden_states, vocabulary) if step else hidden_states
                hidden_states = stack.bind(slot, stack.layout(self.slots, token, step))(slot)
            outputs.append(hidden_states)
        return torch.cat(outputs, dim=1)

    def jacobi(self, stack, embeddings, vocabulary) -> DepthOutput:
        """Growing passes, sweeps, and the final pass, which alone writes the cache."""
        thoughts, n = self.options.thoughts, self.slots
        plan = Sweeps.of(self, stack, embeddings)
        found: list[Tensor] = []  # the thoughts of stages 0, 1, …
        for m in range(1, n):
            with torch.set_grad_enabled(torch.is_grad_enabled() and m > plan.first):
                slots = interleave([embeddings, *found])
                y = run_pass(self, stack.bind(slots, stack.layout(m), keep=False), slots)
                found = [self.thought(y[:, i::m], vocabulary) for i in range(m)]

        slots, layout = interleave([embeddings, *found]), stack.layout(n)
        bound = stack.bind(slots, layout, keep=False)

        def sweep(found: list[Tensor]) -> list[Tensor]:
            y = run_pass(self, bound, interleave([embeddings, *found]))
            return [self.thought(y[:, i::n], vocabulary) for i in range(thoughts)]

        found, ran = plan.run(sweep, stack.largest_change, found)
        slots = interleave([embeddings, *found])
        if stack.cache is not None:
            bound = stack.bind(slots, layout)
        return DepthOutput(run_pass(self, bound, slots)[:, thoughts::n], trace=plan.trace(ran))

    @classmethod
    def counts(cls, config, options) -> Counts:
        k, d, v = options.thoughts, config.hidden_size, config.vocab_size
        if not k:
            return Counts()
        mixture = 4 * v + (d if config.embed_scale != 1.0 else 0) if options.interpolation else 0

        def counts(thoughts: float, learned: float = 0, heads: int = 1, **fields) -> Counts:
            mixtures, learned = (thoughts, learned) if options.interpolation else (0, 0)
            return Counts(
                heads=heads + mixtures,
                matmul=mixtures * 2 * d * v,
                elementwise=thoughts * (mixture + d * options.learned_scale),
                recomputed=learned * 2 * d * v,
                parameters=int(options.learned_scale),
                **fields,
            )

        def thoughts(forwards: dict[float, float]) -> float:
            return sum(min(slots, k) * times for slots, times in forwards.items())

        every, first = jacobi_forwards(options), jacobi_forwards(options, without_gradient=True)
        made, unlearned = thoughts(every) - k, thoughts(first)  # the last forward makes none
        parallel = counts(
            made,
            made - unlearned,
            sweeps=every,
            no_gradient=counts(unlearned, heads=0, sweeps=first),
            checkpointed=options.checkpoint_passes,
        )
        return counts(k, slots=k + 1, parallel=parallel)


def check_thoughts(method: str, options: Any) -> None:
    """Raise ValueError if the options of thoughts and sweeps are out of range or contradict each other."""
    check_range(method, "thoughts", options.thoughts, 0)
    if options.sweeps is not None:
        check_range(method, "sweeps", options.sweeps, 0)
    check_choice(method, "prefill", options.prefill, ("jacobi", "sequential"))
    if options.gradient_passes is not None:
        check_range(method, "gradient_passes", options.gradient_passes, 1)
    if options.tolerance is not None:
        if not 0 < options.tolerance < float("inf"):
            raise ValueError(f"{method} option tolerance={options.tolerance!r}: must be positive and finite, or None")
        if options.sweeps == 0:
            raise ValueError(f"{method} option tolerance={options.tolerance!r}: sweeps=0 measures none; allow more")


def most_sweeps(options: Any) -> int:
    """The most Jacobi sweeps of a training forward."""
    return SWEEPS if options.sweeps is None else options.sweeps


def draw_sweeps(method: DepthMethod, device: torch.device) -> int:
    """The number J of sweeps of a training forward: uniform on 2 … sweeps with random_sweeps, else `sweeps`."""
    sweeps = most_sweeps(method.options)
    return draw_for_all_ranks(min(2, sweeps), sweeps, device) if method.options.random_sweeps else sweeps


@dataclasses.dataclass(frozen=True)
class Sweeps:
    """The sweeps of one forward.

    Attributes:
        method: the depth method that sweeps.
        stack: of the new tokens.
        embeddings: of the new tokens.
        exact: number of sweeps after which all thoughts are exact.
        most: the most sweeps that run.
        tolerance: sweeps end once no thought changes by more than this; None: changes are not measured.
        first: index of the first forward, growing passes counted, that has a backward pass.
    """

    method: DepthMethod
    stack: Stack
    embeddings: Float[Tensor, "B T d"]
    exact: int
    most: int
    tolerance: float | None
    first: int

    @classmethod
    def of(cls, method: DepthMethod, stack: Stack, embeddings: Float[Tensor, "B T d"]) -> Sweeps:
        options, thoughts = method.options, method.options.thoughts
        exact = stack.needed(thoughts * (embeddings.shape[1] - 1))  # more change nothing
        tolerance, first = options.tolerance, 0
        if method.training:
            most, tolerance = min(draw_sweeps(method, embeddings.device), exact), None
            if options.gradient_passes is not None:
                first = max(thoughts + most + 1 - options.gradient_passes, 0)
        elif options.sweeps is None:
            most, tolerance = exact, tolerance or SETTLED
        else:
            most = min(options.sweeps, exact)
        return cls(method, stack, embeddings, exact, most, tolerance, first)

    def run(self, sweep: Callable[[Any], Any], change: Callable[[Any, Any], Tensor], found: Any) -> tuple[Any, int]:
        """The result of the sweeps, and how many ran: all of them, or as many as were needed until nothing changed.

        change: a function that measures the difference between the results of two sweeps.
        """
        if self.tolerance is not None:
            return self.until_settled(sweep, change, found, self.tolerance)
        for number in range(self.most):
            backward = self.method.options.thoughts + number >= self.first
            with torch.set_grad_enabled(torch.is_grad_enabled() and backward):
                found = sweep(found)
        return found, self.most

    @torch.compiler.disable(recursive=False)  # how many sweeps run is known when they have run
    def until_settled(self, sweep: Any, change: Any, found: Any, tolerance: float) -> tuple[Any, int]:
        """The result of the sweeps once it has settled, and how many ran. Waits for the device once a sweep.

        Without a limit on sweeps the tolerance is no finer than rounding, which in bf16 changes thoughts by about its
        spacing in every sweep.
        """
        if self.method.options.sweeps is None:
            tolerance = max(tolerance, 4 * product_spacing(self.embeddings))
        ran, last = 0, math.inf
        goes_on = ran < self.most
        while self.stack.needed(goes_on):
            after = sweep(found)
            if goes_on:
                ran, last, found = ran + 1, change(found, after).item(), after
                goes_on = ran < self.most and last > tolerance  # a NaN never settles
        if not last <= tolerance and self.most < self.exact:
            warnings.warn(
                f"{self.method.name}: after sweeps={ran} a thought still changes by {last:.2g} of its norm, above "
                f'tolerance={tolerance:g}; allow more sweeps, or use prefill="sequential"',
                stacklevel=3,
            )
        return found, ran

    def trace(self, ran: int) -> dict[str, Tensor]:
        """The number of sweeps that ran, as a trace: one number for each token."""
        return {"sweeps": torch.full(self.embeddings.shape[:2], ran, device=self.embeddings.device)}


def run_pass(method: DepthMethod, stack: Stack, slots: Float[Tensor, "B S d"]) -> Float[Tensor, "B S d"]:
    """One forward of the stack, checkpointed as a whole if the method says so.

    A forward that writes a cache is not checkpointed, as running it again would write twice.
    """
    writes = stack.cache is not None and not isinstance(stack.cache, SlotView)
    if method.training and method.options.checkpoint_passes and torch.is_grad_enabled() and not writes:
        return checkpoint(stack, slots, use_reentrant=False)
    return stack(slots)


def jacobi_forwards(options: Any, without_gradient: bool = False) -> dict[float, float]:
    """The number of forwards in training by slots a token: one growing pass with each of 1 … K slots, J + 1 with K + 1.

    without_gradient: count only those without a backward pass. Numbers are means over the draw of J.
    """
    k = options.thoughts
    out: dict[float, float] = {}
    most = most_sweeps(options)
    draws = range(min(2, most), most + 1) if options.random_sweeps else (most,)
    for j in draws:
        forwards = [*range(1, k + 1), *[k + 1] * (j + 1)]
        if without_gradient:
            forwards = forwards[: -options.gradient_passes] if options.gradient_passes else []
        for slots in forwards:
            out[slots] = out.get(slots, 0) + 1 / len(draws)
    return out

"""dLLM-Cache (arXiv 2506.06295): a layer reuses what it computed for a token until the token's values have changed.

For every layer and token it keeps keys, values, the output of attention and that of the feed-forward network.

    prompt     computed again every `prompt_interval` steps
    answer     computed again every `response_interval` steps, and in the first layer always; in between only the
               ⌊ratio · n⌋ of its n tokens (at least one) whose values V have the lowest cosine with the kept ones

Steps are counted over the whole answer, with those that a block skips because its tokens were revealed early. Among
equal cosines the earlier token is computed. A row whose block is finished changes nothing while other rows go on. A
token that is not computed adds the kept outputs to its residual stream. On shifted models the answer begins one column
earlier, with the column that predicts its first token. The authors' code keeps one cache for all rows and layers of a
process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fathom.diffusion.base import BlockCache, BlockState, check_option
from fathom.diffusion.passes import Columns
from fathom.models.causal_lm import FathomForCausalLM
from fathom.models.method import check_range

# Sections that it runs with.
PLAIN = {
    "mixer": ("none",), "residual": ("standard",), "feed_forward": ("dense",), "positions": ("rotary", "learned"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DLLMCache(BlockCache):
    """Keeps the outputs of layers, and refreshes the tokens of the answer whose values changed most.

    prompt_interval: steps from one pass over the prompt to the next; the paper has 25 to 100.
    response_interval: of the answer; the paper has 4 to 8.
    ratio: share of the answer that is computed in between.
    """

    prompt_interval: int = 50
    response_interval: int = 7
    ratio: float = 0.25

    name = "dllm_cache"
    paper = "2506.06295"
    summary = "Keep what layers computed of every token; refresh those of the answer whose values changed most."
    equation = "computed = the ⌊ρ n⌋ tokens of the answer of lowest cos(V, kept V);  others add kept outputs"

    def __post_init__(self):
        check_range(self.name, "prompt_interval", self.prompt_interval, 1)
        check_range(self.name, "response_interval", self.response_interval, 1)
        check_option(self.name, "ratio", self.ratio, 0 <= self.ratio <= 1, "between 0 and 1")

    def new_state(self, passes):
        model = passes.model
        if isinstance(model, FathomForCausalLM):
            for section, names in PLAIN.items():
                found = getattr(model.config, section)["name"]
                if found not in names:
                    raise ValueError(
                        f"block_cache='dllm_cache' with {section}={found!r}: it takes layers apart as they are with "
                        f"{' or '.join(names)}; use another cache"
                    )
        return DLLMState(self, passes)


@dataclasses.dataclass
class Kept:
    """A layer's keys and values, and the outputs of its attention and of its feed-forward network."""

    key: Float[Tensor, "R G L D"]
    value: Float[Tensor, "R G L D"]
    attended: Float[Tensor, "R L d"] | None = None
    fed: Float[Tensor, "R L d"] | None = None


class DLLMState(BlockState):
    """What each layer computed of prompt and answer, and when it is due again."""

    def __init__(self, method: DLLMCache, passes: Any):
        super().__init__(method, passes)
        self.layers: list[Kept] = []
        self.answer: int | None = None  # where it begins

    def begin(self, block):
        self.block = block
        self.answer = block.first if self.answer is None else self.answer

    def states(self, canvas, hidden, step, quota):
        now = self.block.index * self.block.steps + step
        self.prompt_anew = now % self.method.prompt_interval == 0
        self.answer_anew = now % self.method.response_interval == 0
        self.going = hidden[:, self.block.start : self.block.stop].any(1)
        self.attention_calls = self.fed_calls = self.computed = 0
        columns = Columns.stretch(0, self.passes.length, len(canvas), canvas.device)
        kind = "full" if self.prompt_anew and self.answer_anew else "block"
        with self.partial():
            states = self.passes.run(canvas, columns, self.read, kind)
        skipped = len(canvas) * self.passes.length - self.computed // max(1, self.attention_calls)
        self.passes.tokens -= skipped
        return states, columns

    @contextlib.contextmanager
    def partial(self) -> Iterator[None]:
        """A context in which the model's attention and feed-forward networks compute only chosen columns."""
        modules = [part for layer in self.passes.model.get_decoder().layers for part in (layer.self_attn, layer.mlp)]
        before = [module.__dict__.get("forward") for module in modules]  # None: the class's own
        try:
            for number, module in enumerate(modules):
                self.wrap(module, self.attend if number % 2 == 0 else self.feed)
            yield
        finally:
            for module, own in zip(modules, before, strict=True):
                del module.forward
                if own is not None:
                    module.forward = own

    def wrap(self, module: Any, function: Any) -> None:
        forward = module.forward
        module.forward = lambda *args, **kwargs: function(module, forward, *args, **kwargs)

    def choose(self, module: Any, layer: int, x: Float[Tensor, "R L d"]) -> Int[Tensor, "R m"]:
        """The columns that a layer computes."""
        rows, length, start = len(x), self.passes.length, int(self.answer or 0)
        prompt = torch.arange(start if self.prompt_anew else 0, device=x.device).expand(rows, -1)
        if self.answer_anew or layer == 0:
            chosen = torch.arange(start, length, device=x.device).expand(rows, -1)
        else:
            kept = self.layers[layer].value[:, :, start:].transpose(1, 2).flatten(2)
            wide = torch.promote_types(kept.dtype, torch.float32)
            alike = F.cosine_similarity(module.v_proj(x[:, start:]).to(wide), kept.to(wide), dim=-1)
            count = max(1, math.floor(Fraction(str(self.method.ratio)) * (length - start)))
            chosen = start + alike.argsort(dim=1, stable=True)[:, :count]
        return torch.cat([prompt, chosen], dim=1)

    def attend(self, module: Any, forward: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        layer, self.attention_calls = self.attention_calls, self.attention_calls + 1
        self.index = self.choose(module, layer, hidden_states)
        self.computed += self.index.numel()
        tables = kwargs.get("position_embeddings")
        if tables is not None:
            kwargs["position_embeddings"] = tuple(self.pick(table.expand(len(self.index), -1, -1)) for table in tables)
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"].expand(len(self.index), -1).gather(1, self.index)
        output, *more = forward(self.pick(hidden_states), *args, **kwargs)
        kept = self.layers[layer]
        kept.attended = self.put(kept.attended, output)
        return kept.attended, *more

    def feed(self, module: Any, forward: Any, x: Tensor, *args: Any) -> Tensor:
        layer, self.fed_calls = self.fed_calls, self.fed_calls + 1
        kept = self.layers[layer]
        kept.fed = self.put(kept.fed, forward(self.pick(x), *args))
        return kept.fed

    def pick(self, x: Float[Tensor, "R L d"]) -> Float[Tensor, "R m d"]:
        return x.gather(1, self.index[..., None].expand(-1, -1, x.shape[2]))

    def put(self, kept: Tensor | None, new: Float[Tensor, "R m d"]) -> Float[Tensor, "R L d"]:
        """The kept tensor with the computed columns replaced; a copy, as the residual stream may hold the old one."""
        if kept is None:
            kept = new.new_zeros(len(new), self.passes.length, new.shape[2])
        index = self.index[..., None].expand_as(new)
        return kept.scatter(1, index, torch.where(self.going[:, None, None], new, kept.gather(1, index)))

    def read(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if layer == len(self.layers):
            shape = (key.shape[0], key.shape[1], self.passes.length, key.shape[3])
            self.layers.append(Kept(key.new_zeros(shape), value.new_zeros(shape)))
        kept, index = self.layers[layer], self.index[:, None, :, None].expand_as(key)
        for old, new in ((kept.key, key), (kept.value, value)):
            old.scatter_(2, index, torch.where(self.going[:, None, None, None], new, old.gather(2, index)))
        return kept.key, kept.value, self.passes.mask

    def nbytes(self):
        tensors = [x for kept in self.layers for x in (kept.key, kept.value, kept.attended, kept.fed) if x is not None]
        return sum(x.numel() * x.element_size() for x in tensors)

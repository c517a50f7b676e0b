"""Self-speculation: the model with fewer passes drafts k tokens, one full forward verifies them.

    draft x_{t+1} … x_{t+k} ~ q (fewer passes);   accept x_i with probability min(1, p(x_i) / q(x_i)), p the full model;
    the first that is refused is drawn from max(p − q, 0), normalised.  Greedy: the longest prefix that p also chooses.

The output is distributed as that of the full model alone, however good the draft is. Drafting and verifying are
transformers' assisted generation. The assistant is a second view of this model, with the same weights and its own
cache.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.generation.configuration_utils import GenerationMode

logger = logging.getLogger("fathom.decoding")

# The option that says how many passes there are, and how many are meant by 0 of it.
PASSES = dict.fromkeys(("pondering", "adaponderlm", "adaptive_latent_cot"), ("steps", 1)) | {"loop": ("passes", 0)}


@dataclasses.dataclass
class Speculation:
    """Counts of one speculative generate().

    drafted, accepted: tokens.   forwards: of the full model; each adds one token of its own to the accepted ones.
    """

    drafted: int = 0
    accepted: int = 0
    forwards: int = 0

    @property
    def rate(self) -> float:
        """Accepted tokens / drafted tokens; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


def with_passes(model: Any, passes: int) -> Any:
    """A view of the model that runs `passes` passes, with the same weights and none of the model's hooks.

    Raises:
        ValueError: the depth method has no passes to leave out, or fewer than asked for.
    """
    name = model.config.depth["name"]
    if name not in PASSES:
        raise ValueError(f"draft_passes={passes} with depth={name!r}: only {', '.join(PASSES)} draft with fewer passes")
    option, fewer = PASSES[name]
    most = getattr(model.depth.options, option) + fewer
    if not isinstance(passes, int) or isinstance(passes, bool) or not 1 <= passes < most:
        raise ValueError(f"draft_passes={passes!r} with depth={name!r}: use 1 … {most - 1}, below the model's {most}")
    options = dataclasses.replace(model.depth.options, **{option: passes - fewer})
    view = _sharing(model)
    view.config = copy.copy(model.config)
    view.config.depth = {**model.config.depth, option: passes - fewer}
    with torch.device("meta"):
        depth = type(model.depth)(view.config, options)
    for part, own in ((depth._modules, model.depth._modules), (depth._parameters, model.depth._parameters)):
        part.update({key: own[key] for key in part})  # type: ignore[attr-defined]
    view._modules["depth"] = depth.train(model.depth.training)
    return view


def _sharing(module: nn.Module) -> Any:
    """A new module object that shares the other's weights and submodules."""
    view = object.__new__(type(module))
    vars(view).update(vars(module))
    view._modules = dict(module._modules)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        setattr(view, name, collections.OrderedDict())
        setattr(view, f"{name}_with_kwargs", collections.OrderedDict())
    return view


def speculate(model: Any, stock: Callable[..., Any], passes: int, tokens: int, kwargs: dict[str, Any]) -> Any:
    """The result of `generate(**kwargs)`, drafted with `passes` passes, `tokens` at a time. Sets `model.speculation`.

    Raises:
        ValueError: a mode other than greedy decoding and sampling, an assistant beside the draft, several rows, no
            token to draft, or what `with_passes` refuses.
    """
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ValueError(f"draft_tokens={tokens!r}: use an integer ≥ 1")
    if kwargs.get("assistant_model") is not None:
        raise ValueError(f"draft_passes={passes!r} beside assistant_model: use one of them")
    view = with_passes(model, passes)
    asked = {name: value for name, value in kwargs.items() if name not in ("tokenizer", "generation_config", "inputs")}
    config, _ = model._prepare_generation_config(kwargs.get("generation_config"), **asked)
    mode = config.get_generation_mode(None)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"draft_passes={passes!r} with mode {mode.value}: only greedy decoding and sampling speculate")
    ids = kwargs.get("inputs") if kwargs.get("inputs") is not None else kwargs.get("input_ids")
    rows = (1 if ids is None else len(ids)) * (config.num_return_sequences or 1)
    if rows > 1:
        raise ValueError(f"draft_passes={passes!r} with {rows} rows: rows accept different numbers of tokens; give one")
    view.generation_config = copy.deepcopy(model.generation_config)
    view.generation_config.num_assistant_tokens = tokens
    view.generation_config.num_assistant_tokens_schedule = "constant"
    view.generation_config.assistant_confidence_threshold = 0.0
    counted = Speculation()

    def count(module: Any, args: Any, given: Any, output: Any) -> None:
        counted.forwards += module is model
        counted.drafted += module is not model

    handles = [each.register_forward_hook(count, with_kwargs=True) for each in (model, view)]
    try:
        found = stock(**{**kwargs, "assistant_model": view})
    finally:
        for handle in handles:
            handle.remove()
    sequences = found if isinstance(found, torch.Tensor) else found.sequences
    new = sequences.shape[1] - (0 if ids is None else ids.shape[1])
    counted.accepted = max(0, new - counted.forwards)
    logger.info("%d of %d drafted tokens were accepted (%.2f)", counted.accepted, counted.drafted, counted.rate)
    model.speculation = counted
    return found

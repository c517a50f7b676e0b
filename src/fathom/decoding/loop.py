"""Greedy decoding and sampling: transformers' loop with less work between forwards. Tokens, scores, logits are equal.

    read the prompt → logits → processors → argmax or a draw → pads for finished rows → stop? → one step → logits …

In small models transformers' extra work costs a fifth of a step or more: inputs that are prepared again from the whole
text, masks and positions that grow by concatenation, and stopping criteria that build tensors to compare two lengths.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, EosTokenCriteria, GenerationConfig, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from fathom.decoding.fixed import FixedStep, uncompilable, unsuited
from fathom.decoding.graphs import recorder_for
from fathom.decoding.growing import give_room
from fathom.decoding.switch import logger, say
from fathom.decoding.versions import CACHE_NAME


@torch.no_grad()
def sample(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Token ids [B, prompt + new]; with `return_dict_in_generate`, transformers' output object that has them.

    The arguments are those that transformers passes to a `custom_generate`.
    """
    config = generation_config
    cache = model_kwargs.get(CACHE_NAME)
    if not getattr(cache, "_is_user_defined", False):
        give_room(cache, input_ids.shape[1], stopping_criteria.max_length)
        mask = model_kwargs.get("attention_mask")
        if mask is not None and bool(mask.all()):  # 5.17 hands it on, and a mask costs the causal kernel
            model_kwargs["attention_mask"] = None
    output = model._prefill(input_ids, config, model_kwargs)
    step = step_for(model, output[CACHE_NAME], model_kwargs, None if config.disable_compile else config.compile_config)
    stop = Stop(stopping_criteria)
    pad: Any = config._pad_token_tensor if stop.pads else None  # type: ignore[attr-defined]
    pad = None if pad is None else pad.to(input_ids.device)
    scores: Any = () if config.return_dict_in_generate and config.output_scores else None
    kept: Any = () if config.return_dict_in_generate and config.output_logits else None
    running = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
    logits = output.logits[:, -1]
    del output  # its logits may be those of a long prompt
    with experts_for_steps(model, len(input_ids)):
        while True:
            raw = logits.to(copy=True, dtype=torch.float32, device=input_ids.device)
            score = logits_processor(input_ids, raw) if logits_processor else raw
            if scores is not None:
                scores += (score,)
            if kept is not None:
                kept += (raw,)
            if config.do_sample:
                token = torch.multinomial(score.softmax(-1), num_samples=1).squeeze(1)
            else:
                token = score.argmax(-1)
            if stop.pads:
                token = token * running + pad * (1 - running)
            input_ids = torch.cat((input_ids, token[:, None]), dim=-1)
            if streamer is not None:
                streamer.put(token.cpu())
            if stop(input_ids, scores, running):
                break
            logits = step(token[:, None])
    if streamer is not None:
        streamer.end()
    if not config.return_dict_in_generate:
        return input_ids
    found: dict[str, Any] = {"sequences": input_ids, "scores": scores, "logits": kept, CACHE_NAME: step.finish()}
    return GenerateDecoderOnlyOutput(**found)


def experts_for_steps(model: Any, rows: int) -> Any:
    """A context in which the experts of a mixture are computed the way that is fastest for steps of `rows` rows.

    On a GPU transformers copies the weights of each token's experts side by side in every step (`batched_mm`). That is
    faster for one row. With so many rows that they pick more experts than there are, the copies are larger than all
    weights, so grouped products are used. On one H200 with 8 of 64 experts a step takes 0.88 ms with copies and 0.91 ms
    with grouped products for 1 row, 5.87 and 1.84 ms for 32 rows (docs/results/growth.md).
    """
    section = getattr(model.config, "feed_forward", None) or {}
    if section.get("name") == "moe" and rows * section["active"] > section["experts"]:
        return nullcontext()
    return model._optimize_model_for_decode()


def step_for(model: Any, cache: Any, model_kwargs: dict[str, Any], how: CompileConfig | None = None) -> Any:
    """The object that runs the steps after this prompt: a recorded one where the device and the model allow it.

    how: the caller's wish to have layers compiled.
    """
    recorder = recorder_for(model.device)
    reason = "" if recorder is None else unsuited(model, cache, model_kwargs)
    if how is not None:
        nowhere = f"steps are recorded on a GPU alone, with switch.GRAPHS on; the model is on {model.device}"
        unmet = nowhere if recorder is None else reason or uncompilable(model, cache)
        if unmet:
            logger.warning("compile_config is not used: %s", unmet)
            how = None
    if recorder is not None and not reason:
        return FixedStep(model, cache, model_kwargs, recorder, how)
    if reason:
        say(f"steps are not recorded: {reason}")
    return Step(model, cache, model_kwargs)


class Stop:
    """The stopping rule: true once every row has finished. It sets `running` [B] to 0 for rows that have.

    Lengths are compared on the CPU and ends of text in one operation; other criteria are called as they are.
    pads: whether finished rows get pads, which they do if an end of text is known.
    """

    def __init__(self, criteria: Any):
        self.longest = min((each.max_length for each in criteria if type(each) is MaxLengthCriteria), default=None)
        self.ends = [each for each in criteria if type(each) is EosTokenCriteria]
        self.others = [each for each in criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria)]
        self.pads = any(hasattr(each, "eos_token_id") for each in criteria)

    def __call__(self, input_ids: Tensor, scores: Any, running: Tensor) -> bool:
        full = self.longest is not None and input_ids.shape[1] >= self.longest
        if not self.ends and not self.others:
            return full
        for each in (*self.ends, *self.others):
            running &= ~each(input_ids, scores)
        return full or not bool(running.any())


class Step:
    """One forward of one new token a row, on the cache that holds the text before: token [B,1] → logits [B,V]."""

    def __init__(self, model: Any, cache: Any, model_kwargs: dict[str, Any]):
        self.model, self.cache = model, cache
        kept = {"attention_mask", "position_ids", CACHE_NAME}
        self.inputs = {name: value for name, value in model_kwargs.items() if name not in kept}
        self.inputs |= {CACHE_NAME: cache, "return_dict": True}
        positions = model_kwargs.get("position_ids")
        self.position = None if positions is None else positions[..., -1:]
        self.mask = model_kwargs.get("attention_mask")

    def finish(self) -> Any:
        """The cache that holds the text."""
        return self.cache

    def __call__(self, token: Tensor) -> Tensor:
        inputs = self.inputs
        if self.position is not None:
            self.position = self.position + 1
            inputs = {**inputs, "position_ids": self.position}
        if self.mask is not None:
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
            inputs = {**inputs, "attention_mask": self.mask}
        return self.model(input_ids=token, **inputs).logits[:, -1]

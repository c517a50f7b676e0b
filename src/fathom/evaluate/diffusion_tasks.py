"""lm_eval's requests answered by a masked diffusion model.

    loglikelihood    −(bound on −log p(continuation | context)), by Monte Carlo of `DRAWS` passes (LLaDA's number); a
                     continuation of one token is exact with one. So accuracies compare bounds, and perplexities are
                     upper bounds. "Greedy" is what the sampler writes at temperature 0, one token a step
    generate_until   blocks of at most `BLOCK` tokens from left to right, one token a step, cut at the stop sequences

Nothing follows a continuation, and a request's draws depend only on its tokens, so batches do not change a score.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from fathom.diffusion.base import own_blocks
from fathom.diffusion.likelihood import bound
from fathom.evaluate.tasks import answers_fit

DRAWS = 128
BLOCK = 32


class DiffusionLM(HFLM):
    """A diffusion model as a model of lm_eval; tokens, chat templates and lengths are handled as for any other."""

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[tuple[float, bool]]:
        """(−bound in nats, greedy) of each ((context, continuation), context ids, continuation ids)."""
        answers_fit(requests, self.max_length)
        rows = [((before + after)[-self.max_length :], len(after)) for _, before, after in requests]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        alike = sorted(range(len(rows)), key=lambda i: (len(rows[i][0]), rows[i][1]))
        for (_, size), group in itertools.groupby(alike, key=lambda i: (len(rows[i][0]), rows[i][1])):
            numbers = list(group)
            for at in range(0, len(numbers), int(self.batch_size)):
                some = numbers[at : at + int(self.batch_size)]
                ids = torch.tensor([rows[i][0] for i in some], device=self.device)
                for i, score in zip(some, self.scores(ids, size), strict=True):
                    found[i] = score
        return found

    def scores(self, ids: torch.Tensor, size: int) -> list[tuple[float, bool]]:
        """The bound of each row's last `size` tokens, and whether the sampler writes the same ones."""
        if size == 0:
            return [(0.0, True)] * len(ids)
        model: Any = self.model
        answer = torch.zeros_like(ids, dtype=torch.bool)
        answer[:, -size:] = True
        own = model.diffusion
        draws = 1 if size == 1 else DRAWS
        nats, _ = bound(model, ids, answer, draws, mask_token_id=own.mask_token_id, shift=own.shift)
        blocks = own_blocks(model)
        room = size if blocks is None else -(-size // blocks) * blocks
        written = model.generate(ids[:, :-size], max_new_tokens=room, block_length=blocks)
        same = (written[:, : ids.shape[1]] == ids).all(1)
        return [(-n, bool(s)) for n, s in zip(nats.tolist(), same.tolist(), strict=True)]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """The answer of each (context, options), in the order of the requests."""
        found = []
        ends: Any = self.tokenizer.decode(self.eot_token_id)  # type: ignore[union-attr]
        for context, options in (request.args for request in requests):
            options = normalize_gen_kwargs(options, self.max_gen_toks)
            until = handle_stop_sequences(options.pop("until", None), eos=ends)
            size = options.pop("max_gen_toks")
            own = own_blocks(self.model)
            room = size if own is None else -(-size // own) * own  # whole blocks
            if room >= self.max_length:
                raise ValueError(f"max_gen_toks={size}: must be below the model's {self.max_length} positions")
            ids = self.tok_encode(context)[-(self.max_length - room) :] or [self.prefix_token_id]
            sampled = {name: options[name] for name in ("top_k", "top_p") if options.get(name)}
            out = self.model.generate(
                torch.tensor([ids], device=self.device), max_new_tokens=room, block_length=own or math.gcd(BLOCK, size),
                temperature=options.get("temperature", 1.0) if options.get("do_sample") else 0.0,
                stop_at_eos=self.model.config.eos_token_id is not None, **sampled,
            )  # fmt: skip
            text = self.tok_decode(out[0, len(ids) :][:size].tolist())
            for stop in filter(None, until):
                text = text.split(stop)[0]
            found.append(text)
            self.cache_hook.add_partial("generate_until", (context, options), text)
        return found

"""What a block cache costs a trained masked model: Sparse-dLLM, its rivals and other ways to evict, on the same rows.

    forced     nats of held-out text after a long prompt, one token a step, over those without a cache (forced.py)
    passkey    digits of a key that the prompt says once, somewhere, right; eviction by ratio
    jaccard    how alike the sets are that Sparse-dLLM would keep in steps that follow each other, and in its layers

python benchmarks/diffusion/caches.py --masked runs/diffusion/masked-seed0/model --corpus corpus -o caches
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "recipes")]
from forced import compared, forced, load, rows_of, summary
from make_diffusion_text import DIGITS, SAYS, documents, key

from fathom.diffusion import DKVCache, Dual, Prefix, SparseDLLM
from fathom.diffusion.sparse_dllm import SparseState
from fathom.writing import write_json

RATIOS = (0.75, 0.5, 0.25, 0.1, 0.05)
WAYS: dict[str, Any] = {
    "none": None,
    "sparse_0.5": SparseDLLM(),
    "sparse_0.5_delay0": SparseDLLM(delay_steps=0),
    "dual": Dual(),
    "dual_delay1": Dual(delay_steps=1),
    "prefix": Prefix(),
    "random_0.5": SparseDLLM(score="random"),
    "nearest_0.5": SparseDLLM(score="nearest"),
    "snapkv_0.5": SparseDLLM(score="snapkv"),
    "softmax_0.5": SparseDLLM(score="softmax"),
    "dkv_decode": DKVCache(),
    "dkv_greedy": DKVCache(mode="greedy"),
    "sparse_0.5_delay2": SparseDLLM(delay_steps=2),
    "sparse_0.5_unpooled": SparseDLLM(kernel_size=None),
    "sparse_0.5_suffix": SparseDLLM(evict="suffix"),
    **{f"{score}_{ratio}": SparseDLLM(keep_ratio=ratio, score=name)
       for ratio in RATIOS if ratio != 0.5
       for score, name in (("sparse", "dot"), ("random", "random"), ("nearest", "nearest"), ("snapkv", "snapkv"))},
    "sparse_0.1_delay0": SparseDLLM(keep_ratio=0.1, delay_steps=0),
    "sparse_0.25_delay0": SparseDLLM(keep_ratio=0.25, delay_steps=0),
    "sparse_0": SparseDLLM(keep_ratio=0.0),
}  # fmt: skip


def keyed(tokenizer: Any, words: list[int], length: int, depth: float, rows: int, seed: int) -> torch.Tensor:
    """Rows of `length` tokens of prose in which a key is said once, at `depth` (0 … 1), that end by saying it again."""
    draw = random.Random(seed)
    asks = tokenizer(SAYS)["input_ids"]
    found = []
    for _ in range(rows):
        digits = tokenizer(key(draw))["input_ids"]
        needle = [*asks, *digits, *tokenizer(".")["input_ids"]]
        room = length - len(needle) - len(asks) - DIGITS
        start = draw.randrange(len(words) - room)
        prose, cut = words[start : start + room], round(depth * room)
        found.append([*prose[:cut], *needle, *prose[cut:], *asks, *digits])
    return torch.tensor(found)


class Watching(SparseState):
    """Full passes only; what each of them would keep, [layers, R, L], goes to `sets`."""

    def states(self, canvas, hidden, step, quota):
        self.layers = []
        out = self.passes.full(canvas, self.evict)
        kept = torch.zeros(len(self.layers), *canvas.shape, dtype=torch.bool, device=canvas.device)
        for layer, one in enumerate(self.layers):
            kept[layer].scatter_(1, one.columns, True)
        sets.append((self.block.index, step, kept))
        return out


class Watched(SparseDLLM):
    def new_state(self, passes):
        return Watching(self, passes)


sets: list[tuple[int, int, torch.Tensor]] = []


def jaccard(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a & b).sum(-1) / (a | b).sum(-1)).double().mean())


def likenesses(model: Any, truth: torch.Tensor, prompt: int, block: int, ratio: float) -> dict[str, Any]:
    """Mean Jaccard index of kept sets: step by step, each step with the one that Sparse-dLLM evicts in, layer by
    layer. Of sets drawn at random it is r / (2 − r)."""
    sets.clear()
    forced(model, truth, prompt, len(truth), block_length=block, block_cache=Watched(keep_ratio=ratio))
    follows = [
        jaccard(one, two) for (b, _, one), (c, _, two) in pairwise(sets) if b == c
    ]  # fmt: skip
    steps = max(step for _, step, _ in sets) + 1
    first = {b: kept for b, step, kept in sets if step == 1}
    with_first = [
        statistics.fmean(jaccard(first[b], kept) for b, s, kept in sets if s == step) for step in range(steps)
    ]
    layers = [jaccard(kept[layer], kept[layer + 1]) for _, _, kept in sets for layer in range(len(kept) - 1)]
    return {
        "ratio": ratio, "at_random": ratio / (2 - ratio), "next_step": statistics.fmean(follows),
        "first_to_second_step": statistics.fmean(
            jaccard(one, first[b]) for b, step, one in sets if step == 0
        ),
        "with_evicting_step": with_first, "next_layer": statistics.fmean(layers), "rows": len(truth),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masked", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--deadline", type=float, default=float("inf"), help="unix seconds after which nothing begins")
    parser.add_argument("-o", "--output", type=Path, default=Path("caches"))
    given = parser.parse_args()
    model = load(given.masked)
    tokenizer: Any = AutoTokenizer.from_pretrained(given.masked)
    prose = list(islice(documents(sorted((given.corpus / "validation").glob("*.xz"))), 80))
    given.output.mkdir(parents=True, exist_ok=True)
    words = tokenizer(" ".join(text[:200_000] for text in prose[:3]), add_special_tokens=False)["input_ids"]

    # keys at every depth; the answer is one block of as many steps, the first two of which are full passes
    found: list[dict[str, Any]] = []
    length, per_depth = given.length - 16, max(1, given.rows // 6)
    keys = torch.cat([keyed(tokenizer, words, length, d / 5, per_depth, 7 + d) for d in range(6)]).to(model.device)
    for name, cache in WAYS.items():
        if time.time() > given.deadline:
            break
        got = forced(model, keys, length - DIGITS, block_length=DIGITS, block_cache=cache)
        out = model.generate(keys[:, :-DIGITS], max_new_tokens=DIGITS, block_length=DIGITS, block_cache=cache)
        same = (out[:, -DIGITS:] == keys[:, -DIGITS:]).double()
        found.append({
            "cache": name, "digits_right": summary(same.mean(1).tolist()),
            "keys_right": summary(same.min(1).values.tolist()),
            "nats_per_digit": summary(got["nats"], DIGITS), "nfe": got["nfe"],
            "by_depth": same.mean(1).view(6, -1).mean(1).tolist(),
        })  # fmt: skip
        write_json(given.output / "passkey.json", found)

    block = given.length // 16
    prompt = given.length - 4 * block
    truth = rows_of(prose, tokenizer, given.length, given.rows, model.device)
    write_json(
        given.output / "jaccard.json",
        [likenesses(model, truth[: given.rows // 4], prompt, block, ratio) for ratio in (0.5, 0.1)],
    )
    rows: list[dict[str, Any]] = []
    nats: dict[str, list[float]] = {}
    for name, cache in WAYS.items():
        if time.time() > given.deadline:
            break
        got = forced(model, truth, prompt, given.rows, block_length=block, block_cache=cache)
        size = given.length - prompt
        nats[name] = got["nats"]
        rows.append({
            "cache": name, "nats_per_token": summary(got["nats"], size),
            "over_none": compared(got["nats"], nats["none"], size),
            **{part: got[part] for part in ("nfe", "cache_bytes_a_row", "columns_a_row")},
        })  # fmt: skip
        if name.endswith("_delay0"):
            rows[-1]["over_delay1"] = compared(got["nats"], nats[name.removesuffix("_delay0")], size)
        write_json(given.output / "forced.json", rows)


if __name__ == "__main__":
    main()

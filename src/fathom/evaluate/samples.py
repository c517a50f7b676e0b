"""Texts that models write, read by an outside judge and compared where they are equally diverse.

    perplexity = exp(Σ −log p(continuation | prompt) / Σ its tokens),  by the judge, in the judge's own tokens
    entropy    = mean over texts of −Σ p log p of a text's tokens by their own counts, in nats

A judge likes texts of few different words. So every writer is sampled at temperatures at which its entropy lies clearly
below and above that of held-out continuations of the same prompts, and its perplexity at theirs is interpolated,
linearly in log perplexity. The judge splits prompt and continuation into tokens each by itself. Short texts have little
to tell entropies by: give them 48 tokens or more. All intervals are of 95 %, by drawing prompts anew, the same for all
writers.

Equal quality: a way to write keeps it where its perplexity is at most 1.02 times that of its model's one token a step
without a cache. Speed counts whole answers as a user gets them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig

from fathom.data.packing import encode
from fathom.diffusion import DiffusionGenerationConfig
from fathom.diffusion.base import is_diffusion, own_blocks
from fathom.diffusion.sampling import Sampler
from fathom.evaluate.text import positions
from fathom.models.method import check_range
from fathom.writing import whole

KEPT = 1.02  # of the perplexity of one token a step
RESAMPLES = 1000
ERRORS = 2  # so many standard errors tell entropies apart


@dataclasses.dataclass(frozen=True)
class SamplesConfig:
    """How texts are written.

    Attributes:
        samples: prompts, and continuations of each writer.
        prompt_tokens, new_tokens: of a text.
        temperatures: rising; a writer takes those that it needs.
        steps: of diffusion models; None: those of one, two, four and eight tokens a step.
        policies, block_caches: of diffusion models. `none` and one token a step is always among the ways.
        block_length: of diffusion models; None: the model's own, else all new tokens as one block.
        batch_size: texts written, or judged, at once.
        seed: of the sampling.
    """

    samples: int = 256
    prompt_tokens: int = 32
    new_tokens: int = 64
    temperatures: tuple[float, ...] = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6)
    steps: tuple[int, ...] | None = None
    policies: tuple[str, ...] = ("low_confidence",)
    block_caches: tuple[str, ...] = ("none",)
    block_length: int | None = None
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "prompt_tokens", "new_tokens", "batch_size"):
            check_range("judge", name, getattr(self, name), 2 if name == "samples" else 1)
        rising = list(self.temperatures) == sorted(set(self.temperatures)) and self.temperatures[:1] > (0,)
        if not rising or len(self.temperatures) < 2 or not all(map(math.isfinite, self.temperatures)):
            raise ValueError(
                f"judge option temperatures={self.temperatures}: must be two or more above 0, finite and rising"
            )

    def ways(self, model: Any) -> list[Way]:
        """The ways in which this model writes, the slow one that others are held against first."""
        if not is_diffusion(model):
            return [Way()]
        most, block = self.new_tokens, self.block_length or own_blocks(model) or self.new_tokens
        evenly = [most // n for n in (1, 2, 4, 8) if most % n == 0 and most // n % (most // block or 1) == 0]
        steps = sorted(self.steps or evenly, reverse=True)
        pairs = dict.fromkeys([("none", most), *((cache, number) for cache in self.block_caches for number in steps)])
        return [Way(policy, *pair, block) for policy in self.policies for pair in pairs]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a model writes; an autoregressive one token by token with its cache."""

    policy: str | None = None
    block_cache: str | None = None
    steps: int | None = None
    block_length: int | None = None

    def __str__(self) -> str:
        if self.policy is None:
            return "token by token, cache"
        cache = "" if self.block_cache == "none" else f", {self.block_cache}"
        return f"{self.policy}, {self.steps} steps{cache}"


@dataclasses.dataclass(frozen=True)
class Texts:
    """Continuations at one temperature. Of each: entropy, and when judged −log p in nats and the judge's tokens."""

    temperature: float | None
    ids: Int[Tensor, "n new"]
    entropies: np.ndarray
    nfe: int = 0
    seconds: float = 0.0
    nats: np.ndarray | None = None
    tokens: np.ndarray | None = None

    def log_perplexity(self, chosen: Any = slice(None)) -> Any:
        """Σ nats / Σ tokens of the chosen texts; of each row of an array of choices."""
        assert self.nats is not None and self.tokens is not None
        return self.nats[chosen].sum(-1) / self.tokens[chosen].sum(-1)


def compare_samples(
    models: dict[str, tuple[Any, Any]],
    judge: tuple[Any, Any],
    documents: Sequence[str],
    config: SamplesConfig,
    say: Callable[[str], None] = print,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Rows for every model and way, and of each model the fastest way that keeps quality.

    models: by name, (model, tokenizer); all tokenizers must read the text alike. judge: a causal language model and its
    tokenizer, which may be another. `keep` gets the result so far after every row.

    A row has model, way, nfe, tokens_per_second, temperatures (at which the texts lie on both sides of the data's
    entropy) and perplexity there with `low` and `high`, None where none lie clearly so; and `over_reference`,
    the quotient of perplexities with its interval, and `kept`: True, False, or None where the interval holds 1.02.

    Raises ValueError for tokenizers that differ, a text, a model or a judge too short, outputs that are no numbers, and
    a judge that is a diffusion model or whose tokenizer has neither BOS nor EOS, or cannot go on within a word.
    """
    if is_diffusion(judge[0]):
        raise ValueError("judge: a diffusion model has no exact loss of a text; use a causal language model")
    if judge[1].bos_token_id is None and judge[1].eos_token_id is None:
        raise ValueError("judge: its tokenizer has no BOS and no EOS token for it to begin with; use another judge")
    parts, whole = encode(["a", "b"], judge[1]), encode(["ab"], judge[1])
    if judge[1].decode([*parts[0], *parts[1]]) != judge[1].decode(whole[0]):
        raise ValueError("judge: its tokenizer puts a space before every text, so no word goes on; use another judge")
    first, (_, tokenizer) = next(iter(models.items()))
    length = config.prompt_tokens + config.new_tokens
    for name, (model, _) in models.items():
        limit = positions(model)
        if limit is not None and length > limit:
            raise ValueError(f"{name}: texts of {length} tokens are longer than the model's {limit} positions")
    ids = stream(documents, tokenizer)
    for name, (_, own) in models.items():
        if own is not tokenizer and stream(documents, own) != ids:
            raise ValueError(f"{name}: reads text by another tokenizer than {first}, so entropies do not compare")
    rows = stretches(ids, length, config.samples)
    ways = [(name, way) for name, (model, _) in models.items() for way in config.ways(model)]
    for name, (model, _) in models.items():
        refuse_no_numbers(name, model, rows[:1])
    for name, way in ways:  # refused before anything is written
        if way.policy is not None:
            one = rows[:1, : config.prompt_tokens].to(models[name][0].device)
            Sampler(models[name][0], one, None, DiffusionGenerationConfig(config.new_tokens, **dataclasses.asdict(way)))
    prompts, true = rows[:, : config.prompt_tokens], rows[:, config.prompt_tokens :]
    data = judged(Texts(None, true, entropies(true)), prompts, tokenizer, judge, config.batch_size)
    wanted = float(data.entropies.mean())
    draws = np.random.default_rng(config.seed).integers(0, len(rows), (RESAMPLES, len(rows)))
    result: dict[str, Any] = {
        "config": dataclasses.asdict(config), "samples": len(rows), "rows": [], "equal_quality": [],
        "data": {"perplexity": math.exp(data.log_perplexity()), "entropy": wanted, "text": tokenizer.decode(true[0])},
    }  # fmt: skip
    say(f"held-out text: perplexity {result['data']['perplexity']:.1f} at entropy {wanted:.3f}")
    references: dict[tuple[str, str | None], Matched | None] = {}  # by model and policy: its first way
    near = min(range(len(config.temperatures)), key=lambda i: abs(config.temperatures[i] - 1))
    for name, way in ways:
        own = models[name][1]

        def write(i: int, model: Any = models[name][0], own: Any = own, way: Way = way) -> Texts:
            return written(model, own, prompts, way, config, config.temperatures[i])

        sides, near = around(write, len(config.temperatures), side_of(data), near)
        sides = [judged(side, prompts, own, judge, config.batch_size) for side in sides]
        found = Matched.between(sides, data, draws) if len(sides) == 2 else None
        reference = references.setdefault((name, way.policy), found)
        row: dict[str, Any] = {
            "model": name, **dataclasses.asdict(way), "way": str(way), "nfe": sides[0].nfe,
            "tokens_per_second": len(sides) * true.numel() / sum(side.seconds for side in sides),
            "at": [{"temperature": side.temperature, "entropy": float(side.entropies.mean()),
                    "perplexity": math.exp(side.log_perplexity())} for side in sides],
            "perplexity": None, "over_reference": None, "kept": None,
            "text": own.decode(sides[0].ids[0], skip_special_tokens=True),
        }  # fmt: skip
        if found is not None:
            row["perplexity"] = found.said()
        if found is not None and reference is not None:
            over = Matched(found.value - reference.value, found.drawn - reference.drawn).said()
            row["over_reference"] = over
            row["kept"] = True if over["high"] <= KEPT else False if over["low"] > KEPT else None
        result["rows"].append(row)
        result["equal_quality"] = equal_quality(result["rows"])
        say(line(row))
        if keep is not None:
            keep(result)
    return result


@dataclasses.dataclass(frozen=True)
class Matched:
    """Log perplexity at the data's entropy, or a difference of two, and the same of resampled prompts."""

    value: float
    drawn: np.ndarray

    @classmethod
    def between(cls, sides: Sequence[Texts], data: Texts, draws: np.ndarray) -> Matched:
        def at(chosen: Any) -> Any:
            (a, low), (b, high) = ((s.entropies[chosen].mean(-1), s.log_perplexity(chosen)) for s in sides)
            share = (data.entropies[chosen].mean(-1) - a) / np.maximum(b - a, 1e-9)  # few prompts may turn them round
            return low + share.clip(-1, 2) * (high - low)

        return cls(float(at(slice(None))), at(draws))

    def said(self) -> dict[str, float]:
        low, high = np.exp(np.quantile(self.drawn, (0.025, 0.975)))
        return {"value": math.exp(self.value), "low": float(low), "high": float(high)}


def around(
    write: Callable[[int], Texts], count: int, side: Callable[[Texts], int], near: int
) -> tuple[list[Texts], int]:
    """The texts at two temperatures, of `count`, the closest of which `side` says −1 and 1; or those at the end of the
    range alone, where none lies beyond. And where to begin next time."""
    found: dict[int, Texts] = {}

    def at(i: int) -> int:
        if i not in found:
            found[i] = write(i)
        return side(found[i])

    low = high = near
    while at(low) >= 0 and low > 0:
        low -= 1
    while at(high) <= 0 and high < count - 1:
        high += 1
    below, above = ([i for i in found if at(i) == sign] for sign in (-1, 1))
    if below and above:
        return [found[max(below)], found[min(above)]], (max(below) + min(above)) // 2
    return [found[high if below or not above else low]], high if below or not above else low


def side_of(data: Texts) -> Callable[[Texts], int]:
    """−1 or 1 where texts have a mean entropy below or above the data's by more than two standard errors over the
    prompts, 0 between: interpolation between two that the prompts do not tell apart would say nothing."""

    def side(texts: Texts) -> int:
        apart = texts.entropies - data.entropies
        error = apart.std(ddof=1) / math.sqrt(len(apart))
        return 0 if abs(apart.mean()) <= ERRORS * error else int(np.sign(apart.mean()))

    return side


@torch.no_grad()
def refuse_no_numbers(name: str, model: Any, rows: Int[Tensor, "n L"]) -> None:
    """Raise ValueError for a model whose logits are no numbers, of which a sampler would draw the first token."""
    if bool(model(input_ids=rows.to(model.device)).logits.isnan().any()):
        raise ValueError(
            f"{name}: its logits of the held-out text are not numbers; its weights are damaged, or overflow"
        )


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The ids that end a text, for the model or for its tokenizer."""
    config = getattr(model, "generation_config", None)
    found = [getattr(one, "eos_token_id", None) for one in (config, model.config, tokenizer)]
    return sorted({end for ends in found if ends is not None for end in (ends if isinstance(ends, list) else [ends])})


@torch.no_grad()
def written(
    model: Any, tokenizer: Any, prompts: Int[Tensor, "n P"], way: Way, config: SamplesConfig, temperature: float
) -> Texts:
    """Continuations of all prompts. EOS is never written, so that all have the same length."""
    found, nfe, ends = [], config.new_tokens, end_tokens(model, tokenizer)
    of_checkpoint = getattr(model, "generation_config", None)
    if way.policy is None:
        model.generation_config = GenerationConfig()  # its own may penalise or leave out tokens, or ask for beams
    start = time.perf_counter()
    try:
        for at in range(0, len(prompts), config.batch_size):
            some = prompts[at : at + config.batch_size].to(model.device)
            if way.policy is None:
                torch.manual_seed(config.seed + at)
                ids = model.generate(
                    some, attention_mask=torch.ones_like(some), do_sample=True, temperature=temperature, top_k=0,
                    top_p=1.0, max_new_tokens=config.new_tokens, suppress_tokens=ends or None,
                )  # fmt: skip
            else:
                out = model.generate(
                    some, max_new_tokens=config.new_tokens, temperature=temperature, seed=config.seed + at,
                    suppress_eos="logit" if ends else None, eos_token_id=ends or None, return_dict_in_generate=True,
                    **dataclasses.asdict(way),
                )  # fmt: skip
                ids, nfe = out.sequences, sum(out.nfe.values())
            found.append(ids[:, prompts.shape[1] :].cpu())
    finally:
        if way.policy is None:
            model.generation_config = of_checkpoint
    seconds = time.perf_counter() - start
    new = torch.cat(found)
    return Texts(temperature, new, entropies(new), nfe, seconds)


def read(prompt: list[int], new: list[int], tokenizer: Any) -> tuple[str, str]:
    """The texts of a prompt and of what follows it. By themselves new tokens may lack the space that they begin with,
    and both the character that they share."""
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *new]))
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False)))
    return whole[:shared], whole[shared:]


@torch.no_grad()
def judged(texts: Texts, prompts: Int[Tensor, "n P"], tokenizer: Any, judge: tuple[Any, Any], batch: int) -> Texts:
    """The same texts with the judge's nats and tokens, each after its prompt. Raises ValueError where they are longer
    than the judge's positions, or it gives no numbers."""
    reader, own = judge
    pairs = [encode([*read(*both, tokenizer)], own) for both in zip(prompts.tolist(), texts.ids.tolist(), strict=True)]
    longest, limit = 1 + max(sum(map(len, pair)) for pair in pairs), positions(reader)
    if limit is not None and longest > limit:
        raise ValueError(
            f"judge: a text has {longest} of its tokens, more than its {limit} positions; give fewer --prompt-tokens "
            "or --max-new-tokens, or another judge"
        )
    start = own.bos_token_id if own.bos_token_id is not None else own.eos_token_id
    nats, order = np.zeros(len(pairs)), sorted(range(len(pairs)), key=lambda i: sum(map(len, pairs[i])))
    for at in range(0, len(order), batch):
        some = order[at : at + batch]
        full = [torch.tensor([start, *pairs[i][0], *pairs[i][1]]) for i in some]
        ids = torch.nn.utils.rnn.pad_sequence(full, batch_first=True).to(reader.device)  # padded behind: not seen
        logits = reader(input_ids=ids[:, :-1], use_cache=False).logits.float()
        losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").double()
        for loss, i in zip(losses, some, strict=True):
            before, new = map(len, pairs[i])
            nats[i] = float(loss[before : before + new].sum())
    tokens = np.array([len(new) for _, new in pairs])
    if not np.isfinite(nats).all():
        raise ValueError("judge: its losses are not finite; its weights are damaged, or overflow: use another judge")
    if not tokens.any():
        raise ValueError(f"temperature {texts.temperature}: all texts are empty, so the judge has nothing to read")
    return dataclasses.replace(texts, nats=nats, tokens=tokens)


def stream(documents: Sequence[str], tokenizer: Any) -> list[int]:
    """The tokens of all documents, one after the other."""
    return [token for ids in encode(list(documents), tokenizer) for token in ids]


def stretches(ids: Sequence[int], length: int, count: int) -> Int[Tensor, "n L"]:
    """`count` stretches of `length` tokens, evenly spread. Raises ValueError where they overlap."""
    if len(ids) < count * length:
        raise ValueError(f"--text: {len(ids):,} tokens hold {len(ids) // length} texts of {length}, not {count}")
    starts = [i * (len(ids) - length) // (count - 1) for i in range(count)]
    return torch.tensor([ids[start : start + length] for start in starts])


def entropies(rows: Int[Tensor, "n L"]) -> np.ndarray:
    """`entropy` of each row."""
    return np.array([entropy(row) for row in rows.tolist()])


def entropy(row: Sequence[int]) -> float:
    """−Σ p log p of the tokens of a text by their own counts, in nats."""
    counts = Counter(row)
    return -sum(n / len(row) * math.log(n / len(row)) for n in counts.values())


def equal_quality(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By model and policy, its fastest way of at most 1.02 times the perplexity of one token a step, and how much
    faster it is. `kept` says whether the interval is below 1.02 too."""
    found = []
    for name, policy in dict.fromkeys((row["model"], row["policy"]) for row in rows):
        own = [row for row in rows if (row["model"], row["policy"]) == (name, policy)]
        good = [row for row in own if row["over_reference"] is not None and row["over_reference"]["value"] <= KEPT]
        if good:
            best = max(good, key=lambda row: row["tokens_per_second"])
            times = best["tokens_per_second"] / own[0]["tokens_per_second"]
            found.append(
                {name: best[name] for name in ("model", "way", "tokens_per_second", "kept")} | {"times": times}
            )
    return found


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    start, speed = f"{row['model']}: {row['way']}", f"{row['nfe']} passes, {row['tokens_per_second']:,.0f} tokens/s"
    found = row["perplexity"]
    if found is None:
        at = row["at"][0]
        said = f"entropy {at['entropy']:.3f} at temperature {at['temperature']:g} is not clearly beyond the data's"
    else:
        low, high = (side["temperature"] for side in row["at"])
        said = f"perplexity {found['value']:.1f} [{found['low']:.1f}, {found['high']:.1f}] (τ {low:g} to {high:g})"
        over = row["over_reference"]
        if over is not None and over["low"] != over["high"]:
            said += f", {over['value']:.3f} [{over['low']:.3f}, {over['high']:.3f}] times one token a step"
    return f"{start}: {said}, {speed}"


def draw(result: dict[str, Any], path: Path, colours: dict[str, str], theme: str) -> None:
    """Perplexity at the data's entropy against passes and against tokens/s, with the data's own as a line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    from fathom.report.style import styles

    rows = [row for row in result["rows"] if row["perplexity"] is not None]
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cache = "" if row["block_cache"] in (None, "none") else f", {row['block_cache']}"
        lines.setdefault(f"{row['model']}{'' if row['policy'] is None else ', ' + row['policy']}{cache}", []).append(
            row
        )
    marks = styles(list(lines))
    figure = Figure(figsize=(8.4, 3.8), dpi=150, facecolor=colours["page"], layout="constrained")
    for axes, quantity, label in zip(
        figure.subplots(1, 2, sharey=True), ("nfe", "tokens_per_second"), ("forward passes", "tokens/s"), strict=True
    ):
        axes.set_facecolor(colours["page"])
        for name, points in lines.items():
            points, style = sorted(points, key=lambda row: row["nfe"]), marks[name]
            y = [row["perplexity"] for row in points]
            bars = [[p["value"] - p["low"] for p in y], [p["high"] - p["value"] for p in y]]
            axes.errorbar(
                [row[quantity] for row in points], [p["value"] for p in y], yerr=bars, color=getattr(style, theme),
                marker=style.marker, linestyle=style.line, linewidth=1.4, markersize=5, capsize=3, label=name,
            )  # fmt: skip
        axes.axhline(result["data"]["perplexity"], color=colours["muted"], linewidth=1, linestyle=":", label="held-out")
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(EngFormatter(sep=" "))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(label, color=colours["ink"])
        axes.tick_params(colors=colours["muted"], which="both")
        axes.grid(color=colours["grid"])
        for side in axes.spines.values():
            side.set_color(colours["muted"])
    figure.axes[0].set_ylabel(f"judge's perplexity at entropy {result['data']['entropy']:.2f}", color=colours["ink"])
    figure.axes[0].legend(frameon=False, labelcolor=colours["ink"], fontsize=8)
    with whole(path) as partial:
        figure.savefig(partial, format="png")

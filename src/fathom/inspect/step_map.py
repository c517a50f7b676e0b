"""Which tokens of a text run how many steps: of models whose tokens stop on their own.

A step is spent on reading a token and predicting the next one: the loss beside it is the next token's. Every token is
in one class, and pieces of words that the tokenizer has split are shown once more:

    function words    of a list of English ones
    numbers           the token has a digit
    rare words        the word occurs once in the text
    other words
    punctuation       no letter and no digit
"""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any, Self

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fathom.evaluate.steps_run import is_adaptive, steps_run
from fathom.inspect.base import Picture, shaded, token_texts

PASSAGE = 240  # tokens of the shaded passage
BINS = 10  # equal numbers of tokens, by loss
CLASSES = ("function words", "numbers", "rare words", "other words", "punctuation")
PIECES = ("first piece of a split word", "later pieces")
_WORD = re.compile(r"[^\W\d_]+")
FUNCTION_WORDS = frozenset(
    _WORD.findall("""
    a about above after again against all am an and any are as at be because been before being below between both but by
    can could did do does doing down during each few for from further had has have having he her here hers him his how i
    if in into is it its just me more most my no nor not of off on once only or other our out over own s same she should
    so some such t than that the their them then there these they this those through to too under until up us very was
    we were what when where which while who whom why will with would you your
    """)
)


@dataclasses.dataclass(frozen=True)
class StepMap(Picture):
    """The steps that the tokens of one text ran.

    Attributes:
        tokens, window: tokens counted, and how many were read at once.
        most, mean: steps that a token can run, and ran.
        histogram: tokens that ran 1, 2, … steps.
        losses: mean loss, in nats, of what these tokens predict; None for no token.
        bins: tokens in order of loss, in groups of one size: mean `loss` and `steps`.
        classes: `name`, `tokens`, mean `steps`, and `share` of all steps; the pieces of split words last.
        passage: [text, steps, loss] of the first tokens.
    """

    name = "steps"
    title = "Which tokens run how many steps"
    shows = "models whose tokens stop on their own (act, adaponderlm, adaptive_latent_cot, exit_gate, ponderlm3)"

    tokens: int
    window: int
    most: int
    mean: float
    histogram: list[int]
    losses: list[float | None]
    bins: list[dict[str, float]]
    classes: list[dict[str, Any]]
    passage: list[list[Any]]

    @classmethod
    def offered(cls, config) -> bool:
        return is_adaptive(config)

    @classmethod
    def measure(cls, model, tokenizer, token_ids, window, batch_size=8) -> Self:
        steps = steps_run(model, token_ids, window, batch_size)
        passes, losses = steps.passes, steps.losses.double()
        texts = token_texts(tokenizer, token_ids)[:-1]
        named = classify(texts)
        groups = [
            (name, torch.tensor([name in names for names in named])) for name in (*CLASSES, *PIECES)
        ]  # a token is in one class, and may be a piece
        order = losses.argsort()
        by_steps = [losses[passes == n + 1] for n in range(steps.most)]
        return cls(
            tokens=len(texts),
            window=steps.window,
            most=steps.most,
            mean=steps.mean,
            histogram=[len(found) for found in by_steps],
            losses=[found.mean().item() if len(found) else None for found in by_steps],
            bins=[
                {"loss": losses[part].mean().item(), "steps": passes[part].double().mean().item()}
                for part in order.tensor_split(min(BINS, len(order)))
            ],
            classes=[
                {
                    "name": name,
                    "tokens": int(inside.sum()),
                    "steps": passes[inside].double().mean().item(),
                    "share": (passes[inside].sum() / passes.sum()).item(),
                }
                for name, inside in groups
                if inside.any()
            ],
            passage=[
                [text, int(n), float(loss)]
                for text, n, loss in zip(texts[:PASSAGE], passes.tolist(), losses.tolist(), strict=False)
            ],
        )

    @property
    def ran(self) -> tuple[float, ...]:
        """The share of tokens that ran step 0, 1, …: what `fathom.cost` takes as `ran`."""
        return tuple(sum(self.histogram[step:]) / self.tokens for step in range(self.most))

    def summary(self):
        lines = [f"{self.mean:.3f} of {self.most} steps a token over {self.tokens:,} tokens"]
        for n, (count, loss) in enumerate(zip(self.histogram, self.losses, strict=True), start=1):
            shown = "" if loss is None else f"   mean loss {loss:.3f}"
            lines.append(f"{n:>3} {'step ' if n == 1 else 'steps'} {count / self.tokens:7.1%} of tokens{shown}")
        for entry in self.classes:
            if entry["name"] == PIECES[0]:
                lines.append(f"{'of these, of split words':>28}")
            lines.append(
                f"{entry['name']:>28}  {entry['steps']:.3f} steps   {entry['share']:6.1%} of all steps, "
                f"{entry['tokens'] / self.tokens:6.1%} of tokens"
            )
        shades = [f"\x1b[48;5;{254 - round(18 * (n - 1) / max(self.most - 1, 1))}m\x1b[38;5;16m" for n in self.range]
        text = "".join(f"{shades[n - 1]}{text}\x1b[0m" for text, n, _ in self.passage)
        return [*lines, "The beginning of the text, darker where a token runs more steps:", text]

    @property
    def range(self) -> range:
        return range(1, self.most + 1)

    def figure(self, colours):
        figure = Figure(figsize=(11, 3.6), dpi=160, facecolor=colours["page"], layout="constrained")
        counts, by_loss, classes = figure.subplots(1, 3, width_ratios=[1, 1.1, 1.5])
        for axes, title in zip(
            (counts, by_loss, classes),
            ("Tokens by steps run", "Steps against the loss", "Mean steps, and share of all steps"),
            strict=True,
        ):
            dressed(axes, title, colours)

        counts.bar([*self.range], [n / self.tokens for n in self.histogram], color=colours["accent"], width=0.7)
        counts.set_xticks([*self.range])
        counts.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        counts.set_xlabel("steps", color=colours["muted"], fontsize=9)

        losses = [entry["loss"] for entry in self.bins]
        by_loss.plot(losses, [entry["steps"] for entry in self.bins], color=colours["accent"], marker="o", markersize=4)
        by_loss.set_xlabel("loss of the next token, nats (tenths of the tokens)", color=colours["muted"], fontsize=9)
        by_loss.axhline(self.mean, color=colours["muted"], linewidth=1, linestyle=(0, (3, 2)))

        names = [entry["name"] for entry in self.classes]
        means = [entry["steps"] for entry in self.classes]
        classes.barh(range(len(names)), means, color=colours["accent"], height=0.6)
        for i, entry in enumerate(self.classes):
            share = classes.text(means[i], i, f" {entry['share']:.0%}", va="center", fontsize=8, color=colours["ink"])
            share.set_bbox({"facecolor": colours["page"], "edgecolor": "none", "pad": 0.5})  # over the dashed line
        classes.set_yticks(range(len(names)), names)
        classes.invert_yaxis()
        classes.set_xlim(0, self.most * 1.12)
        classes.axvline(self.mean, color=colours["muted"], linewidth=1, linestyle=(0, (3, 2)))
        classes.set_xlabel(f"steps (dashed: mean, {self.mean:.2f})", color=colours["muted"], fontsize=9)
        return figure

    def html(self):
        last = max(self.most - 1, 1)
        passage = "".join(
            shaded(text, round(70 * (n - 1) / last), f"{n} of {self.most} steps, loss {loss:.2f}")
            for text, n, loss in self.passage
        )
        return (
            f'<p class="note">Mean over {self.tokens:,} tokens, read {self.window} at once. A token\'s steps are spent '
            "before the next one is predicted; the loss is the next token's.</p>"
            "<h3>The beginning of the text, shaded more where a token runs more steps</h3>"
            f'<blockquote style="white-space:pre-wrap">{passage}</blockquote>'
        )


def classify(texts: list[str]) -> list[tuple[str, ...]]:
    """The class of every token, and which piece of a split word it is, if it is one."""
    joined, starts = "".join(texts), np.cumsum([0, *(len(text) for text in texts)])
    stops = starts[1:].copy()  # a token of a character's first bytes is classed with its last
    for token in reversed(range(len(texts) - 1)):
        if not texts[token]:
            stops[token] = stops[token + 1]
    words = [(m.start(), m.end(), m.group().lower()) for m in _WORD.finditer(joined)]
    counts = collections.Counter(word for _, _, word in words)
    pieces: dict[int, list[int]] = collections.defaultdict(list)  # tokens of every word
    owner: dict[int, int] = {}
    at = 0
    for token, stop in enumerate(stops):
        while at < len(words) and words[at][1] <= starts[token]:
            at += 1
        if at < len(words) and words[at][0] < stop:  # of several words, the first
            pieces[at].append(token)
            owner[token] = at
    named: list[tuple[str, ...]] = []
    for token, stop in enumerate(stops):
        word = words[owner[token]][2] if token in owner else ""
        if any(letter.isdigit() for letter in joined[starts[token] : stop]):
            kind = "numbers"
        elif not word:
            kind = "punctuation"
        elif word in FUNCTION_WORDS:
            kind = "function words"
        else:
            kind = "rare words" if counts[word] == 1 else "other words"
        split = pieces[owner[token]] if token in owner else []
        named.append((kind, PIECES[token != split[0]]) if len(split) > 1 else (kind,))
    return named


def dressed(axes: Axes, title: str, colours: dict[str, str]) -> None:
    """Give axes the page's colours and a title, and leave only the left and the bottom line."""
    axes.set_title(title, fontsize=10, color=colours["ink"], loc="left")
    axes.tick_params(colors=colours["muted"], labelsize=8.5, length=0)
    axes.set_facecolor(colours["page"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colours["grid"])

"""In which order a diffusion model writes: at which step of its block every token is revealed.

Beginnings from all over the text are continued by one block, the most probable token first, one a step (policy
low_confidence at temperature 0). Tokens are in the classes of step_map.py.
"""

from __future__ import annotations

import dataclasses
import html
from typing import Any, Self

import torch
from matplotlib.figure import Figure

from fathom.diffusion.base import is_diffusion
from fathom.inspect.base import Picture, shaded, token_texts
from fathom.inspect.step_map import CLASSES, PIECES, classify, dressed

ROWS = 16  # continued beginnings
BLOCK = 32  # tokens written
PROMPT = 64  # tokens of a beginning


@dataclasses.dataclass(frozen=True)
class RevealMap(Picture):
    """The steps at which the tokens of one block were revealed.

    Attributes:
        rows, block: continued beginnings, and tokens written after each, in as many steps.
        shares: of place × step, the share of rows that revealed the place at that step.
        mean: over rows, the mean step of every place, from 1.
        classes: `name`, `tokens`, mean `step` and `confidence`; the pieces of split words last.
        prompt: the first beginning.
        passage: [text, step, confidence] of the tokens after it.
    """

    name = "reveals"
    title = "In which order the tokens of a block are revealed"
    shows = "diffusion models (masked)"

    rows: int
    block: int
    shares: list[list[float]]
    mean: list[float]
    classes: list[dict[str, Any]]
    prompt: str
    passage: list[list[Any]]

    @classmethod
    def offered(cls, config) -> bool:
        return (getattr(config, "diffusion", None) or {}).get("name", "none") == "masked"

    @classmethod
    def measure(cls, model, tokenizer, token_ids, window, batch_size=8) -> Self:
        assert is_diffusion(model)
        if len(token_ids) < 2:
            raise ValueError(f"token_ids of {len(token_ids)} tokens: give at least two")
        window = min(window, model.config.max_position_embeddings)
        block = max(1, min(BLOCK, window // 2))
        size = max(1, min(PROMPT, window - block, len(token_ids) - 1))
        rows = min(ROWS, len(token_ids) // size)
        starts = [i * (len(token_ids) - size) // max(1, rows - 1) for i in range(rows)]
        prompts = torch.stack([token_ids[start : start + size] for start in starts])
        found = [
            model.generate(
                some.to(model.device), max_new_tokens=block, block_length=block, return_dict_in_generate=True
            )
            for some in prompts.split(batch_size)
        ]
        steps = torch.cat([out.revealed[:, size:] for out in found]).cpu()
        confidence = torch.cat([out.confidence[:, size:] for out in found]).cpu()
        written = [out.sequences[row, size:].cpu() for out in found for row in range(len(out.sequences))]
        texts = [token_texts(tokenizer, ids) for ids in written]
        named = [names for some in texts for names in classify(some)]
        groups = [(name, torch.tensor([name in names for names in named])) for name in (*CLASSES, *PIECES)]
        return cls(
            rows=rows,
            block=block,
            shares=torch.nn.functional.one_hot(steps, block).double().mean(0).tolist(),
            mean=(steps.double().mean(0) + 1).tolist(),
            classes=[
                {
                    "name": name,
                    "tokens": int(inside.sum()),
                    "step": steps.flatten()[inside].double().mean().item() + 1,
                    "confidence": confidence.flatten()[inside].double().mean().item(),
                }
                for name, inside in groups
                if inside.any()
            ],
            prompt="".join(token_texts(tokenizer, prompts[0])),
            passage=[
                [text, int(step) + 1, float(sure)]
                for text, step, sure in zip(texts[0], steps[0], confidence[0], strict=True)
            ],
        )

    def summary(self):
        lines = [f"{self.rows} beginnings, each continued by a block of {self.block} tokens, one a step"]
        for entry in self.classes:
            if entry["name"] == PIECES[0]:
                lines.append(f"{'of these, of split words':>28}")
            lines.append(
                f"{entry['name']:>28}  revealed at step {entry['step']:5.1f} with probability {entry['confidence']:.3f}"
                f", {entry['tokens']:,} tokens"
            )
        shaded = "".join(
            f"\x1b[48;5;{254 - round(18 * (step - 1) / max(self.block - 1, 1))}m\x1b[38;5;16m{text}\x1b[0m"
            for text, step, _ in self.passage
        )
        return [*lines, "The first block, darker where a token is revealed later:", self.prompt + shaded]

    def figure(self, colours):
        figure = Figure(figsize=(11, 4.2), dpi=160, facecolor=colours["page"], layout="constrained")
        heat, classes = figure.subplots(1, 2, width_ratios=[1.3, 1])
        dressed(heat, "Share of blocks that reveal a place at a step", colours)
        dressed(classes, "Mean step", colours)
        shares = torch.tensor(self.shares).T.numpy()
        image = heat.imshow(shares, origin="lower", aspect="auto", cmap="viridis", extent=(0.5, self.block + 0.5) * 2)
        heat.plot(range(1, self.block + 1), self.mean, color=colours["accent"], linewidth=1.5)
        heat.set_xlabel("place in the block (line: its mean step)", color=colours["muted"], fontsize=9)
        heat.set_ylabel("step", color=colours["muted"], fontsize=9)
        bar = figure.colorbar(image, ax=heat)
        bar.ax.tick_params(colors=colours["muted"], labelsize=8)
        names = [entry["name"] for entry in self.classes]
        classes.barh(range(len(names)), [entry["step"] for entry in self.classes], color=colours["accent"], height=0.6)
        classes.set_yticks(range(len(names)), names)
        classes.invert_yaxis()
        classes.set_xlim(0, self.block)
        return figure

    def html(self):
        last = max(self.block - 1, 1)
        passage = "".join(
            shaded(text, round(70 * (step - 1) / last), f"step {step} of {self.block}, probability {sure:.2f}")
            for text, step, sure in self.passage
        )
        return (
            f'<p class="note">{self.rows} beginnings of the text, each continued by a block of {self.block} tokens, '
            "the most probable one a step, at temperature 0.</p>"
            "<h3>The first block, shaded more where a token is revealed later</h3>"
            f'<blockquote style="white-space:pre-wrap">{html.escape(self.prompt)}{passage}</blockquote>'
        )

"""Write the tables of docs/planning.md: `python docs/site/plans.py [--check]`.

They are what `fathom cost RECIPE --gpus N` says, with as few batches a step as fit. `--check` writes
nothing and fails where the page is not what the command would write; the tests call it.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

from fathom.cost.measured import DEVICES  # noqa: E402  of this checkout
from fathom.cost.plan import Plan, layout_of, require_fit  # noqa: E402
from fathom.train.recipe import load_recipe, model_config  # noqa: E402

PAGE, START, END = ROOT / "docs/planning.md", "<!-- tables -->\n", "<!-- end -->\n"
ROWS = (
    ("depth_attention_1.5b.yaml", "depth_attention", "Depth-Attention, 1.5B"),
    ("depth_attention_3b.yaml", "depth_attention", "Depth-Attention, 3B"),
    ("ponderlm2_1.4b.yaml", "ponderlm2", "PonderLM-2, 1.4B"),
)
GPUS = (8, 16, 32, 64, 128, 256, 512)
COLUMNS = ("GPUs", "", "sequences at a time × batches", "peak GB", "GB sent a step", "computing s", "step s",
           "tokens/s", "days", "GPU-hours")  # fmt: skip


def best(recipe_file: str, name: str, gpus: int) -> Plan | str:
    """The quicker of DDP and FSDP2 with the recipe's step; what is in the way where there is none."""
    recipe, device = load_recipe(ROOT / "recipes" / recipe_file), DEVICES["h200"]
    training, length = recipe.training, recipe.data.block_size
    compiled = "model" if training.compile is True else "layers"
    config = model_config(recipe, recipe.method(name))
    found: list[Plan] = []
    for strategy in ("ddp", "fsdp2"):
        try:
            layout = layout_of(
                training.sequences, training.gradient_accumulation, gpus, strategy,
                checkpointing=training.gradient_checkpointing, compile=compiled,
            )  # fmt: skip
        except ValueError:
            return f"cannot share a step of {training.sequences * training.gradient_accumulation} sequences"
        own = layout.sequences * layout.accumulation
        for sequences in [n for n in range(own, 0, -1) if own % n == 0]:  # the largest batches that fit
            batches = dataclasses.replace(layout, sequences=sequences, accumulation=own // sequences)
            try:
                found.append(require_fit(config, length, batches, device))
                break
            except ValueError:
                continue
    return min(found, key=lambda plan: plan.step_s) if found else "does not fit"


def tables() -> str:
    parts = []
    for recipe_file, name, title in ROWS:
        tokens = load_recipe(ROOT / "recipes" / recipe_file).training.tokens or 0
        parts += [
            f"### {title} (`recipes/{recipe_file}`, {tokens / 1e9:.1f} B tokens)\n",
            f"| {' | '.join(COLUMNS)} |",
            "|---" * len(COLUMNS) + "|",
        ]
        said: dict[str, None] = {}
        for gpus in GPUS:
            plan = best(recipe_file, name, gpus)
            if isinstance(plan, str):
                parts.append(f"| {gpus} | {plan} | | | | | | | | |")
                continue
            said |= dict.fromkeys(plan.stands_on)
            days = tokens / plan.tokens_per_second / 86400
            parts.append(
                f"| {gpus} | {plan.layout.strategy} | {plan.layout.sequences} × {plan.layout.accumulation} | "
                f"{plan.peak_bytes / 1e9:.0f} | {plan.sent_bytes / 1e9:.1f} | {plan.compute_s:.2f} | "
                f"{plan.step_s:.2f} | {plan.tokens_per_second / 1e3:,.0f}k | {days:.2f} | {24 * gpus * days:,.0f} |"
            )
        parts += ["", "It stands on: " + "; ".join(said) + ".\n"]
    return "\n".join(parts)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(START)
    wanted = before + START + tables() + END + rest.split(END)[1]
    if "--check" not in sys.argv:
        PAGE.write_text(wanted, encoding="utf-8")
    elif wanted != page:
        sys.exit("docs/planning.md is not what `python docs/site/plans.py` writes; run it")


if __name__ == "__main__":
    main()

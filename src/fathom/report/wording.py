"""The page's words: the verdict on each budget, with its noise, and numbers in readable form."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fathom.report.plots import loss_at
from fathom.report.results import UNCALLABLE_PERCENT, Difference, Row, Run, Table

TITLES = {
    "tokens": "Equal tokens",
    "examples": "Equal examples",
    "train_flops": "Equal training FLOPs",
    "inference_flops": "Equal inference FLOPs",
}
MEANINGS = {
    "tokens": (
        "Every method trains on the same tokens in the same order. A dearer method spends more compute on them: this "
        "table shows what a method makes of the same text, not what it makes of the same compute. Each run's learning "
        "rate falls to its end at the last token. Read against FLOPs, the curves of dearer methods are therefore "
        "un-annealed until their right end, and are no comparison at equal FLOPs."
    ),
    "examples": (
        "Every method trains on the same examples in the same order, each with a full learning-rate schedule. A dearer "
        "method spends more compute on them: this table shows what a method makes of the same examples."
    ),
    "train_flops": (
        "Every method spends the same training FLOPs: a cheaper method reads more tokens for them. Each has its own "
        "full learning-rate schedule over its own tokens."
    ),
    "inference_flops": (
        "Every method spends about the same FLOPs per {answer}: at the same width, whole layers are added to "
        "the cheaper methods until they cost as much as the dearest. Layers are whole, so a residual remains; it is in "
        "the table. All train on the same tokens."
    ),
}
EQUAL_DATA = ("tokens", "examples")  # budgets under which all methods train on the same, whatever that costs
_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


@dataclass(frozen=True)
class Verdict:
    """A headline, the evidence for it, and what a reader must not conclude."""

    headline: str
    details: list[str] = field(default_factory=list)


def si(value: float, unit: str = "", digits: int = 3) -> str:
    """4.12e13 as '41.2 T', or '41.2 TB' with a unit: `digits` significant digits and an SI prefix."""
    if value == 0:
        return f"0 {unit}".rstrip()
    exponent = min(max(math.floor(math.log10(abs(value)) / 3), 0), len(_PREFIXES) - 1)
    scaled = value / 1000**exponent
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(scaled))))
    if exponent == 0 and float(value).is_integer():
        decimals = 0
    return f"{scaled:.{decimals}f} {_PREFIXES[exponent]}{unit}".rstrip()


def in_sentence(budget: str) -> str:
    """'equal training FLOPs'."""
    return TITLES[budget][0].lower() + TITLES[budget][1:]


def ratio(value: float, to: float) -> str:
    """'2.9×' of the baseline's."""
    return f"{value / to:.3g}×" if to else ""


def ratio_within(value: float, to: float, interval: tuple[float, float] | None, of: tuple[float, float] | None) -> str:
    """'0.52× (0.47 to 0.58)' of a measured quantity: both at their ends, one high and one low. Empty without both."""
    if interval is None or of is None or not min(to, *of):
        return ""
    return f"{ratio(value, to)} ({interval[0] / of[1]:.3g} to {interval[1] / of[0]:.3g})"


def disturbances(runs: list[Run]) -> list[str]:
    """A sentence for every run that was interrupted or disturbed; budgets that share a run share its sentence."""
    said = {}
    for run in runs:
        parts = []
        if run.interruptions:
            times = "once" if run.interruptions == 1 else f"{run.interruptions} times"
            parts.append(f"interrupted {times} and resumed from a checkpoint")
        if "disturbed" in run.marks:
            parts.append(
                f"disturbed: it had a core for {100 * (run.busy or 0):.0f} % of the time; "
                "for the rest, other programs had the cores or data came late"
            )
        if parts:
            said[run.folder] = f"{run.folder}: {'; '.join(parts)}."
    return list(said.values())


def at_edge(methods: list[str]) -> str:
    """The warning about `Results.edges`; empty where there are none."""
    if not methods:
        return ""
    return (
        f"The best learning rate of {_listed(methods)} is at the edge of its candidates. A better one may lie outside."
    )


def duration(seconds: float) -> str:
    """'4 min 3 s'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def scored(row: Row) -> str:
    """'2.005 bits per byte'."""
    return f"{row.result:.3f} {row.score.unit_of(row.first.exact)}"


def verdict(table: Table) -> Verdict:
    """The verdict under this budget: which method is worth its cost, and by how much."""
    best, base = table.best, table.baseline
    if len(table.rows) == 1:
        return Verdict(f"{best.method}: {scored(best)}. Nothing to compare it with.")
    others = sorted((row for row in table.rows if row is not base), key=lambda row: row.loss)
    details = [_sentence(row, base, table) for row in others]
    if table.budget in EQUAL_DATA:
        details += _same_compute_on_curve(others, base)
    details.append(_noise(table))
    return Verdict(_headline(best, base, table), details)


def overall(found: list[Table], reference: float) -> Verdict:
    """The page's first sentence: the answer at equal compute if that was measured, else at equal data.

    reference: score of the baseline that knows only frequencies; if all methods lose to it, the comparison shows
        nothing.
    """
    by_budget = {table.budget: table for table in found}
    chosen = [by_budget[b] for b in ("train_flops", "inference_flops", *EQUAL_DATA) if b in by_budget]
    task, score = chosen[0].task, chosen[0].score
    if all(table.best.loss >= score.loss(reference) for table in chosen):
        return Verdict(
            f"No method beats the {task.reference_name} model ({reference:.3f} {score.unit}): this comparison says "
            "nothing yet.",
            ["Train for longer, or with another learning rate.", *(verdict(table).headline for table in chosen)],
        )
    headline = verdict(chosen[0]).headline
    details = [verdict(table).headline for table in chosen[1:]]
    if "train_flops" not in by_budget and "inference_flops" not in by_budget:
        measured = _listed([in_sentence(budget) for budget in EQUAL_DATA if budget in by_budget])
        details.append(
            f"Only {measured} were measured. Whether a dearer method is worth its compute needs the budgets "
            "train_flops and inference_flops."
        )
    return Verdict(headline, details)


def _headline(best: Row, base: Row, table: Table) -> str:
    value = scored(best)
    where = in_sentence(table.budget)
    if best is base:
        second = min((row for row in table.rows if row is not base), key=lambda row: row.loss)
        gap = second.minus(base)
        if gap.clear:
            return f"At {where}, nothing beats {base.method}: {value}; {second.method} is {_apart(gap)}."
        if gap.undecided:
            return f"At {where}, {base.method} has {value}; {_bound_above(second, gap)}"
        return f"At {where}, {base.method} ({value}) and {second.method} cannot be told apart{_small(gap)}."
    gap = best.minus(base)
    if gap.undecided:
        return f"At {where}, {best.method} has {value}; {_bound_above(base, base.minus(best))}"
    if not gap.clear:
        found = _signed(gap, table) + _small(gap)
        return f"At {where}, {best.method} ({value}) cannot be told from {base.method}: {found}."
    gain = f"{value}, {_apart(gap)} {base.method}"
    others = {row.method: row.minus(best) for row in table.rows if row is not best}
    close = [method for method, gap in others.items() if not gap.clear and not gap.undecided]
    above = [method for method, gap in others.items() if gap.undecided]
    tied = f"; {_listed(close)} cannot be told from it" if close else ""
    tied += f"; upper bounds above it say nothing of {_listed(above)}" if above else ""
    if table.budget in EQUAL_DATA:
        cost = ratio(best.mean("train_flops"), base.mean("train_flops"))
        return f"At {where}, {best.method} is best: {gain}, for {cost} its training FLOPs{tied}."
    return f"At {where}, {best.method} is worth it: {gain}{tied}."


def _small(gap: Difference) -> str:
    """Why one seed's difference is not called though its intervals leave out zero; empty where they do not."""
    known = gap.interval if gap.margin is None and abs(gap.percent) < UNCALLABLE_PERCENT else None
    said = known is not None and not known[0] <= 0 <= known[1]
    return f" (below {UNCALLABLE_PERCENT:g} % with one seed, which is not called)" if said else ""


def _bound_above(row: Row, gap: Difference) -> str:
    return f"the upper bound of {row.method} is {_apart(gap)}, which does not say which is better."


def _apart(gap: Difference) -> str:
    """'2.2 % below'; in the score's own measure where the other is zero."""
    size = f"{abs(gap.value):.3f}" if math.isnan(gap.percent) else f"{abs(gap.percent):.1f} %"
    return f"{size} {'below' if gap.value < 0 else 'above'}"


def _sentence(row: Row, base: Row, table: Table) -> str:
    gap = row.minus(base)
    train = ratio(row.mean("train_flops"), base.mean("train_flops"))
    infer = ratio(row.mean("answer_flops"), base.mean("answer_flops"))
    memory = ratio(row.mean("kv_bytes_per_token"), base.mean("kv_bytes_per_token"))
    answered = f"{infer} the FLOPs per {table.task.answer}, {memory} the KV cache per token"
    costs = {
        "train_flops": f"the same training FLOPs, {answered}",
        "inference_flops": f"{answered}, {train} the training FLOPs",
    }.get(table.budget, f"{train} the training FLOPs, {answered}")
    judged = "" if gap.clear else " This is too little to call."
    if gap.undecided:
        judged = " One of the two is an upper bound, above the other's exact value: it does not say which is better."
    return f"{row.method} against {base.method}: {_signed(gap, table)}, for {costs}.{judged}"


def _listed(names: list[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _signed(gap: Difference, table: Table) -> str:
    margin = "" if gap.margin is None else f" ± {gap.margin:.3f}"
    share = "" if math.isnan(gap.percent) else f" ({gap.percent:+.1f} %)"
    texts = "" if gap.over_texts is None else f", {gap.over_texts[0]:+.3f} to {gap.over_texts[1]:+.3f} over {gap.unit}"
    return (f"{gap.value:+.3f}{margin}" + f" {table.score.unit}" + share + texts).replace("-", "−")


def _same_compute_on_curve(rows: list[Row], base: Row) -> list[str]:
    """A hint, not a verdict: the dearer methods' training loss where the baseline's whole compute had been spent."""
    flops = base.mean("train_flops")
    dearer = [row for row in rows if row.mean("train_flops") >= 1.05 * flops]
    losses = {row.method: loss for row in dearer if (loss := loss_at(row, flops)) is not None}
    if not losses:
        return []
    found = _listed([f"{method} {losses[method]:.2f}" for method in sorted(losses, key=losses.__getitem__)])
    return [
        f"Training losses where {base.method}'s whole training compute ({si(flops, 'FLOPs')}) had been spent: {found}; "
        f"{base.method} ended at {base.mean('train_loss'):.2f}. Learning rates were still high there: a run planned "
        "for that compute would do better."
    ]


def _noise(table: Table) -> str:
    said = []
    if table.seeds[-1] > 1:
        spread = max(row.spread(table.score.name) or 0.0 for row in table.rows)
        said.append(
            f"{table.seeds[-1]} seeds, paired: ± is the 95 % interval of the difference over seeds. "
            f"The largest standard deviation of one method over its seeds is {spread:.4f} {table.score.unit}."
        )
    if table.seeds[0] == 1:
        said.append(
            f"One seed{' in the rows without ±' if said else ''}: the seed noise is unknown. Differences below "
            f"{UNCALLABLE_PERCENT:g} % are not called; larger ones are likely, not certain."
        )
    gaps = [row.minus(table.baseline) for row in table.rows if row is not table.baseline]
    units = [gap.unit for gap in gaps if gap.over_texts is not None]
    if units:
        said.append(f"The interval over {units[0]} is of the same models on other texts (paired bootstrap, 95 %).")
    if table.rows[0].retraining is not None:
        said.append(
            f"The same run trained again came out up to {table.rows[0].retraining:.4f} {table.score.unit} from itself."
        )
    if units or table.rows[0].retraining is not None:
        said.append("A difference is called only where it is outside all of these.")
    return " ".join(said)

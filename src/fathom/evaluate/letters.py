"""Multiple choice and true/false by the next token, as GeoBench scores them (arXiv 2306.05064, 2401.00434).

A prompt shows a few questions with their letters, then the question with its options. At the last position only the
letters' probabilities are compared, from the softmax over the whole vocabulary. If k letters tie and one is right, the
question counts 1/k, the expectation under random tie breaking. So a uniform model has exactly the accuracy of guessing,
Σ 1/options / N.

    woa   the prompt ends with "### Response:\\n", a letter follows
    wa    the prompt ends with "### Response:\\nThe answer is:\\n"
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from fathom.data.packing import encode
from fathom.data.sources import Source
from fathom.diffusion.base import is_diffusion
from fathom.evaluate.tool_calls import Share
from fathom.models.method import check_choice, check_range

STYLES = {"woa": "", "wa": "The answer is:\n"}
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TRUTH = ("True", "False")
SHOTS = 4
ASKED = "Identify the choice that best completes the statement or answers the question."
JUDGED = "Say whether the statement is true or false."
Z = 1.96  # standard errors from guessing within which a score says nothing
# MMLU's subjects (arXiv 2009.03300) in four groups, as lm_eval has them: anatomy is in STEM.
STEM = (
    "abstract_algebra anatomy astronomy college_biology college_chemistry college_computer_science "
    "college_mathematics college_physics computer_security conceptual_physics electrical_engineering "
    "elementary_mathematics high_school_biology high_school_chemistry high_school_computer_science "
    "high_school_mathematics high_school_physics high_school_statistics machine_learning"
)
HUMANITIES = (
    "formal_logic high_school_european_history high_school_us_history high_school_world_history international_law "
    "jurisprudence logical_fallacies moral_disputes moral_scenarios philosophy prehistory professional_law "
    "world_religions"
)
SOCIAL = (
    "econometrics high_school_geography high_school_government_and_politics high_school_macroeconomics "
    "high_school_microeconomics high_school_psychology human_sexuality professional_psychology public_relations "
    "security_studies sociology us_foreign_policy"
)
OTHER = (
    "business_ethics clinical_knowledge college_medicine global_facts human_aging management marketing "
    "medical_genetics miscellaneous nutrition professional_accounting professional_medicine virology"
)
GROUPS = {
    subject: group
    for group, subjects in (("STEM", STEM), ("humanities", HUMANITIES), ("social sciences", SOCIAL), ("other", OTHER))
    for subject in subjects.split()
}


@dataclass(frozen=True)
class ChoiceQuestion:
    """A question, its options (none: a statement that is true or false), the index of the right one, the group for its
    score, and its subject, from which examples are shown before it."""

    question: str
    options: tuple[str, ...]
    gold: int
    group: str = ""
    subject: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(LETTERS[: len(self.options)]) if self.options else TRUTH

    @property
    def text(self) -> str:
        if not self.options:
            return f"### Instruction:\n{JUDGED}\n{self.question}\n\n### Response:\n"
        listed = "\n".join(f"{letter}. {option}" for letter, option in zip(self.labels, self.options, strict=True))
        return f"### Instruction:\n{ASKED}\n{self.question}\nChoose from:\n{listed}\n\n### Response:\n"


def split_options(text: str) -> list[str]:
    """The options in a free text: its lines "A. …", "B. …" in the order of their letters, or else the text after each
    of its capital letters, if these are consecutive and no letter, digit or hyphen touches them.
    """
    lines = dict(re.findall(r"^([A-Z])[.)] *(.*\S)", text, re.M))
    if len(lines) > 1 and sorted(lines) == list(LETTERS[: len(lines)]):
        return [lines[letter] for letter in sorted(lines)]
    found: list[re.Match[str]] = []
    for letter in LETTERS:
        pattern = re.compile(rf"(?<![\w-]){letter}(?![\w-])[.):、\s]*")
        match = pattern.search(text, found[-1].end() if found else 0)
        if match is None:
            break
        found.append(match)
    ends = [*(match.start() for match in found[1:]), len(text)]
    return [text[match.end() : end].strip() for match, end in zip(found, ends)]


def read_choices(path: str | Path) -> list[ChoiceQuestion]:
    """The questions of a file: JSON lines with "question", "query" or "ctx", "choices" and "gold", such as ARC, PIQA,
    HellaSwag and MMLU (whose subjects become lm_eval's four groups); BoolQ's "yes" and "no"; or GeoBench's JSON, AP and
    NPEE, which must be on your disk. NPEE's questions whose key is neither one of their options nor true or false are
    left out.

    Raises OSError, or ValueError that names the file and the row.
    """
    path = Path(path)
    if path.suffix == ".json":
        found = list(_geobench(path))
    else:
        found = [_row(row, where) for row, where in Source(str(path), argument="--choices").rows()]
    if not found:
        raise ValueError(f"{path}: holds no question with options")
    return found


def _row(row: dict[str, Any], where: str) -> ChoiceQuestion:
    question = next((row[name] for name in ("question", "query", "ctx") if isinstance(row.get(name), str)), None)
    options, gold = row.get("choices"), row.get("gold")
    if question is None or not isinstance(options, list) or len(options) < 2 or not all(map(_is_text, options)):
        raise ValueError(f"{where}: no question with choices (found: {', '.join(row) or 'none'})")
    if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(options):
        raise ValueError(f"{where}: gold={gold!r} is none of the {len(options)} choices' indices")
    if len(options) > len(LETTERS):
        raise ValueError(f"{where}: {len(options)} choices, and there are {len(LETTERS)} letters")
    subject = str(row.get("subject") or "")
    asked = re.sub(r"^Question: |\nAnswer:$", "", question.strip())
    if [option.lower() for option in options] in (["no", "yes"], ["yes", "no"], ["false", "true"], ["true", "false"]):
        return ChoiceQuestion(asked, (), int(options[gold].lower() in ("no", "false")))
    listed = re.search(r"\nChoices:\n(.*)\nAnswer:$", question, re.S)  # options stand in the question already
    if listed and list(options) == list(LETTERS[: len(options)]):
        options = split_options(listed[1])
        asked = re.sub(r"^Question: ", "", question[: listed.start()])
        if len(options) != len(row["choices"]):
            raise ValueError(f"{where}: no options can be read of the question's {len(row['choices'])} choices")
    return ChoiceQuestion(asked, tuple(options), gold, GROUPS.get(subject, subject), subject)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _geobench(path: Path) -> Iterator[ChoiceQuestion]:
    """AP: a list of {"question": {"stem", "choices"}, "answerKey"}. NPEE: lists "choice" and "tf" of questions as free
    text."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    sections = data if isinstance(data, dict) else {"": data}
    for section, rows in sections.items():
        entries = rows if isinstance(rows, list) else []
        if isinstance(rows, dict) and {"question", "answer"} <= set(rows):
            entries = [{"question": q, "answer": a} for q, a in zip(rows["question"], rows["answer"])]
        for number, row in enumerate(entries, start=1):
            try:
                question = row.get("question") if isinstance(row, dict) else None
                if isinstance(question, dict) and "choices" in question:
                    labels = [choice["label"] for choice in question["choices"]]
                    if row.get("answerKey") not in labels or len(labels) < 2:
                        raise ValueError(
                            f"{path}, question {number}: answerKey={row.get('answerKey')!r} is none of {labels}"
                        )
                    options = tuple(choice["text"] for choice in question["choices"])
                    yield ChoiceQuestion(question["stem"], options, labels.index(row["answerKey"]))
                elif isinstance(question, str) and section == "choice":
                    stem, _, listed = question.partition("Choose from:")
                    options = tuple(split_options(listed or question))
                    key = re.match(
                        r"\(?([A-Za-z])(?:[).:,、]|\s*$)", str(row["answer"]).strip()
                    )  # no word that begins so
                    answer = key[1].upper() if key else ""
                    if len(options) > 1 and answer and answer in LETTERS[: len(options)]:  # others cannot be told apart
                        yield ChoiceQuestion(stem.strip(), options, LETTERS.index(answer), "multiple choice")
                elif isinstance(question, str) and section == "tf":
                    said = re.match(r"(?:t(?:rue)?|f(?:alse)?)\b", str(row["answer"]).strip().lower())
                    if said:
                        yield ChoiceQuestion(question, (), int(said[0][0] == "f"), "true or false")
            except KeyError as error:
                raise ValueError(f"{path}, question {number}: no {error}") from None


def label_ids(tokenizer: Any, prompt: str, labels: Sequence[str]) -> list[int]:
    """The token of each label after a prompt: that of "A" if the prompt ends with white space, else that of " A".

    If a tokenizer writes a label as a token of its own (a space, as SentencePiece does) followed by one token, that
    second token is taken. Raises ValueError for a label of several tokens.
    """
    spaced = not prompt[-1:].isspace()
    before = encode([prompt[-1:]], tokenizer)[0]
    found = []
    for label in labels:
        ids = encode([prompt[-1:] + " " * spaced + label], tokenizer)[0]
        if ids[: len(before)] != before or len(ids) != len(before) + 1:
            raise ValueError(
                f"label {label!r} has {max(len(ids) - len(before), 2)} tokens after {prompt[-8:]!r}: this tokenizer "
                "cannot be scored by letters; score whole answers with lm_eval instead"
            )
        found.append(ids[-1])
    if len(set(found)) < len(found):
        raise ValueError(f"labels {', '.join(labels)} share a token: this tokenizer cannot be scored by letters")
    return found


def prompts(
    questions: Sequence[ChoiceQuestion], shots: Sequence[ChoiceQuestion], style: str, count: int = SHOTS
) -> list[str]:
    """The prompt of each question: the first `count` of `shots` with their answers, from its subject if there are any,
    and the question."""
    check_choice("evaluate_choices", "style", style, tuple(STYLES))
    check_range("evaluate_choices", "count", count, 0)
    by_subject: dict[str, list[ChoiceQuestion]] = {}
    for shot in shots:
        by_subject.setdefault(shot.subject, []).append(shot)
    found = []
    for question in questions:
        some = by_subject.get(question.subject, shots)[:count]
        shown = "".join(f"{shot.text}{STYLES[style]}{shot.labels[shot.gold]}\n\n\n" for shot in some)
        found.append(f"{shown}{question.text}{STYLES[style]}")
    return found


@torch.no_grad()
def letter_probabilities(
    model: Any, tokenizer: Any, texts: Sequence[str], labels: Sequence[Sequence[str]], batch_size: int = 8
) -> list[Tensor]:
    """The probabilities [options] that the labels have as next token of each prompt, in float64, not normalised."""
    check_range("evaluate_choices", "batch_size", batch_size, 1)
    if is_diffusion(model):
        raise ValueError(f"{type(model).__name__}: letters are scored by the next token, which a diffusion model lacks")
    first = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    rows = [first + ids for ids in encode(list(texts), tokenizer)]
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = max(map(len, rows))
    if limit is not None and longest > limit:
        raise ValueError(f"a prompt has {longest} tokens, and the model {limit} positions; show fewer examples (shots)")
    pad = tokenizer.eos_token_id or 0
    takes = inspect.signature(model.forward).parameters
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    found: dict[int, Tensor] = {}
    tokens: dict[tuple[str, ...], list[int]] = {}  # of labels, by the prompt's last character and them
    for at in range(0, len(order), batch_size):
        some = order[at : at + batch_size]
        width = max(len(rows[index]) for index in some)
        ids = torch.full((len(some), width), pad)
        mask = torch.zeros_like(ids)
        for row, index in enumerate(some):  # the last token of every row is the last of the batch
            ids[row, width - len(rows[index]) :] = torch.tensor(rows[index])
            mask[row, width - len(rows[index]) :] = 1
        batch = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        batch = {name: value.to(model.device) for name, value in batch.items() if name in takes}
        out = model(**batch, use_cache=False, **({"logits_to_keep": 1} if "logits_to_keep" in takes else {}))
        for row, index in enumerate(some):
            chances = out.logits[row, -1].double().softmax(-1)
            key = (texts[index][-1:], *labels[index])
            if key not in tokens:
                tokens[key] = label_ids(tokenizer, texts[index], labels[index])
            found[index] = chances[tokens[key]].cpu()
    return [found[index] for index in range(len(rows))]


def evaluate_choices(
    model: Any,
    tokenizer: Any,
    questions: Sequence[ChoiceQuestion],
    style: str = "woa",
    shots: Sequence[ChoiceQuestion] = (),
    batch_size: int = 8,
    count: int = SHOTS,
) -> dict[str, Any]:
    """Accuracy by letters with its standard error, the accuracy of guessing, and means by group.

    "entropy" is that of the labels' normalised probabilities, in bits; "mass" is their share of the whole vocabulary's
    probability. A score within 1.96 standard errors of guessing has "signal" False.

    Raises ValueError for no questions, a style that does not exist, labels of several tokens, and prompts that are
    longer than the model's positions.
    """
    if not questions:
        raise ValueError("questions is empty: give at least one")
    texts = prompts(questions, shots, style, count)
    found = letter_probabilities(model, tokenizer, texts, [question.labels for question in questions], batch_size)
    scored = [_scored(chances, question.gold) for chances, question in zip(found, questions, strict=True)]
    result = {**_summary(questions, scored), "style": style, "shots": min(count, len(shots))}
    result["entropy"] = math.fsum(_entropy(chances) for chances in found) / len(found)
    result["mass"] = math.fsum(float(chances.sum()) for chances in found) / len(found)
    groups = list(dict.fromkeys(question.group for question in questions if question.group))
    if groups:
        result["groups"] = {}
        for group in groups:
            inside = [index for index, question in enumerate(questions) if question.group == group]
            result["groups"][group] = _summary([questions[i] for i in inside], [scored[i] for i in inside])
    return result


def mean_with_signal(scores: dict[str, dict[str, Any]]) -> float | None:
    """The mean accuracy over tasks that differ from guessing; None if none does."""
    with_signal = [score["accuracy"] for score in scores.values() if score["signal"]]
    return math.fsum(with_signal) / len(with_signal) if with_signal else None


def _scored(chances: Tensor, gold: int) -> float:
    """1 for the right label alone, 1/k where it ties with k − 1 others, 0."""
    best = chances == chances.max()
    return float(best[gold]) / int(best.sum())


def _summary(questions: Sequence[ChoiceQuestion], scored: Sequence[float]) -> dict[str, Any]:
    share = Share.of(scored)
    guessing = math.fsum(1 / len(question.labels) for question in questions) / len(questions)
    signal = share.error is not None and share.share - guessing > Z * share.error
    return {
        "accuracy": share.share, "error": share.error, "n": share.n, "guessing": guessing, "signal": signal,
    }  # fmt: skip


def _entropy(chances: Tensor) -> float:
    normalised = chances / chances.sum()
    return float(-(normalised * normalised.clamp(min=1e-300).log2()).sum())


def export_choices(
    folder: str | Path,
    name: str,
    questions: Sequence[ChoiceQuestion],
    style: str = "woa",
    shots: Sequence[ChoiceQuestion] = (),
    count: int = SHOTS,
) -> Path:
    """Write an lm_eval task with the same prompts and labels, NAME.yaml and NAME.jsonl, into a folder for
    `fathom evaluate --tasks NAME --task-dir FOLDER`. Unless letters tie, its "acc" is the accuracy of
    `evaluate_choices`.
    """
    if not re.fullmatch(r"[\w-]+", name):
        raise ValueError(f"name={name!r}: letters, digits, '_' and '-' make the name of a task")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{name}.jsonl"
    rows = [
        {"prompt": text, "labels": list(question.labels), "gold": question.gold}
        for text, question in zip(prompts(questions, shots, style, count), questions, strict=True)
    ]
    data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{prompt}}", "doc_to_target": "gold",
        "doc_to_choice": "{{labels}}", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(task, sort_keys=False), encoding="utf-8")
    return file


def scores_of(result: dict[str, Any]) -> list[str]:
    """Lines of a result for the terminal."""
    lines = []
    for name, part in {"all": result, **result.get("groups", {})}.items():
        error = "" if part["error"] is None else f" ± {part['error']:.4f}"
        signal = "" if part["signal"] else "  no signal"
        lines.append(
            f"{name:16} {part['accuracy']:.4f}{error}  guessing {part['guessing']:.4f}  n {part['n']:,}{signal}"
        )
    return lines

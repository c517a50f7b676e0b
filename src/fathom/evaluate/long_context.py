"""How far back does a model see? Retrieval tasks of exact lengths, for any causal language model under any cache
method.

A sample is a text of exactly the asked number of tokens, its question included. The answer is a string, and the text
holds three distractors of the same form. Each sample is scored twice:

    generation   the greedy continuation of the question begins with the answer, whole words      (chance 0)
    likelihood   Σ log p of the answer exceeds that of each distractor                            (chance 1/4)

Shares have Wilson's 95 % interval. If a task's interval at the shortest length includes chance, the model shows no
signal
there: the task is marked and left out of the mean. Needles and variable tracking follow the idea of RULER (arXiv
2404.06654), but the numbers are not comparable with RULER's.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fathom.caches.base import CacheMethod, portion
from fathom.caches.compress import check_chunk, compress
from fathom.caches.versions import CACHE_NAME, execution_device
from fathom.data.packing import encode
from fathom.diffusion.base import is_diffusion

# task → (sentence to hide, question, answer); {} is the secret
TASKS = {
    "passkey": (" The pass key is {0}. Remember it. {0} is the pass key. ", "\nWhat is the pass key? The pass key is"),
    "needle": (
        " The best fruit to eat in the harbour town is the {0}. ",
        "\nThe best fruit to eat in the harbour town is the",
    ),
}
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
# not at the very end: there even a full cache without its first tokens (stock, sliced) loses the answer
DEPTHS = [0.0, 0.2375, 0.475, 0.7125, 0.95]
FRUITS = ("mango", "cherry", "banana", "orange", "lemon", "peach", "apple", "grape")


def hidden(task: str, tokenizer: Any, filler: str, tokens: int, depth: float, secret: str) -> list[int]:
    """Exactly `tokens` token ids: a sentence with a secret at `depth` (0 … 1) of filler text, special tokens first."""
    needle = tokenizer(TASKS[task][0].format(secret), add_special_tokens=False).input_ids
    begin, ids = tokenizer("").input_ids, tokenizer(filler, add_special_tokens=False).input_ids
    room = tokens - len(needle) - len(begin)
    if room < 0 or not ids:
        raise ValueError(f"tokens={tokens}: use at least {tokens - room}, and some filler text")
    ids = (ids * (room // len(ids) + 1))[:room]
    cut = portion(depth, room)
    return begin + ids[:cut] + needle + ids[cut:]


CHOICES = 4  # the answer and its distractors
Z = 1.959964  # of a 95 % interval
# fmt: off
WORDS = (
    "anchor", "basket", "candle", "drum", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle",
    "ladder", "mirror", "needle", "orchard", "pillow", "quarry", "ribbon", "saddle", "table", "umbrella",
    "violin", "window", "yard",
)
PEOPLE = ("Mary", "John", "Sandra", "Daniel", "Fred", "Julie")
THINGS = ("apple", "ball", "book", "coin", "cup", "lamp")
PLACES = ("attic", "barn", "cellar", "garden", "hall", "kitchen", "library", "office", "park", "school", "shed")
# fmt: on


@dataclass(frozen=True)
class Sample:
    """context + question have exactly the asked number of tokens. answers[0] is right, the others are distractors."""

    context: list[int]
    question: list[int]
    answers: list[str]


@dataclass(frozen=True)
class Puzzle:
    """Sentences that stand in this order in the text, the question after it, and the answers, the right one first."""

    sentences: list[str]
    question: str
    answers: list[str]
    fill: bool = True  # the rest is filler text; else the sentences alone, as many as there is room for


def passkey(draw: random.Random) -> Puzzle:
    """A pass key: one number is called the key; the other numbers are stated as often, as no keys."""
    hide, question = TASKS["passkey"]
    decoy = " The room number is {0}. Forget it. {0} is the room number. "
    values = _numbers(draw, CHOICES)
    sentences = [hide.format(values[0]), *(decoy.format(value) for value in values[1:])]
    return Puzzle(_shuffled(draw, sentences), question, values)


def niah_single(draw: random.Random) -> Puzzle:
    """One needle: the secret number of a thing. The other numbers belong to no thing."""
    key, values = draw.choice(WORDS), _numbers(draw, CHOICES)
    sentences = [_needle(key, values[0]), *(f" A clerk wrote down the number {value}." for value in values[1:])]
    return Puzzle(_shuffled(draw, sentences), _question(key), values)


def niah_multikey(draw: random.Random) -> Puzzle:
    """Four needles with keys of their own; one is asked for."""
    keys, values = draw.sample(WORDS, CHOICES), _numbers(draw, CHOICES)
    sentences = [_needle(key, value) for key, value in zip(keys, values)]
    return Puzzle(_shuffled(draw, sentences), _question(keys[0]), values)


def niah_multivalue(draw: random.Random) -> Puzzle:
    """Each of four keys has two values; both of one are asked for, in the order of the text."""
    keys, values = draw.sample(WORDS, CHOICES), _numbers(draw, 2 * CHOICES)
    order = _shuffled(draw, [i // 2 for i in range(2 * CHOICES)])
    sentences = [_needle(keys[key], value) for key, value in zip(order, values)]
    answers = [", ".join(value for key, value in zip(order, values) if key == own) for own in range(CHOICES)]
    question = f"\nWhat are the two secret numbers of the {keys[0]}, in order? The secret numbers of the {keys[0]} are"
    return Puzzle(sentences, question, answers)


def niah_multiquery(draw: random.Random) -> Puzzle:
    """Four keys with a value each; two are asked for. Distractors are other pairs of the values."""
    keys, values = draw.sample(WORDS, CHOICES), _numbers(draw, CHOICES)
    sentences = [_needle(key, value) for key, value in zip(keys, values)]
    others = [", ".join(pair) for pair in itertools.permutations(values, 2) if pair != (values[0], values[1])]
    answers = [f"{values[0]}, {values[1]}", *draw.sample(others, CHOICES - 1)]
    both = f"the {keys[0]} and of the {keys[1]}"
    return Puzzle(
        _shuffled(draw, sentences),
        f"\nWhat are the secret numbers of {both}, in this order? The secret numbers of {both} are",
        answers,
    )


def variable_tracking(draw: random.Random) -> Puzzle:
    """Four chains X = 12345, Y = X, Z = Y, mixed; asked is which variables hold the value of one chain."""
    hops = 3
    letters, values = draw.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", hops * CHOICES), _numbers(draw, CHOICES)
    chains = [letters[hops * i : hops * (i + 1)] for i in range(CHOICES)]
    left = [[f" VAR {a} = {b}." for a, b in zip(chain, [value, *chain])] for chain, value in zip(chains, values)]
    order = _shuffled(draw, [i for i in range(CHOICES) for _ in range(hops)])
    question = f"\nWhich variables are {values[0]}, in order? The variables that are {values[0]} are"
    return Puzzle([left[chain].pop(0) for chain in order], question, [", ".join(chain) for chain in chains])


def common_words(draw: random.Random) -> Puzzle:
    """A list of words in which one stands about four times as often as each of the others."""
    words = draw.sample(WORDS, 12)
    many = draw.choices(words, weights=[4] + [1] * (len(words) - 1), k=1 << 16)
    question = "\nWhich word is the most frequent in the list? The most frequent word is"
    return Puzzle([f" {word}" for word in many], question, words[:CHOICES], fill=False)


def frequent_words(draw: random.Random) -> Puzzle:
    """A list of words in which three have shares of 1/4, 1/6 and 1/12; these three are asked for."""
    first, second, third, *others = draw.sample(WORDS, 15)
    block = [first] * 6 + [second] * 4 + [third] * 2 + others
    many = [word for _ in range(1 << 12) for word in _shuffled(draw, block)]
    wrong = [", ".join(words) for words in ((second, first, third), (first, third, second), (first, second, others[0]))]
    question = "\nWhich three words are the most frequent in the list, in order? The most frequent words are"
    return Puzzle([f" {word}" for word in many], question, [f"{first}, {second}, {third}", *wrong], fill=False)


def facts(draw: random.Random, asked: int) -> Puzzle:
    """Four people move between places, as in bAbI's first three tasks (arXiv 1502.05698). Asked is where somebody is
    (1 fact), where a thing is that somebody carries (2), or where it was before (3). Distractors are
    others' answers.
    """
    people, things = draw.sample(PEOPLE, CHOICES), draw.sample(THINGS, CHOICES)
    places = draw.sample(PLACES, 2 * CHOICES)
    before, last = places[:CHOICES], places[CHOICES:]
    left = []
    for person, thing, here, there in zip(people, things, before, last):
        taken = [f" {person} took the {thing}."] if asked > 1 else []
        left.append([*taken, f" {person} went to the {here}.", f" {person} went to the {there}."])
    order = _shuffled(draw, [i for i, sentences in enumerate(left) for _ in sentences])
    sentences = [left[i].pop(0) for i in order]
    if asked == 1:
        return Puzzle(sentences, f"\nWhere is {people[0]}? {people[0]} is in the", last)
    if asked == 2:
        return Puzzle(sentences, f"\nWhere is the {things[0]}? The {things[0]} is in the", last)
    when = f"before the {last[0]}"
    return Puzzle(sentences, f"\nWhere was the {things[0]} {when}? Before, the {things[0]} was in the", before)


LONG_TASKS: dict[str, Callable[[random.Random], Puzzle]] = {
    "passkey": passkey,
    "niah_single": niah_single,
    "niah_multikey": niah_multikey,
    "niah_multivalue": niah_multivalue,
    "niah_multiquery": niah_multiquery,
    "vt": variable_tracking,
    "words": common_words,
    "frequent_words": frequent_words,
    **{f"facts{asked}": functools.partial(facts, asked=asked) for asked in (1, 2, 3)},
}
GROUPS = {group: [name for name in LONG_TASKS if name.startswith(group)] for group in ("niah", "facts")}


def task_names(names: list[str]) -> list[str]:
    """The names of tasks, with groups replaced by their tasks, each once. Raises ValueError for an unknown one."""
    found: list[str] = []
    for name in names:
        if name not in GROUPS and name not in LONG_TASKS:
            raise ValueError(f"long task {name!r} does not exist; there are {', '.join([*LONG_TASKS, *GROUPS])}")
        found += GROUPS.get(name, [name])
    return list(dict.fromkeys(found))


def samples(task: str, tokenizer: Any, filler: Sequence[int], tokens: int, count: int, seed: int = 0) -> list[Sample]:
    """`count` samples of exactly `tokens` tokens, question included, the same for the same seed.

    Sentences are put at random places into a stretch of `filler` (tokens of some text) with a random beginning. Special
    tokens come first.

    Raises:
        ValueError: too few tokens for the task, or no filler text.
    """
    if not filler:
        raise ValueError("the filler text has no tokens: give a longer one")
    begin = list(tokenizer("").input_ids)
    made = []
    for index in range(count):
        draw = random.Random(f"{seed} {task} {tokens} {index}")
        puzzle = LONG_TASKS[task](draw)
        question = _ids(tokenizer, puzzle.question)
        room = tokens - len(begin) - len(question)
        sentences: list[list[int]] = []
        for sentence in puzzle.sentences:
            ids = _ids(tokenizer, sentence)
            if not puzzle.fill and len(ids) > room:
                break
            sentences.append(ids)
            room -= len(ids)
        if room < 0 or (not puzzle.fill and len(sentences) < 100):
            least = tokens - room if puzzle.fill else "a few hundred"
            raise ValueError(f"length {tokens}: {task} needs at least {least} tokens with this tokenizer")
        start = draw.randrange(len(filler))
        rest = list(itertools.islice(itertools.cycle(filler), start, start + room))
        cuts = sorted(draw.randint(0, room) for _ in sentences) if puzzle.fill else [room] * len(sentences)
        context, at = begin, 0
        for cut, ids in zip(cuts, sentences):
            context, at = context + rest[at:cut] + ids, cut
        made.append(Sample(context + rest[at:], question, [f" {answer}" for answer in puzzle.answers]))
    return made


@torch.no_grad()
def score(
    model: Any,
    tokenizer: Any,
    batch: list[Sample],
    method: CacheMethod | None = None,
    chunk: int = 512,
) -> list[tuple[bool, bool]]:
    """For each sample of equal length: (generated exactly, likeliest among the distractors).

    Under a cache method the context is read `chunk` tokens at a time before the question, which the method does not
    see. Without one, both are read at once.
    """
    device = execution_device(model)
    if method is None:
        return _score(model, tokenizer, batch, [_rows([s.context + s.question for s in batch], device)])
    check_chunk(method, chunk)
    hits: dict[int, tuple[bool, bool]] = {}
    with compress(model, method):
        for size in {len(sample.question) for sample in batch}:  # rows of one length
            indices = [index for index, sample in enumerate(batch) if len(sample.question) == size]
            some = [batch[index] for index in indices]
            parts = list(_rows([s.context for s in some], device).split(chunk, 1))
            hits |= zip(indices, _score(model, tokenizer, some, [*parts, _rows([s.question for s in some], device)]))
    return [hits[index] for index in range(len(batch))]


def _score(model: Any, tokenizer: Any, batch: list[Sample], parts: list[Tensor]) -> list[tuple[bool, bool]]:
    read = _Reader(model)
    cache = None
    for part in parts:
        logits, cache = read(part, cache, keep=1)
    device = parts[0].device
    rows = [[_ids(tokenizer, answer) for answer in sample.answers] for sample in batch]

    likelihoods = torch.empty(len(batch), CHOICES, dtype=torch.float64)
    for choice in range(CHOICES):
        answers = [row[choice] for row in rows]
        longest = max(map(len, answers))
        ids = _rows([answer + [answer[-1]] * (longest - len(answer)) for answer in answers], device)
        after, held = [logits], copy.deepcopy(cache)
        for at in range(longest - 1):  # one at a time, as in generation: Mamba forgets its state before longer calls
            step, held = read(ids[:, at : at + 1], held, keep=1)
            after.append(step)
        said = torch.cat(after, dim=1)
        log_p = said.to(torch.promote_types(said.dtype, torch.float32)).log_softmax(-1)
        each = log_p.gather(2, ids[..., None])[..., 0].double().cpu()
        likelihoods[:, choice] = torch.stack([row[: len(answer)].sum() for row, answer in zip(each, answers)])

    chosen = [logits[:, -1:].argmax(-1)]
    for _ in range(max(len(row[0]) for row in rows)):  # one more than the answer: does its last word end there?
        step, cache = read(chosen[-1], cache, keep=1)
        chosen.append(step[:, -1:].argmax(-1))
    generated = torch.cat(chosen, dim=1).tolist()
    texts = [tokenizer.decode(ids).strip() for ids in generated]
    return [
        (_begins(text, sample.answers[0].strip()), bool(values[0] > values[1:].max()))
        for text, sample, values in zip(texts, batch, likelihoods)
    ]


def _begins(text: str, answer: str) -> bool:
    """Whether the text begins with the answer and its last word ends there: "123456" does not begin with 12345."""
    return text.startswith(answer) and not text[len(answer) : len(answer) + 1].isalnum()


class _Reader:
    """Calls a causal language model on further tokens: (logits, cache)."""

    def __init__(self, model: Any):
        self.model, self.keeps = model, "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, ids: Tensor, cache: Any, keep: int) -> tuple[Tensor, Any]:
        more = {"logits_to_keep": keep} if self.keeps else {}
        held = {} if cache is None else {CACHE_NAME: cache}
        out = self.model(input_ids=ids, use_cache=True, **held, **more)
        if out.get(CACHE_NAME) is None:
            raise ValueError(f"{type(self.model).__name__} returns no {CACHE_NAME}: use a model with a key/value cache")
        return out.logits[:, -keep:], out[CACHE_NAME]


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share: (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n)."""
    p, square = hits / count, Z * Z / count
    half = Z * math.sqrt(p * (1 - p) / count + square / (4 * count))
    middle = p + square / 2
    low, high = (middle - half) / (1 + square), (middle + half) / (1 + square)
    return (0.0 if hits == 0 else low), (1.0 if hits == count else high)


def evaluate_long(
    model: Any,
    tokenizer: Any,
    tasks: list[str],
    lengths: list[int],
    filler: str,
    method: CacheMethod | None = None,
    count: int = 40,
    seed: int = 0,
    batch_size: int = 8,
    chunk: int = 512,
) -> dict[str, Any]:
    """Scores by task and length, and the means over the tasks with a signal.

    Returns {"tasks": {task: {"generation" | "likelihood": {"signal": bool, "lengths": {length: {hits, count, score,
    low, high}}}}}, "mean": {"generation" | "likelihood": {length: mean or None}}}.

    Raises:
        ValueError: an unknown task; a length too short for it, or beyond the model's learned positions.
    """
    names, lengths = task_names(tasks), sorted(set(lengths))
    for argument, value in (("count", count), ("batch_size", batch_size), ("lengths", min(lengths, default=0))):
        if value < 1:
            raise ValueError(f"{argument}={value}: must be at least 1")
    if is_diffusion(model):
        raise ValueError(f"{type(model).__name__}: retrieval is not implemented for diffusion models; use --text")
    text = encode([filler], tokenizer)[0]
    every = {name: {n: samples(name, tokenizer, text, n, count, seed) for n in lengths} for name in names}
    for by_length in every.values():
        for length, made in by_length.items():
            longest = max(len(_ids(tokenizer, answer)) for sample in made for answer in sample.answers)
            _check_positions(model, length, longest + 1)
    chance = {"generation": 0.0, "likelihood": 1 / CHOICES}
    result: dict[str, Any] = {"tasks": {}, "mean": {}}
    for name in names:
        cells: dict[str, dict[str, Any]] = {kind: {} for kind in chance}
        for length in lengths:
            made, found = every[name][length], []
            for at in range(0, count, batch_size):
                found += score(model, tokenizer, made[at : at + batch_size], method, chunk)
            for kind, hit in zip(chance, zip(*found)):
                low, high = wilson(sum(hit), count)
                cells[kind][str(length)] = {
                    "hits": sum(hit),
                    "count": count,
                    "score": sum(hit) / count,
                    "low": low,
                    "high": high,
                }
        result["tasks"][name] = {
            kind: {"signal": cells[kind][str(lengths[0])]["low"] > chance[kind], "lengths": cells[kind]}
            for kind in chance
        }
    for kind in chance:
        kept = [task[kind]["lengths"] for task in result["tasks"].values() if task[kind]["signal"]]
        result["mean"][kind] = {
            str(n): sum(row[str(n)]["score"] for row in kept) / len(kept) if kept else None for n in lengths
        }
    return {"chance": chance, **result}


@torch.no_grad()
def nats_by_position(
    model: Any, documents: Sequence[Sequence[int]], edges: Sequence[int], windows: int = 4
) -> list[list[float]]:
    """Mean −log p of the tokens at positions [edges[i], edges[i + 1]) of a window. There is one row for each document
    longer than the last edge, a mean over `windows` windows spread over the document.

    Raises:
        ValueError: a diffusion model, whose outputs are of the tokens that it reads and not of the next ones; no
            document is long enough, or the windows are beyond the model's learned positions.
    """
    if is_diffusion(model):
        raise ValueError(f"{type(model).__name__}: nats by position are of causal models; use --text")
    length, rows = edges[-1], []
    _check_positions(model, length, 0)
    for ids in documents:
        if len(ids) <= length:
            continue
        total = torch.zeros(length, dtype=torch.float64)
        for number in range(windows):
            start = round(number * (len(ids) - length - 1) / max(windows - 1, 1))
            piece = torch.tensor(ids[start : start + length + 1], device=execution_device(model))
            logits = model(input_ids=piece[None, :-1], use_cache=False).logits[0]
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            total += F.cross_entropy(wide, piece[1:], reduction="none").double().cpu()
        rows.append([float(total[a:b].mean()) / windows for a, b in itertools.pairwise(edges)])
    if not rows:
        raise ValueError(f"length {length}: no document has more than as many tokens; use a shorter one")
    return rows


def _check_positions(model: Any, length: int, answer: int) -> None:
    """Refuse texts longer than a table of learned positions. Rotary positions have no limit, and are to be tested."""
    config = model.config
    name = getattr(config, "positions", None)
    learned = name["name"] == "learned" if isinstance(name, dict) else getattr(config, "rope_parameters", None) is None
    most = getattr(config, "max_position_embeddings", None)
    if learned and most is not None and length + answer > most:
        raise ValueError(
            f"length {length}: the model has {most} learned positions, use at most {most - answer} (answers have up to "
            f"{answer} tokens)"
        )


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _rows(ids: list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(ids, device=device)


def _numbers(draw: random.Random, count: int) -> list[str]:
    return [str(number) for number in draw.sample(range(10000, 100000), count)]


def _shuffled(draw: random.Random, items: list[Any]) -> list[Any]:
    return draw.sample(items, len(items))


def _needle(key: str, value: str) -> str:
    return f" The secret number of the {key} is {value}."


def _question(key: str) -> str:
    return f"\nWhat is the secret number of the {key}? The secret number of the {key} is"

"""Scores of descriptions, against other implementations or counted by hand."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter

import pytest
import sacrebleu
import torch
from nltk.stem.porter import PorterStemmer
from nltk.translate.meteor_score import _count_chunks, _enum_stem_match, _match_enums
from rouge_score.rouge_scorer import RougeScorer
from table_cases import GRID, host, pairs, tokenizer
from transformers import BertConfig, BertModel

from fathom.tables.text import Table, metrics
from fathom.tables.text.metrics.entailed import tokens
from fathom.tables.text.metrics.mentions import mentioned, number_precision, numbers

TABLE = Table((("name", "Alan Bo"), ("food", "Thai food"), ("near", "the river")))
RIGHT = "Alan Bo serves Thai food near the river ."
SAID = ["Alan Bo serves Greek food near the river", "Thai food by Alan near the sea", "xyz", RIGHT]


def parent_by_the_sheet(said: str, right: str, table: Table, weight: float | None) -> tuple[float, float, float]:
    """With lists and loops, one n-gram after the other."""
    a, b = said.lower().split(), right.lower().split()
    known = {word for value in table.values for word in value.lower().split()}
    grams = lambda words, n: [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]  # noqa: E731
    w = lambda g: sum(t in known for t in g) / len(g)  # noqa: E731
    p, r = [], []
    for n in (1, 2, 3, 4):
        ours, theirs = grams(a, n), grams(b, n)
        top = sum(min(1, theirs.count(g) / ours.count(g)) * (1 - w(g)) + w(g) for g in ours)
        p.append(top / len(ours) if ours else 0)
        low = sum(w(g) for g in theirs)
        hit = sum(w(g) * min(theirs.count(g), ours.count(g)) / theirs.count(g) for g in theirs)
        r.append(hit / low if low else 0)
    p, r = ([x[0], *(v if v > 0 else 1e-5 for v in x[1:])] for x in (p, r))

    def lcs(x: list[str], y: list[str]) -> int:
        if not x or not y:
            return 0
        return 1 + lcs(x[1:], y[1:]) if x[0] == y[0] else max(lcs(x[1:], y), lcs(x, y[1:]))

    share = lambda y: sum(lcs(v.lower().split(), y) / len(v.split()) for v in table.values) / len(table.values)  # noqa: E731
    lam = 1 - share(b) if weight is None else weight
    precision, recall = math.prod(p) ** 0.25, math.prod(r) ** (0.25 * (1 - lam)) * share(a) ** lam
    return precision, recall, 2 * precision * recall / (precision + recall) if precision + recall else 0.0


@pytest.mark.parametrize("weight", [0.5, None, 0.0, 1.0])
@pytest.mark.parametrize("said", SAID)
def test_parent_is_its_equation(said, weight):
    found = metrics.parent([said], [[RIGHT]], [TABLE], weight)
    expected = parent_by_the_sheet(said, RIGHT, TABLE, weight)
    assert (found.precision, found.recall, found.f1) == pytest.approx(expected, rel=1e-12)


def test_parent_knows_a_perfect_text_and_takes_the_best_reference():
    full = "Alan Bo Thai food the river"
    assert metrics.parent([full], [[full]], [TABLE]).f1 == pytest.approx(1)
    assert metrics.parent(["a b"], [["a b"]], [TABLE]).f1 < 1  # fewer than four words do not score 1 against themselves
    both = metrics.parent(SAID, [["xyz", RIGHT]] * 4, [TABLE] * 4).f1
    one = [max(metrics.parent([s], [[r]], [TABLE]).f1 for r in ("xyz", RIGHT)) for s in SAID]
    assert both == pytest.approx(sum(one) / 4)
    with pytest.raises(ValueError, match="1 predictions, 2 references, 1 tables: must agree"):
        metrics.parent(["a"], [["a"], ["b"]], [TABLE])


def test_bleu_and_rouge_take_any_number_of_references():
    references = [[RIGHT], [RIGHT, "Thai food by Alan near a sea"], ["abc"], [RIGHT, "x"]]
    streams = [[some[i] if i < len(some) else None for some in references] for i in range(2)]
    for kind in ("13a", "none"):
        assert metrics.bleu(SAID, references, kind) == sacrebleu.corpus_bleu(SAID, streams, tokenize=kind).score
    scorer = RougeScorer(["rouge4"], use_stemmer=True)
    best = [scorer.score_multi(some, said)["rouge4"].fmeasure for said, some in zip(SAID, references, strict=True)]
    assert metrics.rouge4(SAID, references) == pytest.approx(sum(best) / 4)


def test_meteor_is_nltks_without_the_stage_that_needs_a_download():
    texts = ["the cats sat on the mat", "on the mat sat the cat", "a dog runs", "the running dogs , they ran", "x y z"]
    right = "the cat was sitting on the mat and the dogs ran"
    for said in texts:
        a, b = list(enumerate(tokens(said))), list(enumerate(tokens(right)))
        exact, a, b = _match_enums(a, b)
        stems, _, _ = _enum_stem_match(a, b, PorterStemmer())
        matches = sorted(exact + stems)
        n = len(matches)
        if not n:
            assert metrics.meteor([said], [[right]]) == 0
            continue
        precision, recall = n / len(tokens(said)), n / len(tokens(right))
        found = metrics.meteor([said], [[right]])
        whole = 10 * precision * recall / (recall + 9 * precision)
        # NLTK aligns from the end, ours towards fewer chunks: as many matches, never more chunks
        least = whole * (1 - 0.5 * (_count_chunks(matches) / n) ** 3)
        assert least - 1e-12 <= found <= whole
    assert metrics.meteor(["the cat"], [["the cat"]]) == pytest.approx(1 - 0.5 / 8)
    assert metrics.meteor(["cats"], [["cat"]]) == pytest.approx(0.5)


def test_cells_that_are_mentioned():
    assert numbers("27.5 %, −3 of 1,000 at x2 or v1.2.3 and .5") == [(27.5, 1), (-3, 0), (1000, 0), (0.5, 1)]
    assert metrics.coverage("Our net has 27.50 F1", GRID.highlights) == 1
    assert metrics.coverage("It has 27.5 F1", GRID.highlights) == 0.5
    assert metrics.coverage("our new net", ["our net"]) == 0 and metrics.coverage("x", []) is None
    assert metrics.off_target("our net has 27.5, base 21", GRID) == pytest.approx(2 / 4)
    assert metrics.off_target("nothing", GRID) is None
    said = "27.5 is 6.5 above 21, 1.31 times, 131 %, a sum of 48.5 and 77"
    assert metrics.number_precision(said, ["27.5", "21.0"]) == pytest.approx(6 / 7)
    assert metrics.number_precision("28 or 27", ["27.5"]) == pytest.approx(1)  # both within the digits written
    assert metrics.number_precision("none", ["1"]) is None


def test_plans_words_and_variety():
    table, text = pairs()[0]
    plan = ["name", "food", "near"]
    assert metrics.plan_adherence(text, table, plan) == 1
    assert metrics.plan_adherence(text, table, plan[::-1]) == pytest.approx(1 / 3)
    assert metrics.plan_adherence("nobody", table, plan) == 0 and metrics.plan_adherence("x", table, []) is None
    assert metrics.plan_distance(plan, plan) == 0 and metrics.plan_distance([], plan) == 1
    assert metrics.plan_distance(["name", "near"], plan) == pytest.approx(1 / 3)
    assert metrics.hallucination("Alan of Paris serves food", table) == pytest.approx(2 / 4)
    assert metrics.hallucination("Alan of Paris serves food", table, ["Paris serves"]) == 0
    assert metrics.distinct(["a a a a"], 1) == 0.25 and metrics.distinct(["a b", "a a"], 2) == 0.5


def test_bleurt_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="in no package registry"):
        metrics.bleurt(["a"], ["b"])


def test_ctrleval_is_the_likelihood_of_what_a_mask_hides(tmp_path):
    host("bart").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    corpus = [text for _, text in pairs(6)]
    judge = metrics.CTRLEval(str(tmp_path), corpus)
    assert judge.mask == "<mask>"
    frequency = Counter(word for text in corpus for word in set(tokens(text)) if word.isalpha())
    raw = [math.log(7) / min(frequency[w] for w in tokens(t) if w.isalpha()) for t in corpus[:3]]
    assert judge.weights(corpus[:3]) == pytest.approx([value / sum(raw) for value in raw])
    assert sum(judge.weights(corpus)) == pytest.approx(1)
    model, known = host("bart"), tokenizer()

    def likelihood(source: str, target: str) -> float:
        ids, labels = (known(text, return_tensors="pt")["input_ids"] for text in (source, target))
        start = torch.tensor([[model.config.decoder_start_token_id]])
        logits = model(input_ids=ids, decoder_input_ids=torch.cat([start, labels[:, :-1]], 1)).logits
        return logits.log_softmax(-1)[0].gather(1, labels[0][:, None]).mean().item()

    a, b = corpus[:2]
    weights = judge.weights([a, b])
    expected = weights[0] * likelihood(f"<mask> {b}", a) + weights[1] * likelihood(f"{a} <mask>", b)
    assert judge.coherence(f"{a} {b}") == pytest.approx(expected, rel=1e-4)
    weights = judge.weights(["Alan Thai", a])
    expected = weights[0] * likelihood(f"<mask> {a}", "Alan Thai") + weights[1] * likelihood("Alan Thai <mask>", a)
    assert judge.consistency("Alan Thai", a) == pytest.approx(expected, rel=1e-4)
    verbalisers = {"good": ["Thai"], "bad": ["Greek", "Welsh"]}
    shares = [judge.attribute(a, label, verbalisers, ["It is [mask] ."]) for label in verbalisers]
    assert sum(shares) == pytest.approx(1) and min(shares) > 0
    with pytest.raises(ValueError, match="label='odd': has no verbalisers; labels: good, bad"):
        judge.attribute(a, "odd", verbalisers, ["[mask]"])
    with pytest.raises(ValueError, match=r"write \[mask\] where the label stands"):
        judge.attribute(a, "good", verbalisers, ["It is"])
    with pytest.raises((FileNotFoundError, ValueError), match="CTRLEval model="):
        metrics.CTRLEval("/nowhere/model")


def test_bert_score_of_a_model_by_path(tmp_path):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer()), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    model = BertModel(config).eval()
    model.save_pretrained(tmp_path)
    known = tokenizer()
    known.save_pretrained(tmp_path)
    found = metrics.bert_score([SAID[0], RIGHT], [[RIGHT], [RIGHT, SAID[1]]], str(tmp_path), 1)
    states = []
    for text in (SAID[0], RIGHT):
        with torch.no_grad():
            h = model(known(text, return_tensors="pt")["input_ids"]).last_hidden_state[0]
        states.append(h / h.norm(dim=-1, keepdim=True))
    similar = states[0] @ states[1].T
    p, r = similar.max(1).values.mean(), similar.max(0).values.mean()
    assert found == pytest.approx(float((2 * p * r / (p + r) + 1) / 2), rel=0.02)


@pytest.mark.parametrize(
    ("cell", "text", "named"),
    [
        ("3–1", "they won 3", False), ("3–1", "they won 3–1", True), ("3-1", "by 3 - 1", True),
        ("2020-01-03", "in 2020", False), ("2020-01-03", "on 2020-01-03", True),
        ("27.5 ± 0.3", "it has 27.5", True), ("27.5 (2)", "it has 27.5", True), ("27.5 ± 0.3", "it has 0.3", False),
    ],
)  # fmt: skip
def test_a_cell_of_several_numbers_is_named_by_all_of_them(cell, text, named):
    assert mentioned(cell, text) is named


def test_numbers_of_a_large_table_are_looked_up_and_not_tried_in_pairs():
    """Against all pairs where there are few; and ten thousand cells, of which pairs make nothing."""
    draw = random.Random(0)
    for _ in range(200):
        held = {draw.choice((-1, 1)) * draw.randint(0, 240) / 8 for _ in range(draw.randint(0, 5))}
        said = draw.randint(-90, 90) / draw.choice((1, 10, 100))
        digits, pairs = len(f"{said}".partition(".")[2]), list(itertools.permutations(held, 2))
        made = [*held, *(a + b for a, b in pairs), *(a - b for a, b in pairs)]
        made += [scale * a / b for a, b in pairs if b for scale in (1, 100)]
        right = any(abs(value - said) <= 0.5 * 10.0**-digits + 1e-12 for value in made)
        assert number_precision(f"{said}", [f"{value}" for value in held]) == right, (said, held)
    began = time.perf_counter()
    assert number_precision("123456.7 of 99999999", [f"{i * 1.37}" for i in range(10_000)]) == 0
    assert time.perf_counter() - began < 5

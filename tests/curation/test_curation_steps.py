"""Each step by itself, against values worked out by hand or by another program."""

import itertools
import random

import numpy as np
import pytest
from datasketch import MinHash, MinHashLSH
from raw_texts import prose

from fathom.curation import Curation
from fathom.curation.cleaning import clean
from fathom.curation.decontaminate import Questions
from fathom.curation.deduplicate import digest, matches, signature
from fathom.curation.language import identify
from fathom.curation.quality import RULES, measure, refusal
from fathom.curation.words import identities, ngrams


def test_hashes_of_ngrams_are_the_sum_over_their_words():
    ids = identities("One two, TWO one — two three. One two two")
    expected = [
        sum(int(w) * pow(0x9E3779B97F4A7C15, j, 1 << 64) for j, w in enumerate(ids[i : i + 3])) % (1 << 64)
        for i in range(len(ids) - 2)
    ]
    assert (
        ngrams(ids, 3).tolist() == expected and expected[0] == expected[-1] and len(set(expected)) == len(expected) - 1
    )
    assert len(ngrams(ids, 9)) == 1 and len(ngrams(ids, 10)) == 0
    long = identities(f"{prose(0, 400)}\n" * 200)  # past one block of powers
    assert set(ngrams(long, 5)[-100:].tolist()) <= set(ngrams(long[:900], 5).tolist())


def jaccard(a: str, b: str) -> float:
    sets = [set(zip(*(t.split()[i:] for i in range(5)))) for t in (a, b)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_minhash_estimates_the_jaccard_similarity():
    config, base = Curation(), prose(1, 600)
    assert np.mean(signature(identities(base), config) == signature(identities(base.upper()), config)) == 1
    for seed in range(4):
        words = base.split()
        for place in random.Random(seed).sample(range(600), 5 * seed + 5):
            words[place] = "changed"
        other = " ".join(words)
        alike = np.mean(signature(identities(base), config) == signature(identities(other), config))
        assert abs(alike - jaccard(base, other)) < 4 * 0.5 / 128**0.5  # four standard deviations at most
    disjoint = " ".join(f"w{i}" for i in range(300))
    assert np.mean(signature(identities(base), config) == signature(identities(disjoint), config)) < 0.02


def bands(texts, config):
    """What gives a band of the signatures of texts."""
    rows = np.array([signature(identities(text), config) for text in texts])
    return rows.reshape(len(texts), config.bands, -1).transpose(1, 0, 2).__getitem__


def test_one_of_k_copies_is_kept():
    base = prose(2, 400)
    near = base.replace(base.split()[5], "another", 1)
    texts = [prose(3), base, prose(4), base, near, base + "\n\n", near, prose(5), prose(4)]
    config = Curation()
    found = matches([digest(t) for t in texts], bands(texts, config), config)
    assert [(m.number, m.original, m.similarity is None) for m in found] == [
        (3, 1, True), (4, 1, False), (5, 1, True), (6, 1, True), (8, 2, True)
    ]  # fmt: skip
    exact = matches([digest(t) for t in texts], None, Curation(near_duplicates=False))
    assert [(m.number, m.original) for m in exact] == [(3, 1), (5, 1), (6, 4), (8, 2)]


def test_pairs_are_those_that_datasketch_finds():
    """Groups of near copies of decreasing similarity, by datasketch's LSH with the same bands, checked the same way."""
    config, texts = Curation(permutations=64, bands=16, similarity=0.5), []
    for seed in range(30):
        words = prose(seed, 200).split()
        texts.append(" ".join(words))
        for changes in (2, 12, 40):
            for place in random.Random(seed + changes).sample(range(200), changes):
                words[place] = f"changed{seed}"
            texts.append(" ".join(words))
    signatures = np.array([signature(identities(t), config) for t in texts])
    lsh = MinHashLSH(num_perm=64, params=(16, 4))
    graph: dict[int, set[int]] = {}
    for number, row in enumerate(signatures):
        sketch = MinHash(hashvalues=row, scheme="affine32")
        near = {n for n in lsh.query(sketch) if np.mean(signatures[n] == row) >= 0.5}
        lsh.insert(number, sketch)
        together = {number}.union(*(graph[n] for n in near))
        graph.update(dict.fromkeys(together, together))
    expected = {number: min(group) for number, group in graph.items() if min(group) != number}
    found = {m.number: m.original for m in matches([digest(t) for t in texts], bands(texts, config), config)}
    assert found == expected and len(found) > 30


def test_texts_without_a_word_are_no_near_duplicates():
    config = Curation()
    texts = ["☃ ☂ ☀", "★ ☆ ☯", "one two three", "☃  ☂ ☀"]
    found = matches([digest(t) for t in texts], bands(texts, config), config)
    assert [(m.number, m.original, m.similarity) for m in found] == [(3, 0, None)]


def test_a_planted_question_is_found(tmp_path):
    question = "Which of the following minerals forms the hard outer layer of the made-up moon called Ubbo?"
    short = "What drives the slow drift of plates?"
    (tmp_path / "quiz.jsonl").write_text(
        f'{{"question": "{question}", "choices": ["quartz", "ice"], "subject": "{prose(9, 20).splitlines()[0]}"}}\n'
        f'{{"question": "{short}"}}\n{{"question": "Why one two three four five six seven eight?"}}\n'
    )
    questions = Questions(Curation(benchmarks={"quiz": str(tmp_path / "quiz.jsonl")}))
    assert (questions.rows["quiz"], questions.unchecked["quiz"]) == (3, 1)
    words = question.upper().split()
    for begin in range(3):  # any 13 words of it, in other case and marks
        planted = f"{prose(6)}\n{' * '.join(words[begin : begin + 13])}\n{prose(7)}"
        name, hit = questions.find(planted)
        assert name == "quiz" and len(hit.split()) == 13 and "minerals forms" in hit
    assert questions.find(f"{prose(6)} {' '.join(words[:12])} {prose(7)}") is None
    assert questions.find(f"ask why one, two, three: four five six seven eight. {prose(8)}")[0] == "quiz"
    assert questions.find(f"{short} {prose(9, 20)}") is None  # too short to tell; a subject is no question


MEASURED = "Aa bb cc1 33 ..\nAa bb\nAa bb\n\nlonger!"


def test_measures_are_what_a_hand_counts():
    got = measure(MEASURED, "en", frozenset({"longer"}))
    assert got["characters"] == len(MEASURED)
    assert got["symbols"] == pytest.approx(3 / 26)  # two dots and a mark of 26 characters that are no spaces
    assert got["alphabetic"] == pytest.approx(8 / 10)
    assert got["word_length"] == pytest.approx(26 / 10)
    assert got["duplicate_lines"] == pytest.approx(1 / 4)
    assert got["top_bigram"] == pytest.approx(3 * 4 / 26)
    assert got["unknown"] == 0
    assert measure("the xqzz qzzx river", "en")["unknown"] == 0.5
    assert measure("the xqzz qzzx river", None)["unknown"] == 0
    assert measure("[START_TABLE]\nplain\n[END_TABLE]", "en")["symbols"] == 0
    assert measure("", "en")["word_length"] == 0


SHARE = {"too short": "x " * 3, "too long": "river stone " * 9000, "symbols": "a + b = c % " * 40}
SHARE |= {"few words with letters": "12 345 6 river " * 30, "short words": "a i o an if " * 30}
SHARE |= {
    "long words": "interdisciplinarity counterrevolutionaries " * 20,
    "unknown words": "xqqz zzqx river pqqw " * 20,
}
SHARE |= {
    "duplicate lines": "\n".join([prose(1)] * 3),
    "repeated bigram": " ".join(f"green hills {w}" for w in prose(2).split()),
}


@pytest.mark.parametrize("reason", RULES)
def test_each_rule_drops_what_breaks_it(reason):
    """And alone: with the other bounds off, whatever their order, the same documents are kept."""
    off = {option: None for option, _, _ in RULES.values() if option != RULES[reason][0]}
    said, detail = refusal(Curation(**off), measure(SHARE[reason]))
    assert said == reason and (" < " in detail or " > " in detail)
    assert refusal(Curation(), measure(prose(3))) is None


def test_what_is_kept_does_not_depend_on_the_order_of_the_rules(monkeypatch):
    texts = [*SHARE.values(), *(prose(seed) for seed in range(5))]
    measured = [measure(text) for text in texts]
    kept = [refusal(Curation(), m) is None for m in measured]
    for order in itertools.islice(itertools.permutations(RULES), 0, 300, 60):
        monkeypatch.setattr("fathom.curation.quality.RULES", {name: RULES[name] for name in order})
        assert [refusal(Curation(), m) is None for m in measured] == kept
    assert sum(kept) == 5


PAGE = """A study of mud
Ann Reed and Bo Lund, University of Nowhere
ann@example.org
Abstract
Mud is wet. It hydro-
thermally moves, a well-
known fact; well-known indeed.
{body}
Acknowledgements
We thank the rain.

5 References
[1] Reed, A. (1999). Mud. J. Mud 3.
Lund, B. 2003. More mud
in two lines.
Appendix A
Mud tables stay.
[START_TABLE]
12
[END_TABLE]"""


def test_cleaning_takes_what_is_no_text_and_says_so():
    pages = "\n".join(f"{prose(n, 90)}\nJournal of Mud, vol. {n}\n{n + 10}" for n in range(3))
    text, removed = clean(PAGE.format(body=pages), Curation().clean)
    by_rule: dict[str, list[str]] = {}
    for _, rule, line in removed:
        by_rule.setdefault(rule, []).append(line)
    assert by_rule == {
        "affiliations": ["Ann Reed and Bo Lund, University of Nowhere", "ann@example.org"],
        "hyphenation": ["thermally moves, a well-", "known fact; well-known indeed."],
        "running heads": [f"Journal of Mud, vol. {n}" for n in range(3)],
        "page numbers": ["10", "11", "12"],
        "acknowledgements": ["Acknowledgements", "We thank the rain."],
        "references": [
            "5 References",
            "[1] Reed, A. (1999). Mud. J. Mud 3.",
            "Lund, B. 2003. More mud",
            "in two lines.",
        ],
    }
    assert "It hydrothermally moves, a well-known fact" in text
    assert text.endswith("Appendix A\nMud tables stay.\n[START_TABLE]\n12\n[END_TABLE]") and prose(1, 90) in text
    numbered = PAGE.format(body=pages).split("\n")
    assert all(numbered[n - 1] == line for n, rule, line in removed if rule != "hyphenation")
    assert clean(text, Curation().clean) == (text, [])  # nothing is left to do


def test_language():
    assert identify(prose(1))[0] == "en"
    german = "Der Fluss floss langsam über die alten Steine, während warmer Regen auf das stille Tal fiel. " * 30
    assert identify(german)[0] == "de"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_symbols": 1.5}, "max_symbols=1.5: must be a share"),
        ({"min_characters": 10, "max_characters": 5}, "max_characters=5: must be at least min_characters=10"),
        ({"bands": 7}, "bands=7: must divide permutations=128"),
        ({"clean": ("headers",)}, "clean=.*must name rules out of references"),
        ({"classes": ("good",)}, "classes=.*must be given with classifier_model"),
        ({"max_perplexity": 50.0}, "perplexity_model=None: must be given with a bound"),
        ({"benchmark_ngram": 5}, "benchmark_ngram=5: must be at least benchmark_shortest=8"),
        ({"benchmark_ngram": 9}, "benchmark_ngram=9: must be left out with benchmarks=None, without which nothing"),
        ({"near_duplicates": False, "similarity": 0.9}, "similarity=0.9: must be left out with near_duplicates=False"),
        (
            {"language": None, "language_confidence": 0.9},
            "language_confidence=0.9: must be left out with language=None",
        ),
        ({"min_score": 4.0}, "min_score=4.0: must be left out with judge_model=None"),
        ({"model_characters": 100}, "model_characters=100: must be left out where no model is asked"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Curation(**options)

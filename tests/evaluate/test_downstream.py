"""Which downstream tasks tell models from guessing, and means over them."""

import math

import pytest

from fathom.evaluate.downstream import Accuracy, mean, signal, without_signal


def score(value: float, error: float = 0.01, chance: float = 0.25, documents: int = 1000) -> Accuracy:
    return Accuracy("acc", value, error, chance, documents)


def test_a_signal_is_more_than_two_standard_errors_from_guessing():
    guessing = math.sqrt(0.25 * 0.75 / 1000)  # 0.0137, above the models' own 0.01
    assert not signal([score(0.25 + 1.9 * guessing)]) and signal([score(0.25 + 2.1 * guessing)])
    assert signal([score(0.25 - 2.1 * guessing)])  # steadily wrong is no guessing
    assert not signal([score(0.3, error=0.03)])
    assert not signal([score(0.0, error=0.0, documents=4)])  # a spread of none says little of four documents
    assert signal([score(0.01, error=0.003, chance=0.0)]) and not signal([score(0.0, error=0.0, chance=0.0)])
    assert not signal([score(0.30), score(0.22)])  # of several runs the mean


def test_a_task_counts_where_one_contestant_has_a_signal():
    contestants = {
        "vanilla": [{"easy": score(0.4), "hard": score(0.26), "one": score(0.25)}],
        "loop": [{"easy": score(0.5), "hard": score(0.24), "one": score(0.4)}],
    }
    assert without_signal(contestants) == ["hard"]
    value, error = mean(contestants["loop"], ["easy", "one"])
    assert value == pytest.approx(0.45) and error == pytest.approx(math.hypot(0.01, 0.01) / 2)

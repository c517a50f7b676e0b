"""benchmarks/depth/scaling.py: a law that made the points is found again, and it foretells a size that it never saw."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from example import run

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "depth" / "scaling.py"
LAWS = {"vanilla": (0.5, 0.2), "loop": (0.4, 0.25)}  # a, b
FLOOR = 0.9


@pytest.fixture(scope="module")
def scaling():
    spec = importlib.util.spec_from_file_location("scaling", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sizes(noise=0.0):
    """Four sizes of each method, two seeds, whose scores lie `noise` above and below the law's."""
    generator = np.random.default_rng(0)
    for method, (a, b) in LAWS.items():
        for millions in (5, 12, 38, 117):
            flops = millions * 1e14
            drawn = FLOOR + a * (flops / 1e15) ** -b + noise * generator.standard_normal()
            for seed, away in enumerate((-0.01, 0.01)):
                made = run(method, seed=seed)
                size = {"non_embedding_params": millions * 10**6, "train_flops": flops}
                yield replace(made, scores={"bits_per_byte": drawn + away}, method=f"{method}-{millions}m", **size)


def test_a_law_is_found_again_and_meets_the_size_that_it_never_saw(scaling):
    found = scaling.points(list(sizes()), "bits_per_byte")
    assert [[point.seeds for point in points] for points in found.values()] == [[2] * 4] * 2
    predicted = scaling.predict(found)
    assert predicted["floor"] == pytest.approx(FLOOR, abs=1e-3) and predicted["freedom"] == 1
    for row, (a, b) in zip(predicted["methods"], LAWS.values(), strict=True):
        assert (row["a"], row["b"]) == pytest.approx((a, b), rel=1e-2)
        assert row["largest"]["parameters"] == 117 * 10**6
        assert row["measured_less_predicted"] == pytest.approx(0, abs=1e-4)


def test_intervals_widen_with_the_scatter_and_hold_the_point(scaling):
    predicted = scaling.predict(scaling.points(list(sizes(noise=0.003)), "bits_per_byte"))
    for row in predicted["methods"]:
        assert row["low"] < row["largest"]["score"] < row["high"] and row["high"] - row["low"] > 0.01


def test_of_a_run_that_is_there_twice_the_newer_counts(scaling):
    newer = replace(run("vanilla"), date="2026-12-01T10:00+00:00")
    older = replace(newer, scores={"bits_per_byte": 9.0}, date=None)
    for runs in ([older, newer], [newer, older]):
        ((point,),) = scaling.points(runs, "bits_per_byte").values()
        assert point.score == newer.scores["bits_per_byte"] and point.seeds == 1


def test_too_few_sizes_are_refused(scaling):
    found = scaling.points(list(sizes()), "bits_per_byte")
    with pytest.raises(ValueError, match=r"4 points of 2 methods: .* need at least 6; give four sizes"):
        scaling.predict({method: points[1:] for method, points in found.items()})

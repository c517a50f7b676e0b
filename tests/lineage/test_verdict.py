"""Verdicts against nulls: counting, correction, zones, what pure chance does, and the shipped calibration."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fathom.lineage import verdict
from fathom.lineage.awm import exceeds
from fathom.lineage.cka import Samples, unbiased_cka
from fathom.lineage.verdict import Null, combine, holm, judge

ROOT = Path(__file__).parents[2]


def test_p_counts_and_never_says_more_than_the_null_holds():
    null = Null("m", False, (64, 128), 8, 9, (0.0, 0.1, 0.1, 0.3), 0.35, 0.35, "test")
    assert [null.p(s) for s in (-1, 0.05, 0.1, 0.2, 9)] == [1, 0.8, 0.8, 0.4, 0.2]
    assert null.as_dict()["pairs_without_common_model"] == 4


def test_holm_against_hand_worked_numbers():
    assert holm([0.01, 0.04, 0.03], 3) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.01, None], 3) == [pytest.approx(0.03), None]  # what was not run counts as the highest
    assert holm([0.9, 0.8], 2) == [1, 1]


@pytest.fixture
def null(monkeypatch):
    """Strangers reach 0.2, or 0.8 in the mode `blunt`."""

    def made(mode, tied, width):
        top = 0.8 if mode == "blunt" else 0.2
        return (
            None if mode == "unknown" else Null(mode, tied, (64, 512), 60, 50, (0.0,) * 19 + (0.1,), top, top, "test")
        )

    monkeypatch.setattr(verdict, "null_for", made)


def test_zones(null):
    high, middle, low = (judge("m", 256, s) for s in (0.9, 0.3, 0.1))
    assert [v.verdict for v in (high, middle, low)] == ["related", "inconclusive", "unrelated"]
    assert "consistent with a common origin" in high.reasons[0] and high.beyond and high.p == pytest.approx(1 / 21)
    assert "training on the same text" in middle.reasons[0] and not low.beyond
    assert "no trace found; disguise is not excluded" in low.reasons[0]
    assert judge("unknown", 256, 1.0).verdict == "inconclusive"
    assert judge("m", 256, 0.9, coverage=0.4).verdict == judge("m", 256, 0.45, coverage=0.55).verdict == "inconclusive"
    assert judge("m", 256, 0.1, suspicions=["W_q is constant"]).reasons[0] == "W_q is constant"
    assert judge("m", 256, 0.1, suspicions=["x"]).verdict == "inconclusive" == judge("m", 256, 0.1, tokens=200).verdict
    assert judge("m", 256, 0.9, suspicions=["x"], tokens=5).verdict == "related"
    assert judge("blunt", 256, 1.0).verdict == "inconclusive"  # strangers reach 0.8: nothing can be called related
    assert judge("m", 256, 0.8, layers=1).verdict == "inconclusive"  # nothing to hold one layer against
    assert "width 4096: the null was measured on widths 64–512" in judge("m", 4096, 0.1).reasons[1]
    assert judge("m", 256, 0.9, tries=3).p == pytest.approx(3 / 21)
    assert [combine(v) for v in ([high, low], [low, low], [low, middle])] == ["related", "unrelated", "inconclusive"]


@pytest.mark.parametrize("width", [4, 8, 32, 64])
@pytest.mark.parametrize("layers", [1, 4])
def test_narrow_and_shallow_strangers_are_not_called_related(width, layers):
    """The CKA of random q and k scatters as 1/(d − 2): one-layer strangers of width 8 reach 0.5 by chance alone."""
    generator = torch.Generator().manual_seed(width + layers)
    samples = [Samples.of(torch.randn(width, 2 * width, generator=generator)) for _ in range(200 * layers)]
    tables = np.array([[[unbiased_cka(a, b) for b in samples[i + layers : i + 2 * layers]]
                        for a in samples[i : i + layers]]
                       for i in range(0, len(samples) - 2 * layers, 2 * layers)])  # fmt: skip
    for mode in ("hardened-lap", "hardened-identity"):
        for table in tables:
            near = [[m for m in (l - 1, l + 1) if 0 <= m < layers] for l in range(layers)]
            scores = [exceeds(table[l, l], [x for m in near[l] for x in (table[l, m], table[m, l])])
                      for l in range(layers)]  # fmt: skip
            judged = np.median(np.diagonal(table) if mode == "hardened-identity" else scores)
            assert judge(mode, width, float(judged), layers=layers).verdict != "related"
        alike = judge(mode, width, 1.0, layers=layers).verdict
        assert alike == ("inconclusive" if 8 / (width - 2) / layers**0.5 >= 1 else "related")


def test_what_neighbours_share_is_no_evidence():
    assert exceeds(0.4, [0.4, 0.4]) == 0 and exceeds(1, [0.4, 0.2]) == 1 and exceeds(0.3, [-0.2]) == 0.3
    assert exceeds(0.97, [0.99]) == pytest.approx(0.94)  # a model that repeats one layer is not divided by nothing
    assert exceeds(0.7, []) == 0.7


def test_shipped_nulls_follow_from_the_raw_scores_and_hold_on_models_left_out():
    """The calibration is what its script makes of the raw scores; no stranger of the models left out is called related,
    every continued model is."""
    spec = importlib.util.spec_from_file_location("calibrate", ROOT / "benchmarks" / "lineage" / "calibrate.py")
    calibrate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(calibrate)
    pairs = calibrate.read([ROOT / "docs" / "results" / name for name in ("lineage_zoo", "lineage_zoo_relatives")])
    inside = [p for p in pairs if p["kind"] == "independent" and not any(p["held_out"])]
    made = calibrate.nulls(inside, "")["nulls"]
    assert json.loads(json.dumps(made)) == verdict.nulls()["nulls"]
    said = {kind: [calibrate.words(p)["all"] for p in pairs if p["kind"] == kind and (kind != "independent" or any(
        p["held_out"]))] for kind in ("independent", "continued")}  # fmt: skip
    assert len(said["independent"]) > 600 and "related" not in said["independent"]
    assert said["independent"].count("inconclusive") < 0.05 * len(said["independent"])
    assert set(said["continued"]) == {"related"}

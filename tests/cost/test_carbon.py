"""Energy and CO2: the published account of GeoGalactica, and its assumptions in print."""

from __future__ import annotations

import json

import pytest

from fathom.cost import estimate_carbon
from tiny_checkpoint import run_cli, save_fathom


def test_the_published_account():
    """1,488,137 hours of an accelerator at 300 W: 446 MWh and 212 t (arXiv 2401.00434)."""
    found = estimate_carbon(1_488_137, 300, 0.475)
    assert round(found.kwh / 1000) == 446 and round(found.kg / 1000) == 212
    assert estimate_carbon(10, 700, 0.1, pue=1.5).kwh == pytest.approx(10.5)
    assert "446,441 kWh, 212,060 kg CO2e. Assumed:\n- 1,488,137 accelerator-hours" in str(found)


@pytest.mark.parametrize("wrong", [{"hours": -1}, {"tdp_w": float("nan")}, {"kg_per_kwh": -0.1}, {"pue": 0.9}])
def test_numbers_out_of_range_are_named(wrong):
    with pytest.raises(ValueError, match=f"estimate_carbon option {next(iter(wrong))}="):
        estimate_carbon(**{"hours": 1, "tdp_w": 1, **wrong})


def test_the_command_prints_what_is_assumed(monkeypatch, capsys, tmp_path):
    folder = save_fathom(tmp_path)
    run = lambda *options: run_cli(monkeypatch, capsys, "cost", folder, *options)  # noqa: E731
    plain, priced = run()[1], run("--hours", 10, "--tdp", 500)[1]
    assert priced.startswith(plain.rstrip("\n")) and "5 kWh, 2.375 kg CO2e. Assumed:" in priced
    assert "each at 500 W" in priced and "are not counted" in priced
    assert json.loads(run("--hours", 10, "--json")[1])["carbon"]["kwh"] == 7
    assert "carbon" not in json.loads(run("--json")[1])
    code, _, err = run("--tdp", 500)
    assert (code, err) == (2, "fathom: --tdp, --kg-per-kwh and --pue go with --hours\n")

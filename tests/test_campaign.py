"""The runner of benchmarks: what is worth most a minute first, timed commands alone, nothing done twice."""

import importlib.util
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("campaign", ROOT / "benchmarks/campaign.py")
campaign = sys.modules["campaign"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(campaign)

PLANS = sorted((ROOT / "benchmarks/plans").glob("*.yaml"))


def plan(path, *rows):
    path.write_text(yaml.safe_dump([{"minutes": 1, "command": "true", **row} for row in rows]))
    return campaign.read_plan(path)


def test_worth_counts_what_a_command_waits_for(tmp_path):
    items = plan(
        tmp_path / "plan.yaml",
        {"name": "rows", "minutes": 2, "value": 0},
        {"name": "model", "minutes": 4, "value": 12, "after": ["rows"]},
        {"name": "speed", "value": 1.5},
    )
    assert campaign.worth(items, set()) == {"rows": 2.0, "model": 2.0, "speed": 1.5}
    assert campaign.worth(items, {"rows"})["model"] == 3.0


def test_the_dry_order_says_how_long_all_of_it_takes(tmp_path, monkeypatch, capsys):
    plan(
        tmp_path / "plan.yaml",
        {"name": "rows", "minutes": 30, "value": 0},
        {"name": "model", "minutes": 60, "value": 6},
    )
    monkeypatch.setattr(sys, "argv", ["campaign.py", str(tmp_path / "plan.yaml"), str(tmp_path / "state"), "--dry"])
    assert campaign.main() == 0
    out = capsys.readouterr().out
    assert "  0.10 a minute  model: 60 min, 0 GB" in out and "2 commands to run, 1.5 hours" in out


def test_a_timed_command_has_its_gpu_to_itself(tmp_path):
    items = plan(
        tmp_path / "plan.yaml",
        {"name": "a", "gigabytes": 40, "value": 3, "command": "sleep 60"},
        {"name": "timed", "gigabytes": 1, "alone": True, "value": 2, "command": "sleep 60"},
        {"name": "b", "gigabytes": 40, "command": "sleep 60"},
        {"name": "c", "gigabytes": 120, "command": "sleep 60"},
    )
    one, two = campaign.Gpu(0, 139), campaign.Gpu(1, 139)
    for gpus, running in (((one,), ["a"]), ((one, two), ["a", "timed", "b"])):
        run = campaign.Campaign(items, tmp_path, tmp_path, list(gpus), 2, 5)
        run.place()
        assert sorted(run.running) == sorted(running)  # alone it waits, and keeps the GPU from whatever is worth less
        for process, _, _ in run.running.values():
            process.kill()
        run.stop()
        for gpu in gpus:
            assert not gpu.running


def test_what_is_done_stays_done_and_what_failed_is_tried_again(tmp_path):
    rows = [
        {"name": "counted", "command": f"sh -c 'echo run >> {tmp_path}/counted'"},
        {"name": "breaks", "command": f"test -e {tmp_path}/mended"},
        {"name": "waits", "after": ["breaks"]},
    ]
    items = plan(tmp_path / "plan.yaml", *rows)
    assert not campaign.Campaign(items, tmp_path, tmp_path, [], 2, 5).run()
    assert not (tmp_path / "waits.done").exists()
    (tmp_path / "mended").touch()
    assert campaign.Campaign(items, tmp_path, tmp_path, [], 2, 5).run()
    assert (tmp_path / "counted").read_text() == "run\n"


@pytest.mark.parametrize(
    "rows, why",
    [
        ([{"name": "a"}, {"name": "a"}], "one name"),
        ([{"name": "a", "after": ["b"]}], "waits for b"),
        ([{"name": "a", "after": ["b"]}, {"name": "b", "after": ["a"]}], "waits for itself"),
    ],
)
def test_plans_that_cannot_run_are_refused(tmp_path, rows, why):
    with pytest.raises(ValueError, match=why):
        plan(tmp_path / "plan.yaml", *rows)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_plans_name_files_that_are_here(path):
    items = campaign.read_plan(path)
    for item in items.values():
        for word in item.command.replace("{here}/", "").split():
            if word.startswith(campaign.OURS):
                assert (ROOT / word.split("::")[0]).exists(), (item.name, word)

"""What `fathom grow` makes of a model is related to it, before and after it becomes a stock checkpoint."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from fathom import FathomForCausalLM
from fathom.growth import methods
from fathom.growth.grow import grow
from fathom.lineage.merge import merge_weights
from fathom.lineage.pairs import compare
from fathom.lineage.reader import open_checkpoint
from tiny_checkpoint import run_cli

METHODS = methods()


@pytest.fixture(scope="module")
def family(folders, tmp_path_factory):
    """A base, two branches of it, and what grows: Innovator's mixture, its export, one from scratch, a merge."""
    root = tmp_path_factory.mktemp("family")
    made = {"base": root / "base", "one": root / "one", "two": root / "two"}
    for number, folder in enumerate(made.values()):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_pretrained(folders("llama"), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".mlp." in name:
                    parameter.add_(0.3 * number * parameter.std() * torch.randn(parameter.shape))
        model.save_pretrained(folder)
        (folder / "vocab.json").write_text((folders("llama") / "vocab.json").read_text())
    branches = [made["one"], made["two"]]
    for name, method, given in (
        ("grown", METHODS["innovator"](2, 4), branches),
        ("scratch", METHODS["moe_scratch"](2, 4), []),
        ("merged", METHODS["merge"]("linear"), branches),
    ):
        grow(made["base"], method, root / name, given, seed=5)
        made[name] = root / name
    FathomForCausalLM.from_pretrained(made["grown"]).save_stock_pretrained(root / "stock")
    made["stock"] = root / "stock"
    (made["stock"] / "vocab.json").write_text((made["base"] / "vocab.json").read_text())
    return made


@pytest.mark.parametrize("name", ["one", "grown", "stock"])
def test_what_grows_is_related_to_its_base(name, family, monkeypatch, capsys):
    score = compare(open_checkpoint(family[name]), open_checkpoint(family["base"]), "awm", "lap").score
    assert score == pytest.approx(1, abs=1e-4)
    code, out, _ = run_cli(monkeypatch, capsys, "lineage", "compare", family["base"], family[name], "--json")
    assert code == 0 and json.loads(out)["verdict"] == "related"


def test_a_mixture_from_scratch_is_not(family, monkeypatch, capsys):
    code, out, _ = run_cli(monkeypatch, capsys, "lineage", "compare", family["base"], family["scratch"], "--json")
    assert code != 0 and json.loads(out)["verdict"] != "related"


def test_experts_are_read_as_the_stock_mixture_has_them(family):
    ours, stock = open_checkpoint(family["grown"]), open_checkpoint(family["stock"])
    assert not ours.extra and not stock.extra
    for role in ("experts.0.gate", "experts.5.up", "shared.gate", "router"):
        assert torch.equal(ours.read(1, role), stock.read(1, role)), role
    assert list(ours.feed_forwards(0)) == list(stock.feed_forwards(0))


def test_the_share_of_each_branch_in_a_merge_is_found(family):
    parents = [open_checkpoint(family[name]) for name in ("one", "two")]
    found = merge_weights(open_checkpoint(family["merged"]), parents)
    assert found.weights == pytest.approx([0.5, 0.5], abs=0.01)

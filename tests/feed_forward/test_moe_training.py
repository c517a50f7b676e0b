"""A mixture in a run: what its router says, layer by layer, in metrics.jsonl."""

import warnings

import pytest
import torch
from transformers import set_seed

from fathom import FathomForCausalLM
from fathom.data import DataConfig, prepare
from fathom.depth.base import DepthMethod
from fathom.feed_forward.moe import MixtureOfExperts
from fathom.train import Recipe, Training, train_run
from fathom.train.metrics import DEAD_FOR, Metrics
from fathom.train.recipe import MethodConfig

MOE = {"name": "moe", "experts": 4, "active": 2, "slices": 2, "width": 8, "shared": 16, "z": 0.01}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A recipe's data, prepared."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("the sun over the hill and the sea under the wind.\n" * 80)
    data = DataConfig(
        train=str(folder / "text.txt"), validation=None, tokenizer={"bpe": 260}, block_size=16, num_proc=1
    )
    return data, prepare(data, folder)


def trained(text, folder, feed_forward=MOE, **training):
    data, prepared = text
    model = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    recipe = Recipe(
        "tiny", Training(**{"tokens": 4 * 2 * 16, "sequences": 2, "log_every": 2, **training}), model, data=data
    )
    method = MethodConfig("moe", {"feed_forward": feed_forward})
    return train_run(recipe, method, seed=0, folder=folder, data=prepared)


def test_routers_leave_a_line_by_layer(text, tmp_path):
    lines = [line for line in trained(text, tmp_path / "run").history if "loss" in line]
    assert len(lines) == 2
    for line in lines:
        assert torch.tensor(line["expert_load"]).shape == (2, 4)
        assert torch.tensor(line["expert_load"]).sum(-1).tolist() == pytest.approx([1.0, 1.0])
        for name in ("load_max_over_mean", "load_entropy", "dead_experts", "router_entropy", "router_z"):
            assert len(line[name]) == 2, name
        assert all(0.5 <= value <= 1 for value in line["group_agreement"])
        assert line["penalty"] == pytest.approx(line["balance_loss"] + line["z_loss"])
        assert "domain_information" not in line


@pytest.mark.parametrize("trains", ["router", "feed_forward"])
def test_all_but_what_trains_stays_bit_for_bit(trains, text, tmp_path):
    moe = {**MOE, "shared_gate": "sigmoid"}
    after = FathomForCausalLM.from_pretrained(trained(text, tmp_path / "run", moe, lr=1e-2, trains=trains).model)
    set_seed(0)  # as the run did
    first, last = FathomForCausalLM(after.config).state_dict(), after.state_dict()
    torch.manual_seed(0)
    for name, tensor in last.items():
        router = ".mlp.gate." in name or "shared_expert_gate" in name
        moves = router or (trains == "feed_forward" and ".mlp." in name)
        assert torch.equal(tensor, first[name]) != moves, name


def test_a_network_without_a_router_has_no_warm_up(text, tmp_path):
    with pytest.raises(ValueError, match=r"training\.trains='router': feed_forward='dense' has no router"):
        trained(text, tmp_path / "run", {"name": "dense"}, trains="router")


def test_experts_that_stay_dead_are_a_warning_once(tmp_path):
    metrics = Metrics(tmp_path, 1, lambda ran: 1.0, DepthMethod(None, None), MixtureOfExperts)

    def line(*load: float) -> None:
        metrics.of_layers = {"expert_load": [torch.tensor([load])]}
        assert metrics._by_layer()["dead_experts"] == [sum(share == 0 for share in load)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(DEAD_FOR - 1):
            line(0.5, 0.0, 0.5)
        line(0.25, 0.25, 0.5)
        for _ in range(DEAD_FOR - 1):
            line(0.5, 0.0, 0.5)
    with pytest.warns(UserWarning, match=r"1 experts ran no token since the last 10 lines.*raise the mixture's"):
        line(0.5, 0.0, 0.5)

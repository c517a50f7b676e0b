"""A mixture in a run: what its router says, layer by layer, in metrics.jsonl."""

import pytest
import torch

from fathom.data import DataConfig, prepare
from fathom.train import Recipe, Training, train_run
from fathom.train.recipe import MethodConfig

MOE = {"name": "moe", "experts": 4, "active": 2, "slices": 2, "width": 8, "shared": 16, "z": 0.01}


def test_routers_leave_a_line_by_layer(tmp_path):
    (tmp_path / "text.txt").write_text("the sun over the hill and the sea under the wind.\n" * 80)
    data = DataConfig(
        train=str(tmp_path / "text.txt"), validation=None, tokenizer={"bpe": 260}, block_size=16, num_proc=1
    )
    model = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "feed_forward": MOE}
    recipe = Recipe("tiny", Training(tokens=4 * 2 * 16, sequences=2, log_every=2), model=model, data=data)
    seed = train_run(
        recipe,
        MethodConfig("moe", {"feed_forward": MOE}),
        seed=0,
        folder=tmp_path / "run",
        data=prepare(data, tmp_path),
    )
    lines = [line for line in seed.history if "loss" in line]
    assert len(lines) == 2
    for line in lines:
        assert torch.tensor(line["expert_load"]).shape == (2, 4)
        assert torch.tensor(line["expert_load"]).sum(-1).tolist() == pytest.approx([1.0, 1.0])
        for name in ("load_max_over_mean", "load_entropy", "dead_experts", "router_entropy", "router_z"):
            assert len(line[name]) == 2, name
        assert all(0.5 <= value <= 1 for value in line["group_agreement"])
        assert line["penalty"] == pytest.approx(line["balance_loss"] + line["z_loss"])
        assert "domain_information" not in line

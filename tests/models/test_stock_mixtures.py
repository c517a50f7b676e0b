"""Mixtures as stock checkpoints: equal logits in transformers' own classes, in a process that has no fathom."""

import subprocess
import sys

import pytest
import torch
from stock import GROUPED, random_stock
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2Config, Qwen2MoeConfig, Qwen3MoeConfig

from fathom import FathomForCausalLM
from tiny import assert_close, tiny_model, tokens

EXPERTS = {"name": "moe", "experts": 4, "active": 2, "width": 16}
WRITTEN = {  # Fathom's model -> the class that holds it
    "constant-gate": ({"feed_forward": {**EXPERTS, "shared_gate": 0.75, "routed_scaling": 3.0}}, "qwen2_moe"),
    "learned-gate-biases": (
        {
            "feed_forward": {**EXPERTS, "shared": 24, "shared_gate": "sigmoid", "norm_topk_prob": False},
            "attention_bias": True, "attention_output_bias": False,
        },
        "qwen2_moe",
    ),
    "one-path": ({"feed_forward": {**EXPERTS, "score": "topk_softmax", "norm_topk_prob": False}}, "qwen2_moe"),
    "no-shared": ({"feed_forward": {**EXPERTS, "shared": 0, "routed_scaling": "k"}}, "mixtral"),
    "qk-norm": ({"family": "qwen3", "feed_forward": {**EXPERTS, "shared": 0, "norm_topk_prob": False}}, "qwen3_moe"),
}  # fmt: skip
FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM
assert "fathom" not in sys.modules
folder, names = sys.argv[1], sys.argv[2:]
ids = torch.load(folder + "/ids.pt")
found = {}
for name in names:
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}").eval()
    with torch.no_grad():
        logits = model(ids).logits
        grown = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    found[name] = (model.config.model_type, logits, grown)
assert "fathom" not in sys.modules
torch.save(found, folder + "/found.pt")
"""


def test_written_mixtures_give_equal_logits_without_fathom(tmp_path):
    ids = tokens(2, 7)
    torch.save(ids, tmp_path / "ids.pt")
    models = {name: tiny_model(**fields) for name, (fields, _) in WRITTEN.items()}
    for name, model in models.items():
        model.save_stock_pretrained(tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path), *models], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, (kind, logits, grown) in torch.load(tmp_path / "found.pt").items():
        assert kind == WRITTEN[name][1]
        with torch.no_grad():
            assert_close(logits, models[name](ids).logits, 1e-5)
            own = models[name].generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        assert torch.equal(grown, own), name
        again = FathomForCausalLM.from_pretrained(tmp_path / name)
        with torch.no_grad():
            assert_close(again(ids).logits, logits, 1e-5)


MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4}
READ = {
    "qwen2": Qwen2Config(**GROUPED),
    "qwen2_moe": Qwen2MoeConfig(**GROUPED, **MIXTURE, shared_expert_intermediate_size=24, router_aux_loss_coef=0.25),
    "mixtral": MixtralConfig(**GROUPED, num_experts_per_tok=2, num_local_experts=4, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(**GROUPED, **MIXTURE, head_dim=16, norm_topk_prob=True),
}


@pytest.mark.parametrize("family", READ)
def test_stock_mixtures_load_and_go_back(family, tmp_path):
    stock = random_stock(READ[family])
    stock.save_pretrained(tmp_path / "stock")
    model, ids = FathomForCausalLM.from_pretrained(tmp_path / "stock").eval(), tokens(2, 7)
    with torch.no_grad():
        assert_close(model(ids).logits, stock(ids).logits, 1e-5)
    if family == "qwen2_moe":  # transformers' loss is k for a uniform router
        assert model.config.feed_forward["balance"] == 0.5
    model.save_stock_pretrained(tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(back) is type(stock)
    assert {name: t.shape for name, t in back.state_dict().items()} == {
        name: t.shape for name, t in stock.state_dict().items()
    }
    for name, tensor in stock.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    left = ("_name_or_path", "architectures", "dtype", "rope_parameters")  # the last has one default more
    written, read = ({k: v for k, v in m.config.to_dict().items() if k not in left} for m in (back, stock))
    assert written == read


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"family": "qwen3", "feed_forward": EXPERTS}, "option shared=None: Qwen3-MoE has no shared expert"),
        ({"feed_forward": {**EXPERTS, "score": "sigmoid"}}, "option score='sigmoid': no stock class"),
        ({"feed_forward": {**EXPERTS, "shared": 0, "norm_topk_prob": False}}, "norm_topk_prob=False: Mixtral's gates"),
        ({"feed_forward": {**EXPERTS, "slices": 2, "selection": "group"}}, "selection='group': stock classes choose"),
        ({"family": "gpt_neox", "feed_forward": EXPERTS}, "gated_mlp=False: no stock mixture"),
        ({"feed_forward": EXPERTS, "mlp_bias": True}, "mlp_bias=True is no stock qwen2_moe model"),
        ({"feed_forward": EXPERTS, "depth": {"name": "loop"}}, "only a vanilla model"),
    ],
)  # fmt: skip
def test_what_no_stock_class_holds_is_refused_by_name(fields, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        tiny_model(**fields).save_stock_pretrained(tmp_path)


def test_a_tied_router_is_written(tmp_path):
    model = tiny_model(feed_forward={**EXPERTS, "slices": 2, "selection": "group"})
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight[::2].repeat_interleave(2, 0))
    model.save_stock_pretrained(tmp_path)
    ids = tokens(2, 7)
    with torch.no_grad():
        assert_close(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, model(ids).logits, 1e-5)


def test_stock_fields_that_are_not_implemented_are_refused(tmp_path):
    config = Qwen2MoeConfig(**GROUPED, **MIXTURE, mlp_only_layers=[0])
    random_stock(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mlp_only_layers=\\[0\\] is not implemented"):
        FathomForCausalLM.from_pretrained(tmp_path)

"""Growing a dense checkpoint: cuts are exact, and the table of what starts as the dense model."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.activations import ACT2FN

from fathom import FathomForCausalLM
from fathom.growth import methods
from fathom.growth.base import DENSE
from fathom.growth.grow import grow
from fathom.growth.surgery import Network, clustered, permutation, reinitialised, scaled, split
from fathom.models.configuration import FathomConfig
from tiny import SIZES, assert_close, perturb, tiny_model, tokens
from tiny_checkpoint import run_cli, tiny_tokenizer

METHODS = methods()


def network(dtype=torch.float64, width: int = 24, seed: int = 0) -> Network:
    draw = torch.Generator().manual_seed(seed)
    shapes = ((width, 16), (width, 16), (16, width))
    return Network(*(torch.randn(*shape, generator=draw, dtype=dtype) for shape in shapes))


def run(n: Network, x: torch.Tensor) -> torch.Tensor:
    return (ACT2FN["silu"](x @ n.gate.T) * (x @ n.up.T)) @ n.down.T


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("permuted", [False, True])
def test_slices_sum_to_the_network(permuted, dtype, tolerance):
    n, x = network(dtype), torch.randn(9, 16, dtype=dtype)
    order = permutation(n, torch.Generator().manual_seed(1)) if permuted else None
    parts = split(n, 4, order)
    assert [part.width for part in parts] == [6] * 4
    assert_close(sum(run(part, x) for part in parts), run(n, x), tolerance)
    with pytest.raises(ValueError, match="slices=5: does not divide the width 24"):
        split(n, 5)


def test_neurons_that_fire_together_make_a_slice():
    """Planted: neurons in six shuffled groups of four, two of which fire on a token, but for a neuron now and then."""
    draw = torch.Generator().manual_seed(0)
    group = torch.randperm(24, generator=draw) % 6
    tokens_of = torch.rand(200, 6, generator=draw).argsort(-1)[:, :2]
    fired = (tokens_of[:, :, None] == group).any(1) & (torch.rand(200, 24, generator=draw) > 0.2)
    order = clustered(fired, 6, draw)
    assert order.sort()[0].tolist() == list(range(24))
    assert all(len(set(group[part].tolist())) == 1 for part in order.chunk(6))
    with pytest.raises(ValueError, match="slices=5: does not divide the width 24"):
        clustered(fired, 5, draw)


def test_scaling_down_is_exact_and_the_cube_root_is_not():
    n, x = network(), torch.randn(9, 16, dtype=torch.float64)
    assert_close(run(scaled(n, 8.0, "down"), x), 8 * run(n, x), 1e-12)
    assert (run(scaled(n, 8.0, "cuberoot"), x) - 8 * run(n, x)).abs().max() > 1e-2 * run(n, x).abs().max()


def test_one_set_of_neurons_is_drawn_anew_in_all_matrices():
    n = network(width=40)
    again = reinitialised(n, 0.25, torch.Generator().manual_seed(0))
    changed = [(a != b).any(dim).nonzero().flatten().tolist() for a, b, dim in zip(n, again, (1, 1, 0), strict=True)]
    assert len(changed[0]) == 10 and changed[0] == changed[1] == changed[2]
    assert reinitialised(n, 0.0, torch.Generator()) is n


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A stock Llama checkpoint, and two branches of it that trained feed-forward networks alone."""
    folders = [tmp_path_factory.mktemp(name) for name in ("base", "one", "two")]
    for number, folder in enumerate(folders):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "num_key_value_heads": 2}))
        perturb(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".mlp." in name:
                    parameter.add_(0.05 * number * torch.randn(parameter.shape))
        model.save_pretrained(folder)
    return folders


@pytest.fixture(scope="module")
def wide(base, tmp_path_factory):
    """The base in float64, which surgery does not round."""
    folder = tmp_path_factory.mktemp("wide")
    AutoModelForCausalLM.from_pretrained(base[0]).double().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
@torch.no_grad()
def logits(wide):
    """The base's, by dtype."""
    dtypes, ids = (torch.float64, torch.float32), tokens(2, 9)
    return {dtype: FathomForCausalLM.from_pretrained(wide, dtype=dtype).eval()(ids).logits for dtype in dtypes}


# method, options -> whether the grown model is the dense one before it trains (the card's table)
STARTS = [
    ("continued", {}, True),
    ("sparse_upcycling", {"experts": 3, "active": 2}, True),
    ("sparse_upcycling", {"experts": 3, "active": 2, "norm_topk_prob": False}, False),
    ("drop_upcycling", {"experts": 3, "reinit_ratio": 0.0}, True),
    ("drop_upcycling", {"experts": 3}, False),
    ("virtual_groups", {"copies": 3, "slices": 7, "active": 14}, True),
    ("virtual_groups", {"copies": 3, "slices": 7, "scale_mode": "cuberoot"}, False),
    ("innovator", {"disciplines": 2, "slices": 7}, False),
    ("innovator", {"disciplines": 2, "slices": 7, "routed_scaling": 0.0}, True),
    ("innovator", {"disciplines": 2, "slices": 7, "shared_gate": 0.75, "routed_scaling": "match"}, True),
    (
        "innovator",
        {
            "disciplines": 3, "slices": 7, "active": 14, "split": "permuted", "shared_gate": 0.0,
            "routed_scaling": "match",
        },
        True,
    ),
    ("llama_moe", {"experts": 7, "active": 7, "router_std": 0.0}, True),
    ("llama_moe", {"experts": 7, "active": 4}, False),
    ("moe_scratch", {"disciplines": 2, "slices": 7}, False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "dense"), STARTS, ids=str)
def test_what_starts_as_the_dense_model(name, options, dense, wide, logits, tmp_path):
    made = grow(wide, METHODS[name](**options), tmp_path / "grown")
    assert (made["start"] == DENSE) == dense
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        if dtype == torch.float32 and not dense:
            continue
        after = FathomForCausalLM.from_pretrained(tmp_path / "grown", dtype=dtype).eval()
        assert made["parameters"] == sum(p.numel() for p in after.parameters())
        with torch.no_grad():
            found = after(tokens(2, 9)).logits
        if dense:
            assert_close(found, logits[dtype], tolerance)
        else:
            assert (found - logits[dtype]).abs().max() > 1e-2


def test_without_the_routed_path_no_expert_learns(base, tmp_path):
    """ρ = 0, a = 1."""
    grow(base[0], METHODS["innovator"](2, 7, routed_scaling=0.0), tmp_path / "grown")
    model, ids = FathomForCausalLM.from_pretrained(tmp_path / "grown").train(), tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    for layer in model.model.layers:
        assert not layer.mlp.experts.gate_up_proj.grad.any() and layer.mlp.shared_expert.up_proj.weight.grad.any()


def test_branches_become_groups_and_rows_of_a_group_are_equal(base, tmp_path):
    grow(base[0], METHODS["innovator"](2, 7), tmp_path / "grown", branches=base[1:])
    mlp = FathomForCausalLM.from_pretrained(tmp_path / "grown").model.layers[1].mlp
    x = torch.randn(5, 32)
    for d, folder in enumerate(base[1:]):
        whole = FathomForCausalLM.from_pretrained(folder).model.layers[1].mlp
        slices = [
            Network(*mlp.experts.gate_up_proj[e].chunk(2), mlp.experts.down_proj[e]) for e in range(7 * d, 7 * d + 7)
        ]
        assert_close(sum(run(part, x) for part in slices), whole(x), 1e-5)
    rows = mlp.gate.weight.view(2, 7, 32)
    assert torch.equal(rows, rows[:, :1].expand_as(rows)) and (rows[0, 0] != rows[1, 0]).all()


def test_a_prompted_router_points_where_a_text_does(base, tmp_path):
    """Rows: mean inputs of the network of transformers' own class, of unit length. Clusters sum to the whole."""
    words = {"sky": "star moon orbit comet planet. ", "sea": "wave fish salt reef tide. "}
    folder = tmp_path / "base"
    stock = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "vocab_size": 300}))
    perturb(stock)
    stock.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    for name, text in words.items():
        (tmp_path / f"{name}.txt").write_text(text * 99)
    texts = [str(tmp_path / f"{name}.txt") for name in words]
    method = METHODS["innovator"](2, 7, router="prompt", split="clustered")
    made = grow(folder, method, tmp_path / "grown", texts=texts)
    assert made["texts"] == texts
    mlp = FathomForCausalLM.from_pretrained(tmp_path / "grown").model.layers[1].mlp
    assert mlp.options.selection == "group"

    inputs = []
    whole = stock.eval().model.layers[1].mlp
    whole.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    for text in words.values():
        ids = tokenizer(text * 99, return_tensors="pt")["input_ids"][0, :2048]
        with torch.no_grad():
            stock(ids[: len(ids) // 256 * 256].view(-1, 256))
    rows = torch.nn.functional.normalize(torch.stack([x.mean((0, 1)) for x in inputs]), dim=-1)
    assert_close(mlp.gate.weight.view(2, 7, -1), rows[:, None].expand(-1, 7, -1), 1e-4)
    x = torch.randn(5, 32)
    slices = [Network(*mlp.experts.gate_up_proj[e].chunk(2), mlp.experts.down_proj[e]) for e in range(7, 14)]
    assert_close(sum(run(part, x) for part in slices), whole(x), 1e-5)
    assert not torch.equal(slices[0].up, whole.up_proj.weight[: slices[0].width])

    for options, given, said in (
        ({"router": "prompt"}, texts[:1], "reads texts, 2, one for each discipline in order; there are 1"),
        ({"split": "clustered"}, [], "reads texts, at least one; there are 0"),
        ({}, texts, "reads no texts"),
    ):
        with pytest.raises(ValueError, match=said):
            grow(folder, METHODS["innovator"](2, 7, **options), tmp_path / "other", texts=given)
    (tmp_path / "short.txt").write_text("star")
    with pytest.raises(ValueError, match=r"short\.txt has \d tokens; a sample needs at least 256"):
        grow(
            folder,
            METHODS["innovator"](2, 7, split="clustered"),
            tmp_path / "other",
            texts=[str(tmp_path / "short.txt")],
        )
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("how", ["linear", "slerp", "ties", "dare"])
def test_merges_of_branches_are_dense_models_between_them(how, base, tmp_path):
    kept = {"density": 1.0} if how in ("ties", "dare") else {}
    grow(base[0], METHODS["merge"](how, **kept), tmp_path / "grown", branches=base[1:])
    states = [FathomForCausalLM.from_pretrained(f).state_dict() for f in (*base, tmp_path / "grown")]
    name = "model.layers.0.mlp.up_proj.weight"
    start, one, two, merged = (state[name].double() for state in states)
    if how == "linear" or how == "dare":  # density 1: nothing is dropped, and ½ + ½ of the changes are their mean
        assert_close(merged, (one + two) / 2, 1e-6)
    elif how == "ties":
        tasks = torch.stack([(one - start) / 2, (two - start) / 2])
        agree = tasks.sign() == tasks.sum(0).sign()
        assert_close(merged, start + (tasks * agree).sum(0) / agree.sum(0), 1e-5)
    else:
        cosine = (one * two).sum() / one.norm() / two.norm()
        angle = cosine.arccos()
        assert_close(merged, (one + two) * (angle / 2).sin() / angle.sin(), 1e-5)
    assert torch.equal(states[0]["model.norm.weight"], states[3]["model.norm.weight"])


def test_btx_averages_what_is_no_expert(base, tmp_path):
    moved = tmp_path / "moved"
    model = AutoModelForCausalLM.from_pretrained(base[1])
    with torch.no_grad():
        model.model.norm.weight.add_(0.5)
    model.save_pretrained(moved)
    grow(base[0], METHODS["btx"](active=2), tmp_path / "grown", branches=[moved, base[2]])
    grown, first = (FathomForCausalLM.from_pretrained(folder) for folder in (tmp_path / "grown", base[0]))
    assert grown.config.feed_forward["experts"] == 3
    assert_close(grown.model.norm.weight - first.model.norm.weight, torch.full((32,), 0.5 / 3), 1e-5)
    assert torch.equal(grown.model.layers[0].mlp.experts.down_proj[0], first.model.layers[0].mlp.down_proj.weight)
    with pytest.raises(ValueError, match=r"model\.norm\.weight differs from the base's.*training\.trains"):
        grow(base[0], METHODS["innovator"](1, 7), tmp_path / "other", branches=[moved])
    assert not (tmp_path / "other").exists()


def test_grown_models_go_to_stock_classes(base, tmp_path):
    grow(base[0], METHODS["innovator"](2, 7), tmp_path / "grown")
    model, ids = FathomForCausalLM.from_pretrained(tmp_path / "grown").eval(), tokens(2, 9)
    with torch.no_grad():
        model.save_stock_pretrained(tmp_path / "stock")
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()
        assert stock.config.model_type == "qwen2_moe"
        assert_close(stock(ids).logits, model(ids).logits, 1e-5)


def test_the_seed_decides_what_is_drawn(base, tmp_path):
    def rows(seed: int, name: str) -> torch.Tensor:
        grow(base[0], METHODS["sparse_upcycling"](3), tmp_path / name, seed=seed)
        return FathomForCausalLM.from_pretrained(tmp_path / name).model.layers[1].mlp.gate.weight

    assert torch.equal(rows(1, "a"), rows(1, "b")) and not torch.equal(rows(1, "c"), rows(2, "d"))


def test_the_command_says_what_it_made(base, tmp_path, monkeypatch, capsys):
    def command(*arguments):
        return run_cli(monkeypatch, capsys, "grow", base[0], *arguments)

    options = ("--set", "disciplines=2", "--set", "slices=7")
    code, out, _ = command("--method", "innovator", "-o", tmp_path / "x", *options, "--set", "routed_scaling=0.5")
    assert code == 0 and "Before training it is not the dense model: a slice of every copy" in out
    assert FathomConfig.from_pretrained(tmp_path / "x").feed_forward["routed_scaling"] == 0.5
    assert json.loads((tmp_path / "x" / "growth.json").read_text())["options"]["slices"] == 7
    for arguments, said in (
        (("--method", "inovator"), "no such method (did you mean 'innovator'?)"),
        (("--method", "innovator", "--set", "slice=7"), "give name=value (did you mean 'slices'?)"),
        (("--method", "innovator", *options, "--set", "active=3"), "active=3: must be a multiple of slices=7"),
        (("--method", "innovator", "--set", "slices=9"), "intermediate_size=56 is not divisible by slices=9"),
        (("--method", "btx"), "method 'btx' needs branches"),
        (("--method", "merge", "--set", "density=0.2"), "density=0.2: how='linear' does not read it"),
        (("--method", "continued", "--jobs", "2"), "--jobs and --minutes are of a recipe"),
        (("--method", "continued", "--branch", base[1]), "method 'continued' takes no branches"),
        (("--method", "innovator", *options, "--branch", base[1]), "disciplines=2: but there are 1 branches"),
    ):
        code, _, err = command("-o", tmp_path / "y", *arguments)
        assert code == 2 and said in err, err
    code, _, err = command("--method", "continued", "-o", tmp_path / "x")
    assert code == 2 and "exists and is not empty" in err


def test_other_checkpoints_are_refused(base, tmp_path):
    tiny_model("gpt2", init="hf").save_stock_pretrained(tmp_path / "gpt2")
    tiny_model("gpt_neox").save_pretrained(tmp_path / "neox")
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "short")
    grow(base[0], METHODS["sparse_upcycling"](3), tmp_path / "grown")
    for folder, said in (
        ("gpt2", "a 'gpt2' model; growth reads"), ("neox", "gated_mlp=False"), ("grown", "growth needs dense ones"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            grow(tmp_path / folder, METHODS["continued"](), tmp_path / "out")
    with pytest.raises(ValueError, match="num_hidden_layers=1, the base has 2"):
        grow(base[0], METHODS["btx"](), tmp_path / "out", branches=[tmp_path / "short"])

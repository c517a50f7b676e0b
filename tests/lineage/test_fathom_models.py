"""Checkpoints of Fathom's own methods: read, compared with the plain decoder of the same weights, extras reported."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fathom import FathomConfig, FathomForCausalLM
from fathom.lineage.commitment import merkle_root
from fathom.lineage.errors import CheckpointError
from fathom.lineage.huref import fingerprint
from fathom.lineage.pairs import compare
from fathom.lineage.reader import open_checkpoint
from fathom.lineage.weights import Weights
from fathom.models.checkpoints.stock import save_stock
from fathom.models.registry import REGISTRIES

CASES = [
    pytest.param({kind: {"name": name, **options}}, id=f"{name}-{i}")
    for kind, table in REGISTRIES.items()
    for name, method in table.items()
    for i, options in enumerate(method.variants)
]


def build(folder, seed=0, **sections):
    torch.manual_seed(seed)
    config = FathomConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=32, **({"num_key_value_heads": 2} | sections),
    )  # fmt: skip
    model = FathomForCausalLM(config)
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({f"Ġ{i}": i for i in range(300)}))
    return model


@pytest.mark.parametrize("section", CASES)
def test_every_method_is_read(section, tmp_path):
    """A method on a vanilla decoder's weights scores 1 against it; its own parameters are named, counted, committed."""
    plain = build(tmp_path / "plain")
    model = build(tmp_path / "method", seed=1, **section)
    if section.get("positions", {}).get("name") == "rope_pp":
        with pytest.raises(CheckpointError, match="positions='rope_pp': each projected head writes twice"):
            open_checkpoint(tmp_path / "method")
        return
    own = set(model.state_dict()) - set(plain.state_dict()) - {"model.embed_positions.weight"}  # GPT-2 has such too
    own = {name for name in own if ".mlp." not in name}  # experts have the roles that they have in stock mixtures
    model.load_state_dict(plain.state_dict(), strict=False)
    model.save_pretrained(tmp_path / "method")
    a, b = open_checkpoint(tmp_path / "method"), open_checkpoint(tmp_path / "plain")
    result = compare(a, b, "awm", "lap")
    if (
        "positions" in section
    ):  # without RoPE queries and keys admit more maps: the same numbers, another canonical form
        assert result.score > 0.9
    else:
        assert result.score == pytest.approx(1, abs=1e-4)
    assert set(a.extra) == own and b.extra == []
    fingerprint(a)
    if not own:
        assert result.not_compared == {}
        return
    found = result.not_compared["a"]
    size = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    assert found["tensors"] == len(own)
    assert found["share"] == pytest.approx(sum(size[n] for n in own) / sum(size.values()))
    assert any("not compared" in reason for reason in result.reasons)
    with pytest.raises(CheckpointError, match="have no role"):
        Weights.load(a)
    root, file = merkle_root(a, bytes(16)), tmp_path / "method" / "model.safetensors"
    tensors = load_file(file)
    tensors[min(own)] = tensors[min(own)] + 1
    save_file(tensors, file)
    assert merkle_root(open_checkpoint(tmp_path / "method"), bytes(16)) != root


@pytest.mark.parametrize("backbone", ["llama", "qwen3", "gpt_neox", "gpt2"])
def test_backbones_equal_their_stock_checkpoints(backbone, tmp_path):
    """The same weights in Fathom's naming and in that of transformers' own class: one model."""
    model = build(
        tmp_path / "fathom", backbone=backbone, num_key_value_heads=2 if backbone in {"llama", "qwen3"} else 4
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "fathom")
    save_stock(model, tmp_path / "stock")
    a, b = (open_checkpoint(tmp_path / name) for name in ("fathom", "stock"))
    assert a.extra == b.extra == []
    assert (a.family.norm, a.geometry.rotary_dim) == (b.family.norm, b.geometry.rotary_dim)
    b.vocabulary = a.vocabulary
    result = compare(a, b, "all", "lap", parts=True)
    assert result.score == pytest.approx(1, abs=1e-5)
    assert result.details["huref"]["score"] == pytest.approx(100, abs=1e-3)
    assert all(value == pytest.approx(1, abs=1e-4) for layer in result.layers for value in layer["parts"].values())

"""What the sections of the config promise a method, tried with methods made for it here."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

import fathom
from fathom import FathomConfig, FathomForCausalLM
from fathom.cost import forward_flops_per_token, parameter_counts
from fathom.feed_forward.dense import Dense
from fathom.models.registry import REGISTRIES, SECTIONS
from fathom.positions.base import Positions
from fathom.positions.rotary import Rotary
from tiny import assert_close, tiny_model, tokens


class Watched(Dense):
    """A dense network that says how large its output is, and is punished for it."""

    losses = ("size",)

    @dataclasses.dataclass(frozen=True)
    class Options:
        weight: float = 0.5

    def forward(self, x):
        out = super().forward(x)
        return out, {"size": self.options.weight * out.square().mean(), "largest": out.detach().abs().amax((1, 2))}


class Doubled(Rotary):
    """Every projected query head twice for attention, the second one negated."""

    @classmethod
    def heads(cls, options):
        return 2

    @staticmethod
    def expand(options, tables, query, key):
        return torch.stack((query, -query), dim=2).flatten(1, 2), key

    @classmethod
    def read_stock(cls, state, config, options):
        """The new heads write nothing at first."""
        state = dict(state)
        for name in [name for name in state if name.endswith("o_proj.weight")]:
            weight = state[name].unflatten(1, (config.num_attention_heads, 1, config.head_dim))
            state[name] = torch.cat((weight, torch.zeros_like(weight)), dim=2).flatten(1)
        return state


@pytest.fixture
def methods(monkeypatch):
    for section, name, cls in (("feed_forward", "watched", Watched), ("positions", "doubled", Doubled)):
        monkeypatch.setattr(cls, "name", name, raising=False)
        monkeypatch.setattr(cls, "registry", section, raising=False)
        monkeypatch.setitem(REGISTRIES[section], name, cls)


WATCHED = {"name": "watched", "weight": 0.5}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("depth", ["vanilla", "loop", "pause", "adaponderlm"])
def test_what_layers_say_leaves_the_forward_by_name(methods, depth):
    model = tiny_model(depth={"name": depth}, feed_forward=WATCHED).train()
    heard: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, inputs, output: heard.append(output[0]))
    ids = tokens(2, 7)
    torch.manual_seed(0)
    out = model(ids, labels=ids, output_auxiliary=True)
    assert out.auxiliary["largest"].shape == (len(heard), len(heard[0]))
    expected = torch.stack([output.abs().amax((1, 2)) for output in heard])
    torch.testing.assert_close(out.auxiliary["largest"], expected)
    size = sum(0.5 * output.square().mean() for output in heard)
    assert_close(out.losses["size"], size, 1e-6)
    torch.manual_seed(0)
    bare = tiny_model(depth={"name": depth}).train()
    bare.load_state_dict(model.state_dict())
    torch.manual_seed(0)
    assert_close(out.loss, bare(ids, labels=ids).loss + size, 1e-6)
    assert not {"losses", "trace", "auxiliary"} & set(model(ids))


@pytest.mark.parametrize("way", ["checkpointed", "compiled"])
def test_losses_of_layers_pass_through(methods, way):
    ids = tokens(2, 7)
    plain, other = (tiny_model(feed_forward=WATCHED).train() for _ in range(2))
    plain(ids, labels=ids).loss.backward()
    if way == "checkpointed":
        other.gradient_checkpointing_enable()
    else:
        for layer in other.model.layers:
            layer.forward = torch.compile(layer.forward, backend="aot_eager")
    out = other(ids, labels=ids, output_auxiliary=True)
    out.loss.backward()
    assert out.auxiliary["size"].shape == (2,)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(other)[name], gradient, rtol=1e-5, atol=1e-7)


def test_losses_of_layers_refuse_reentrant_checkpointing(methods):
    with pytest.raises(ValueError, match="use_reentrant"):
        tiny_model(feed_forward=WATCHED).gradient_checkpointing_enable({"use_reentrant": True})


def test_losses_of_accumulated_batches_are_those_of_one(methods):
    """Every batch's loss counts by its share of the targets."""
    ids, model = tokens(4, 7), tiny_model(feed_forward=WATCHED).train()
    whole = model(ids, labels=ids, output_auxiliary=True)
    items = torch.tensor(ids[:, 1:].numel())
    parts = [model(part, labels=part, num_items_in_batch=items) for part in ids.split(2)]
    assert_close(parts[0].loss + parts[1].loss, whole.loss, 1e-6)


def test_attention_sees_the_heads_that_positions_make(methods):
    model = tiny_model(positions={"name": "doubled"})
    attention = model.model.layers[0].self_attn
    assert attention.num_key_value_groups == 4 and attention.o_proj.in_features == 2 * attention.q_proj.out_features
    assert sum(p.numel() for p in model.parameters()) == parameter_counts(model.config).total
    model.set_attn_implementation("eager")  # whose products the counter sees
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens(1, 8))
    assert counter.get_total_flops() == 8 * forward_flops_per_token(model.config, 8, causal=False).matmul
    ids = tokens(2, 9)
    with torch.no_grad():
        cache = model(ids[:, :5]).past_key_values
        assert cache.layers[0].keys.shape[1] == 2
        assert_close(model(ids[:, 5:], past_key_values=cache).logits, model(ids).logits[:, 5:])


class Nowhere(Positions):
    """No positions: not a line more than a method must have."""


def test_a_positions_method_needs_no_more_than_its_class(monkeypatch):
    monkeypatch.setitem(REGISTRIES["positions"], "nowhere", Nowhere)
    model, ids = tiny_model(positions="nowhere", num_hidden_layers=1).eval(), torch.arange(3, 9)[None]
    turned = torch.cat((ids[:, [1, 0]], ids[:, 2:]), dim=1)
    with torch.no_grad():  # without positions the last token cannot tell the order of those before it
        assert_close(model(turned).logits[:, -1], model(ids).logits[:, -1], 1e-5)
        assert (tiny_model()(turned).logits - tiny_model()(ids).logits)[:, -1].abs().max() > 1e-3
    assert sum(p.numel() for p in model.parameters()) == parameter_counts(model.config).total


def test_a_method_says_what_stock_tensors_become(methods, tmp_path):
    tiny_model().save_stock_pretrained(tmp_path)
    stock = FathomForCausalLM.from_pretrained(tmp_path)
    doubled = FathomForCausalLM.from_pretrained(tmp_path, positions={"name": "doubled"})
    ids = tokens(1, 6)
    assert_close(doubled(ids).logits, stock(ids).logits, 1e-6)


def test_positions_of_old_configs_are_names():
    assert FathomConfig(positions="learned").positions == {"name": "learned"}
    assert FathomConfig(backbone="gpt2").positions == {"name": "learned"}
    assert FathomConfig().positions == {"name": "rotary"} and FathomConfig().feed_forward == {"name": "dense"}


def test_a_section_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"no section 'mixers' \(did you mean 'mixer'\?\).*feed_forward"):
        FathomConfig(mixers={"name": "resformer"})


@pytest.mark.parametrize(
    "fields", [{"later": {"name": "x"}}, {"depth": {"name": "later"}}, {"mixer": {"name": "resformer", "later": 1}}]
)
def test_a_config_of_a_newer_version_says_so(fields, tmp_path):
    FathomConfig().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields, "fathom_version": "99.1"}))
    with pytest.raises(ValueError, match=r"written by fathom 99\.1, newer than this .*pip install --upgrade fathom-lm"):
        FathomConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("T5Config", {"relations": {"name": "later"}}),
        ("BartConfig", {"encoder": {"name": "later"}}),
        ("TableT5Config", {"table": {"name": "later"}}),
        ("LatentConfig", {"codar": {"later": 1}}),
    ],
)
def test_so_does_every_other_kind(kind, fields, tmp_path):
    path = tmp_path / "config.json"
    given = {"length": 4} if kind == "LatentConfig" else {}
    getattr(fathom, f"Fathom{kind}")(**given).save_pretrained(tmp_path)
    assert json.loads(path.read_text())["fathom_version"] == fathom.__version__
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields, "fathom_version": "99.1"}))
    with pytest.raises(ValueError, match=r"written by fathom 99\.1, newer than this .*pip install --upgrade") as error:
        AutoConfig.from_pretrained(tmp_path)
    assert str(error.value).count("pip install") == 1


def test_every_section_has_its_plain_methods():
    for name, section in SECTIONS.items():
        assert set(section.plain) <= set(REGISTRIES[name])
    assert FathomConfig().is_vanilla and FathomConfig(backbone="gpt2").is_vanilla
    assert not FathomConfig(depth="loop").is_vanilla

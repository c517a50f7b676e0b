"""Methods given with a Fathom checkpoint: their options override stored ones, and what is reset is said."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fathom import FathomConfig, FathomForCausalLM
from tiny import assert_close, tiny_model, tokens

# of every section, options none of which is a default
STORED = {
    "depth": {"name": "pondering", "steps": 2, "top_k": 5, "accumulate": False, "temperature": 0.5},
    "mixer": {"name": "depth_attention", "stride": 1, "mix_target": "kv", "score_dtype": "float32"},
    "residual": {"name": "mhc", "streams": 3, "iterations": 4, "dynamic": False},
}
CHANGED = {"depth": ("steps", 1), "mixer": ("mix_rule", "uniform"), "residual": ("iterations", 6)}
LOADERS = [
    AutoConfig.from_pretrained,
    FathomConfig.from_pretrained,
    lambda folder, **fields: FathomForCausalLM.from_pretrained(folder, **fields).config,
    lambda folder, **fields: AutoModelForCausalLM.from_pretrained(folder, **fields).config,
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    for section, method in STORED.items():
        tiny_model(**{section: method}).save_pretrained(folder / section)
    return folder


@pytest.mark.parametrize("section", STORED)
@pytest.mark.parametrize("loader", LOADERS, ids=["AutoConfig", "FathomConfig", "Fathom", "Auto"])
def test_options_given_override_stored_ones_and_leave_the_others(folders, section, loader):
    option, value = CHANGED[section]
    stored = AutoConfig.from_pretrained(folders / section)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*resets")
        for given in (STORED[section]["name"], {"name": STORED[section]["name"]}):
            assert getattr(loader(folders / section, **{section: given}), section) == getattr(stored, section)
        given = {"name": STORED[section]["name"], option: value}
        assert getattr(loader(folders / section, **{section: given}), section) == {
            **getattr(stored, section), option: value,
        }  # fmt: skip


def test_a_method_named_again_is_the_same_function(folders):
    ids = tokens(2, 7)
    with torch.no_grad():
        for section, method in STORED.items():
            stored = FathomForCausalLM.from_pretrained(folders / section)
            again = FathomForCausalLM.from_pretrained(folders / section, **{section: method["name"]})
            assert torch.equal(again(ids).logits, stored(ids).logits)


@pytest.mark.parametrize(
    ("section", "given", "message"),
    [
        ("depth", "loop", "depth='loop' resets these options of the checkpoint's 'pondering': steps=2, top_k=5, "),
        ("depth", {"name": "adaponderlm", "steps": 2, "top_k": 5, "accumulate": False}, ": temperature=0.5$"),
        ("mixer", "none", "mixer='none' resets .*'depth_attention': stride=1, mix_target='kv', score_dtype='float32'$"),
        ("residual", {"name": "attnres"}, "residual='attnres' resets .*'mhc': streams=3, iterations=4, dynamic=False$"),
    ],
    ids=["loop", "adaponderlm", "none", "attnres"],
)
def test_another_method_says_what_it_resets(folders, section, given, message):
    with pytest.warns(UserWarning, match=message):
        config = FathomConfig.from_pretrained(folders / section, **{section: given})
    assert getattr(config, section) == getattr(FathomConfig(**{section: given}), section)


# ---------------------------------------------------------------- PonderLM, continued as AdaPonderLM

OPEN = {"name": "adaponderlm", "steps": 2, "threshold": 0.0, "gate_bias": 40.0}  # σ(40) is 1 in fp32


@pytest.mark.parametrize("mixer", ["none", {"name": "resformer"}], ids=str)
def test_open_gates_are_the_checkpoint_s_function(mixer, tmp_path):
    model, ids = tiny_model(depth={"name": "pondering", "steps": 2}, mixer=mixer), tokens(2, 8)
    model.save_pretrained(tmp_path)
    continued = FathomForCausalLM.from_pretrained(tmp_path, depth=OPEN)
    with torch.no_grad():
        assert_close(continued(ids).logits, model(ids).logits)


@pytest.mark.parametrize("loop_sources", ["same_layer+stride", "same_layer", "unrolled_stride"])
def test_a_mixer_across_passes_is_not_continued_within_one(loop_sources, tmp_path):
    mixer = {"name": "depth_attention", "loop_sources": loop_sources}
    tiny_model(depth={"name": "pondering", "steps": 2}, mixer=mixer).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"with depth='adaponderlm': .*mixer='depth_attention', whose layers read earlier"
    ):
        FathomForCausalLM.from_pretrained(tmp_path, depth=OPEN)
    FathomForCausalLM.from_pretrained(tmp_path, depth=OPEN, mixer="none")  # another function, asked for
    config = FathomConfig.from_pretrained(tmp_path)
    config.depth = FathomConfig(depth=OPEN).depth
    with pytest.raises(ValueError, match="whose layers read earlier passes"):  # as a recipe does
        FathomForCausalLM.from_pretrained(tmp_path, config=config)

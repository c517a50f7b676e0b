"""Models whose weights lie on a disk or wait in memory for their layer's call: equal to the same model in memory.

Every registered method runs: what reads a parameter outside of its module's forward would find it on the meta device.
"""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from stock import CONFIGS, random_stock

from fathom import FathomForCausalLM
from fathom.models.registry import REGISTRIES
from tiny import assert_close, tiny_model, tokens

VARIANTS = [
    pytest.param({registry: {"name": name, **options}}, id="-".join((name, *map(str, options.values()))))
    for registry, methods in REGISTRIES.items()
    for name, method in methods.items()
    for options in method.variants
]


def total_parameters(**fields):
    return sum(parameter.numel() for parameter in tiny_model(**fields).parameters())


every_variant = pytest.mark.parametrize("fields", VARIANTS)
with_parameters = [param for param in VARIANTS if total_parameters(**param.values[0]) > total_parameters()]
IDS = tokens(2, 8)
MEMORY = {"cpu": 20_000}  # bytes; the tiny models have 60,000 and more, and the rest goes to the disk


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    random_stock(CONFIGS["llama"]()).save_pretrained(folder)
    return folder


def logits_of(model):
    assert any(parameter.is_meta for parameter in model.parameters())
    with torch.no_grad():
        logits = model(IDS).logits
    assert any(parameter.is_meta for parameter in model.parameters())
    return logits


@every_variant
def test_offloaded_weights_give_the_logits_of_weights_in_memory(fields, tmp_path):
    model = tiny_model(**fields)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(IDS).logits
    assert_close(logits_of(cpu_offload(model, torch.device("cpu"))), expected)
    where = {"device_map": "auto", "max_memory": MEMORY, "offload_folder": tmp_path / "offload"}
    assert_close(logits_of(FathomForCausalLM.from_pretrained(tmp_path, **where)), expected)


@pytest.mark.parametrize("fields", with_parameters)
def test_a_method_put_on_an_offloaded_stock_checkpoint_is_the_one_in_memory(fields, stock, tmp_path):
    if "feed_forward" in fields:
        with pytest.raises(ValueError, match="weights would be random"):
            FathomForCausalLM.from_pretrained(stock, **fields)
        return
    torch.manual_seed(0)
    with torch.no_grad():
        expected = FathomForCausalLM.from_pretrained(stock, **fields)(IDS).logits
    torch.manual_seed(0)
    where = {"device_map": "auto", "max_memory": MEMORY, "offload_folder": tmp_path}
    assert_close(logits_of(FathomForCausalLM.from_pretrained(stock, **where, **fields)), expected)


@pytest.mark.parametrize("name", ["ponderlm2", "adaponderlm"])
def test_a_method_put_on_an_offloaded_fathom_checkpoint_is_the_one_in_memory(name, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    depth = {"ponderlm2": {"learned_scale": True, "sweeps": 2}, "adaponderlm": {"steps": 1}}[name]
    depth = {"name": name, **depth}
    torch.manual_seed(0)
    model = FathomForCausalLM.from_pretrained(tmp_path, depth=depth)
    with torch.no_grad():
        expected = model(IDS).logits
    torch.manual_seed(0)
    where = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offload"}
    placed = FathomForCausalLM.from_pretrained(tmp_path, depth=depth, **where)
    assert_close(logits_of(placed), expected)
    assert placed.config.name_or_path == model.config.name_or_path


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_families_tied_heads_padding_and_generation(family, dtype, tmp_path):
    depth = {"name": "pondering", "steps": 1}
    model = tiny_model(family, depth=depth, tie_word_embeddings=True, embed_scale=1.0).to(dtype)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        expected, written = model(IDS, attention_mask=mask).logits, model.generate(IDS, **options)
        offloaded = disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
        assert_close(offloaded(IDS, attention_mask=mask).logits, expected)
        assert torch.equal(offloaded.generate(IDS, **options), written)

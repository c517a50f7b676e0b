"""Weights that are offloaded (accelerate: on the CPU, on disk, by a device map) fetch themselves: equal to memory."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from cache_cases import SMALL, build, get_model, make
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from fathom.caches import FourierAttention, TreeKV, cache_shape, compress, load_codebooks, search_channels
from fathom.caches.record import fingerprint
from fathom.evaluate.cache_quality import grid
from fathom.evaluate.long_context import DEPTHS, FILLER

MAP = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk", "lm_head": "disk"}
MAP |= {f"model.{name}": "cpu" for name in ("embed_tokens", "norm", "rotary_emb")}


@pytest.fixture(scope="module")
def offloaded(tmp_path_factory):
    """The tiny Llama in each of the ways."""
    model, folder = get_model("llama"), tmp_path_factory.mktemp("offloaded")
    model.save_pretrained(folder)
    by_map = AutoModelForCausalLM.from_pretrained(folder, device_map=MAP, offload_folder=folder / "map").eval()
    whole = ["LlamaAttention", "LlamaRotaryEmbedding"]  # fetched with all that is in them
    return {
        "cpu": cpu_offload(copy.deepcopy(model), "cpu"),
        "buffers": cpu_offload(copy.deepcopy(model), "cpu", offload_buffers=True, preload_module_classes=whole),
        "disk": disk_offload(copy.deepcopy(model), folder / "disk", "cpu"),
        "map": by_map,
    }


@pytest.mark.parametrize("place", ["cpu", "buffers", "disk", "map"])
def test_every_method_equals_the_model_in_memory(method_name, place, offloaded, ids, llama):
    method, mask = make(method_name, SMALL), torch.ones_like(ids)
    mask[0, :5] = 0
    tokens, logits = [], []
    for model in (llama, offloaded[place]):
        with compress(model, method), torch.no_grad():
            tokens.append(model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False))
            logits.append(model(ids, attention_mask=mask).logits)
    assert torch.equal(*tokens) and torch.equal(*logits)


@pytest.mark.parametrize("place", ["cpu", "disk", "map"])
def test_calibration_files_are_of_the_weights_wherever_they_are(place, offloaded, ids, llama, tmp_path):
    model = offloaded[place]
    assert fingerprint(model) == fingerprint(llama)
    other = build("llama")
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight.mul_(2)
    assert fingerprint(cpu_offload(other, "cpu")) not in (fingerprint(llama), fingerprint(build("llama")))
    sets, expected = (search_channels(m, [ids[:1]], frequencies=4, n_local=8) for m in (model, llama))
    assert (sets.key, sets.value, sets.model_fingerprint) == (expected.key, expected.value, fingerprint(llama))
    sets.save(tmp_path / "sets.json")
    with compress(model, FourierAttention(channels=tmp_path / "sets.json")):
        assert cache_shape(model) == cache_shape(llama)
    assert {table.device.type for table in load_codebooks(make("vqkv", SMALL).codebooks, model).keys} == {"cpu"}


def test_recall_reads_its_texts_where_the_model_computes(offloaded, folder):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    found = [grid(m, tokenizer, FILLER, [60], DEPTHS[:2], lambda _: TreeKV(budget=30), 16) for m in offloaded.values()]
    assert found == [grid(get_model("llama"), tokenizer, FILLER, [60], DEPTHS[:2], lambda _: TreeKV(budget=30), 16)] * 4


def test_weights_that_nobody_can_fetch_are_refused():
    with torch.device("meta"):
        model = LlamaForCausalLM(get_model("llama").config)
    for method in (TreeKV(), make("vqkv", SMALL)):
        with pytest.raises(ValueError, match="on the meta device: load the weights first"), compress(model, method):
            pass

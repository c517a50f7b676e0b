"""Which files of a folder are the model: those that transformers loads, and no others."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fathom.lineage.errors import CheckpointError
from fathom.lineage.reader import open_checkpoint

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def state(folders):
    return {n: t.float() for n, t in load_file(folders("llama") / "model.safetensors").items()}


@pytest.fixture
def folder(folders, tmp_path):
    """A folder with config.json and no weights."""
    made = tmp_path / "model"
    made.mkdir()
    shutil.copyfile(folders("llama") / "config.json", made / "config.json")
    return made


def shards(folder, state, kind="safetensors"):
    """Two shards and their index, all weights multiplied by `times` before."""
    names, weight_map = sorted(state), {}
    base = "model" if kind == "safetensors" else "pytorch_model"
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"{base}-0000{i}-of-00002.{kind}"
        tensors = {n: state[n] for n in part}
        save_file(tensors, folder / file, metadata={"format": "pt"}) if kind == "safetensors" else torch.save(
            tensors, folder / file
        )
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / f"{base}.{kind}.index.json").write_text(json.dumps(index))


def whole(folder, state, file="model.safetensors"):
    if file.endswith(".bin"):
        torch.save(state, folder / file)
    else:
        save_file(state, folder / file, metadata={"format": "pt"})


def times(state, factor):
    return {n: t * factor for n, t in state.items()}


STRAYS = {
    "stale index": lambda f, s: (whole(f, s), shards(f, times(s, 2))),
    "older copy": lambda f, s: (whole(f, s), whole(f, times(s, 2), "model_old.safetensors")),
    "averaged weights": lambda f, s: (whole(f, s), whole(f, times(s, 2), "model_ema.safetensors")),
    "consolidated": lambda f, s: (whole(f, s), whole(f, times(s, 2), "consolidated.safetensors")),
    "variant": lambda f, s: (whole(f, s), whole(f, times(s, 2), "model.fp16.safetensors")),
    "bin beside safetensors": lambda f, s: (whole(f, s), whole(f, times(s, 2), "pytorch_model.bin")),
    "bin shards beside safetensors": lambda f, s: (whole(f, s), shards(f, times(s, 2), "bin")),
    "older bin": lambda f, s: (
        whole(f, s, "pytorch_model.bin"),
        whole(f, times(s, 2), "pytorch_model_old.bin"),
    ),
    "stray safetensors beside bin": lambda f, s: (
        whole(f, s, "pytorch_model.bin"),
        whole(f, times(s, 2), "consolidated.safetensors"),
    ),
    "bin shards beside bin": lambda f, s: (whole(f, s, "pytorch_model.bin"), shards(f, times(s, 2), "bin")),
    "bin beside shards": lambda f, s: (shards(f, s), whole(f, times(s, 2), "pytorch_model.bin")),
    "old shard beside shards": lambda f, s: (shards(f, s), whole(f, times(s, 2), "model-00003-of-00003.safetensors")),
}


@pytest.mark.parametrize("stray", STRAYS)
def test_files_are_those_of_transformers(folder, state, stray):
    from transformers import AutoModelForCausalLM

    STRAYS[stray](folder, state)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    model = open_checkpoint(folder)
    for layer in range(model.geometry.layers):
        for role, name in (("q", "self_attn.q_proj"), ("down", "mlp.down_proj")):
            assert torch.equal(model.read(layer, role), loaded[f"model.layers.{layer}.{name}.weight"])
    assert torch.equal(model.embedding(), loaded["model.embed_tokens.weight"])
    assert set(model.files) <= set(folder.iterdir()) and not set(model.files) & set(model.files_beside)
    assert model.files_beside, "what lies beside is named too"


def test_a_file_that_the_configuration_names_is_read(folder, state):
    from transformers import AutoModelForCausalLM

    whole(folder, times(state, 2))
    whole(folder, state, "other.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert torch.equal(open_checkpoint(folder).read(0, "q"), loaded[Q])
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "../other.safetensors"}))
    with pytest.raises(CheckpointError, match="outside"):
        open_checkpoint(folder)


@pytest.mark.parametrize("file", ["model_ema.safetensors", "consolidated.safetensors", "pytorch_model_old.bin"])
def test_other_names_are_refused_and_can_be_named(folder, state, file):
    whole(folder, state, file)
    with pytest.raises(CheckpointError, match=rf"no model\.safetensors.*{file}.*name the file"):
        open_checkpoint(folder)
    named = open_checkpoint(folder / file)
    assert torch.equal(named.read(0, "q"), state[Q]) and named.files == [folder / file]


def test_shards_without_an_index_and_overlapping_shards_are_refused(folder, state):
    shards(folder, state)
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    index.unlink()
    with pytest.raises(CheckpointError, match="index"):
        open_checkpoint(folder)
    index.write_text(text)
    first = folder / "model-00001-of-00002.safetensors"
    save_file(
        load_file(first) | {n: t * 2 for n, t in load_file(folder / "model-00002-of-00002.safetensors").items()}, first
    )
    with pytest.raises(CheckpointError, match="both in"):
        open_checkpoint(folder)


@pytest.mark.parametrize("outside", ["../stray.safetensors", "/tmp/stray.safetensors", "a/../../stray.safetensors"])
def test_an_index_cannot_name_files_elsewhere(folder, state, outside):
    whole(folder.parent, state, "stray.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, outside)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json: .*outside"):
        open_checkpoint(folder)


def test_an_adapter_beside_the_weights_belongs_to_the_model(folder, state):
    import peft
    from transformers import AutoModelForCausalLM

    whole(folder, state)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    adapted.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layer = loaded.model.layers[0].self_attn.q_proj
    want = layer.base_layer.weight + layer.get_delta_weight("default")
    model = open_checkpoint(folder)
    torch.testing.assert_close(model.read(0, "q"), want.detach(), rtol=1e-5, atol=1e-6)
    assert not torch.equal(model.read(0, "q"), state[Q])
    assert {f.name for f in model.files} == {"model.safetensors", "adapter_model.safetensors"}


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_that_differs_is_kept_though_the_configuration_ties_it(folders, folder, equal):
    from transformers import AutoModelForCausalLM

    state = {n: t.float() for n, t in load_file(folders("llama_tied") / "model.safetensors").items()}
    shutil.copyfile(folders("llama_tied") / "config.json", folder / "config.json")
    embedding = state["model.embed_tokens.weight"]
    torch.save(state | {"lm_head.weight": embedding if equal else embedding.flip(0)}, folder / "pytorch_model.bin")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = open_checkpoint(folder)
    assert model.tied == equal
    assert torch.equal(model.head(), loaded.lm_head.weight)

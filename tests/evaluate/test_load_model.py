"""Checkpoints that cannot be loaded are refused by name."""

import json

import pytest
from safetensors.torch import load_file, save_file

from fathom.evaluate import load_checkpoint
from tiny_checkpoint import save_fathom, save_stock, tiny_tokenizer


@pytest.fixture(params=[save_fathom, save_stock], ids=["fathom", "stock"])
def folder(request, tmp_path):
    return request.param(tmp_path / "model")


def refusal(checkpoint, kind=ValueError, **options) -> str:
    with pytest.raises(kind) as refused:
        load_checkpoint(str(checkpoint), **{"device": "cpu", **options})
    return str(refused.value)


def change_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_loads(folder):
    model, tokenizer = load_checkpoint(str(folder), "cpu")
    assert not model.training and len(tokenizer) == model.config.vocab_size


def test_missing_folder(tmp_path):
    assert "absent: no such folder" in refusal(tmp_path / "absent", FileNotFoundError)
    assert "no such folder here, and the hub gave no model of this name" in refusal("no/such", FileNotFoundError)


def test_a_mistyped_folder_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    """runs/modell, as good a hub name as any, where runs/model is."""
    (tmp_path / "runs" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fathom.evaluate.load_model.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("asked"))
    assert refusal("runs/modell", FileNotFoundError) == "runs/modell: no such folder; did you mean runs/model?"
    assert refusal("runs/other", FileNotFoundError) == "runs/other: no such folder"


def test_folder_without_config(tmp_path):
    words = f"{tmp_path}: no config.json in this folder, so it is no checkpoint"
    assert refusal(tmp_path, FileNotFoundError) == words
    for name in ("checkpoint-3", "model"):  # as of a training run
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert refusal(tmp_path, FileNotFoundError) == f"{words}; did you mean {tmp_path / 'model'}?"


def test_file_instead_of_folder(folder):
    assert "is a file; give the folder" in refusal(folder / "config.json")


def test_damaged_config(folder):
    (folder / "config.json").write_text("{")
    assert "config.json" in refusal(folder) and "JSON" in refusal(folder)


def test_truncated_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file}: truncated or corrupt safetensors file" in refusal(folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert f"{folder}: no weights could be read" in refusal(folder)


def test_a_missing_tensor_is_not_filled_with_random_numbers(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    gone = next(name for name in tensors if "norm.weight" in name or "ln_f.weight" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, file, metadata={"format": "pt"})
    assert f"weights are missing from the checkpoint: {gone}" in refusal(folder)


def test_tensors_of_another_shape_than_the_config_says(folder):
    change_config(folder, vocab_size=400)
    assert f"{folder}: its tensors have other shapes than its config.json says" in refusal(folder)


def test_a_wrong_value_in_the_config_is_no_matter_of_families(tmp_path):
    folder = save_fathom(tmp_path)
    change_config(folder, hidden_act="sillu")
    message = refusal(folder)
    assert message.startswith(f"{folder}: hidden_act='sillu'") and "families" not in message


def test_family_that_is_no_causal_language_model(folder):
    change_config(folder, model_type="t5", auto_map={})
    assert "family 't5' is not supported" in refusal(folder)
    assert "supported: fathom, llama, qwen3, gpt_neox, gpt2" in refusal(folder)


def test_family_that_transformers_does_not_know(folder):
    change_config(folder, model_type="nobody", auto_map={})
    assert "nobody" in refusal(folder) and "llama, qwen3, gpt_neox, gpt2" in refusal(folder)


def test_code_in_a_checkpoint_does_not_run_unasked(folder):
    change_config(folder, model_type="theirs", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.M"})
    (folder / "code.py").write_text("raise SystemExit('it ran')")
    assert "trust_remote_code" in refusal(folder)


def test_no_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert f"{folder}: no tokenizer could be loaded" in refusal(folder)


def test_tokenizer_with_more_ids_than_embeddings(folder):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["fathom"])
    tokenizer.save_pretrained(folder)
    assert "its tokenizer has 301 token ids, more than the model's vocab_size=300" in refusal(folder)


def test_a_device_that_is_not_there(folder):
    assert "device='cuda:99': not on this machine" in refusal(folder, device="cuda:99")
    assert "device='gpu': not on this machine" in refusal(folder, device="gpu")

"""Files made to mislead a reader or to keep it busy: each is refused in one line that names it."""

import json
import struct
import time

import pytest
import torch
from safetensors.torch import save_file

from fathom.lineage.errors import CheckpointError
from fathom.lineage.reader import open_checkpoint


def adapter(folder, base, **more):
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": base} | more
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file(
        {name.format("A"): torch.ones(2, 64), name.format("B"): torch.ones(64, 2)}, folder / "adapter_model.safetensors"
    )
    return folder


def test_an_adapter_reads_no_base_outside_its_folder(folders, tmp_path):
    for name in (str(folders("llama")), "../x", "/etc", ".", 5, ""):
        with pytest.raises(CheckpointError, match=r"outside its folder|without its base"):
            open_checkpoint(adapter(tmp_path / "a", name))
    assert open_checkpoint(adapter(tmp_path / "a", "../x"), base=folders("llama")).geometry.hidden == 64


def test_an_adapter_on_itself_ends(tmp_path):
    one = adapter(tmp_path / "one", "two")
    adapter(one / "two", "x/y")
    with pytest.raises(CheckpointError, match="an adapter itself"):
        open_checkpoint(one)
    with pytest.raises(CheckpointError, match="an adapter itself"):
        open_checkpoint(one, base=one)


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(.*)*q_proj", ".*.*.*.*x", "(?=a)b", r"(q)\1", "a" * 300, "[", "(a|a)*b"]
)
def test_a_pattern_cannot_keep_the_reader_busy(folders, tmp_path, key, pattern):
    began = time.perf_counter()
    with pytest.raises(CheckpointError, match=key):
        open_checkpoint(adapter(tmp_path / "a", "", **{key: {pattern: 4}}), base=folders("llama"))
    assert time.perf_counter() - began < 5


def test_patterns_of_peft_are_still_read(folders, tmp_path):
    base = open_checkpoint(folders("llama")).read(0, "q")
    for pattern in (
        "q_proj",
        r"model.layers.\d+.self_attn.q_proj",
        r".*\.(q_proj|k_proj)",
        "^model.layers.0.self_attn.q_proj",
    ):
        model = open_checkpoint(adapter(tmp_path / "a", "", alpha_pattern={pattern: 8}), base=folders("llama"))
        assert model.read(0, "q")[0, 0] - base[0, 0] == pytest.approx(8 / 2 * 2, rel=1e-4)
    for value in (0, -1, float("inf"), "4", True):
        with pytest.raises(CheckpointError, match="positive number"):
            open_checkpoint(adapter(tmp_path / "a", "", rank_pattern={"q_proj": value}), base=folders("llama"))


def gguf(body, tensors=0, fields=1):
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + body


def text(value):
    return struct.pack("<Q", len(value)) + value


NESTED = text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000


@pytest.mark.parametrize(
    "content",
    [
        b"GGU", b"GGUF", gguf(b""), gguf(b"", tensors=2**60), gguf(b"", fields=2**63), gguf(text(b"k") + b"\xff" * 4),
        gguf(struct.pack("<Q", 2**62)), gguf(text(b"k") + struct.pack("<IIQ", 9, 4, 2**61)),
        gguf(text(b"k") + struct.pack("<IIQ", 9, 8, 2**61)), gguf(NESTED),
        gguf(text(b"general.alignment") + struct.pack("<II", 4, 0)),
        gguf(text(b"general.alignment") + struct.pack("<I", 8) + text(b"x"), tensors=1),
        gguf(text(b"w") + struct.pack("<IQIQ", 1, 2**50, 0, 0), tensors=1, fields=0),
        gguf(text(b"w") + struct.pack("<IQIQ", 1, 4, 999, 0), tensors=1, fields=0),
    ],
)  # fmt: skip
def test_a_malformed_gguf_is_named(tmp_path, content):
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.gguf") as refused:
        open_checkpoint(file)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "adapter_config.json", "tokenizer.json"]
)
@pytest.mark.parametrize(
    "content", ["{", "[]", "3", "[" * 50_000, '{"weight_map": 5}', '{"weight_map": {"a": "../x"}}']
)
def test_a_malformed_json_is_named(folders, tmp_path, name, content):
    for file in folders("llama").iterdir():
        if file.suffix == ".json" or name != "model.safetensors.index.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{name}|{tmp_path.name}") as refused:
        open_checkpoint(tmp_path)
    assert "\n" not in str(refused.value)

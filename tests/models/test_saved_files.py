"""A checkpoint for a process that never imported fathom: the Auto classes find it, or say what to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from fathom import FathomConfig, FathomForCausalLM
from fathom.models.saved_files import CODE
from tiny import tiny_model, tokens
from tiny_checkpoint import save_fathom

DEPTH = {"name": "pondering", "steps": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_fathom(tmp_path_factory.mktemp("saved") / "model", depth=DEPTH)


def fresh_process(source: str, folder, tmp_path) -> str:
    """Standard output of a process that has not imported fathom and cannot be asked anything."""
    done = subprocess.run(
        [sys.executable, "-c", source, str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_auto_classes_and_lm_eval_with_trust_remote_code(folder, tmp_path):
    out = fresh_process(
        """
import json, os, sys
import torch
from transformers import AutoModelForCausalLM

folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
model.save_pretrained(folder + "-again")
from lm_eval.models.huggingface import HFLM

harness = HFLM(pretrained=folder, trust_remote_code=True, device="cpu", dtype="float32")
print(json.dumps({
    "logits": model(torch.tensor([[5, 6, 7, 8]])).logits.tolist(),
    "class": type(model).__module__ + "." + type(model).__name__,
    "lm_eval": type(harness.model) is type(model),
    "again": sorted(os.listdir(folder + "-again")),
}))
""",
        folder,
        tmp_path,
    )
    said = json.loads(out.splitlines()[-1])
    assert said["class"] == "fathom.models.causal_lm.FathomForCausalLM" and said["lm_eval"]
    ours = FathomForCausalLM.from_pretrained(folder).eval()(torch.tensor([[5, 6, 7, 8]])).logits
    torch.testing.assert_close(torch.tensor(said["logits"]), ours)
    # the shim is saved again, and no other code
    assert [name for name in said["again"] if name.endswith(".py")] == [CODE.name]


def test_nothing_is_run_unasked_and_without_fathom_the_message_says_what_to_install(folder, tmp_path):
    out = fresh_process(
        """
import sys
from transformers import AutoModelForCausalLM

try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except ValueError as error:
    print("\\nUNTRUSTED", str(error).replace("\\n", " "))
assert not [name for name in sys.modules if name.startswith("fathom") or "modeling_fathom" in name]
sys.modules["fathom"] = None  # as if it were not installed
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
except ImportError as error:
    print("MISSING", error)
""",
        folder,
        tmp_path,
    )
    untrusted, missing = (line for line in out.splitlines() if line.startswith(("UNTRUSTED", "MISSING")))
    assert "trust_remote_code=True" in untrusted
    assert missing == "MISSING this checkpoint needs Fathom, which is not installed: pip install fathom-lm"


def test_with_fathom_imported_the_file_is_never_run(tmp_path):
    model, ids = tiny_model(depth=DEPTH), tokens(1, 6)
    model.save_pretrained(tmp_path)
    (tmp_path / CODE.name).write_text("raise SystemExit('run')")
    for trust in (None, False, True):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust)
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_a_config_alone_has_the_file_too(tmp_path):
    FathomConfig().save_pretrained(tmp_path / "config")
    saved = json.loads((tmp_path / "config" / "config.json").read_text())
    assert saved["auto_map"] == {
        "AutoConfig": "modeling_fathom.FathomConfig",
        "AutoModelForCausalLM": "modeling_fathom.FathomForCausalLM",
    }
    assert (tmp_path / "config" / CODE.name).read_text() == CODE.read_text()


def test_a_stock_checkpoint_has_neither(tmp_path):
    tiny_model(init="hf").save_stock_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    assert not (tmp_path / CODE.name).exists()

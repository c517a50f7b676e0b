"""Checkpoints of this wing load through transformers alone, in a process that has not imported fathom."""

from __future__ import annotations

import subprocess
import sys

import torch
from table_cases import host

from fathom import FathomT5Config, FathomT5ForConditionalGeneration
from fathom.tables.text.generator import MODELS

CODE = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForSeq2SeqLM
for folder in map(Path, sys.argv[1:]):
    given, expected, section, options = torch.load(folder / "given.pt")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert "fathom" in sys.modules and getattr(model.config, section).items() >= options.items(), folder
    assert torch.equal(model(**given).logits, expected), folder
"""


def test_relations_and_an_adapter_load_without_an_import_of_fathom(tmp_path):
    ids = torch.arange(5, 12)[None]
    given = {"input_ids": ids, "labels": ids}
    relations = {"relation_ids": (torch.arange(49) % 48).view(1, 7, 7).to(torch.uint8)}
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 3}
    section = {"name": "rasat", "init": "small", "coreference": True}
    rasat = FathomT5ForConditionalGeneration(FathomT5Config(**sizes, decoder_start_token_id=0, relations=section))
    host("bart").save_pretrained(tmp_path / "stock")
    akg = MODELS["bart"].from_pretrained(tmp_path / "stock", table={"name": "akg", "reduction": 4})
    for model, inputs, name, options in (
        (rasat.eval(), given | relations, "relations", section),
        (akg.eval(), given, "table", {"name": "akg", "reduction": 4}),
    ):
        folder = tmp_path / name
        model.save_pretrained(folder)
        torch.save((inputs, model(**inputs).logits.detach(), name, options), folder / "given.pt")
    subprocess.run([sys.executable, "-c", CODE, tmp_path / "relations", tmp_path / "table"], check=True)

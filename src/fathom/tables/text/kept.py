"""Trained parts in folders beside a model's weights: planner, selector and retriever.

A folder has the part's config, tokenizer and weights. Of TSDAE only the encoder is kept, which chooses sentences; its
decoder is only needed in training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from fathom.tables.text.crf import CRFPlanner
from fathom.tables.text.plan import PointerPlanner, Seq2SeqPlanner
from fathom.tables.text.prototypes import PrototypeSelector
from fathom.tables.text.retrieval import TSDAE, CrossEncoder
from fathom.writing import write_json

PLANNER, SELECTOR, RETRIEVER = "planner", "selector", "retriever"  # the folders' names, and of what is in them
KINDS: dict[type[nn.Module], tuple[str, str]] = {
    PointerPlanner: (PLANNER, "pointer"),
    CRFPlanner: (PLANNER, "crf"),
    Seq2SeqPlanner: (PLANNER, "seq2seq"),
    PrototypeSelector: (SELECTOR, "cross_encoder"),
    TSDAE: (RETRIEVER, "tsdae"),
    CrossEncoder: (RETRIEVER, "cross_encoder"),
}
UNUSED = "decoder."  # of TSDAE


def keep(part: Any, folder: Path) -> None:
    """Write a trained part to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    role, kind = KINDS[type(part)]
    host = part.model if kind == "seq2seq" else part.encoder
    host.config.save_pretrained(folder)
    part.tokenizer.save_pretrained(folder)
    said: dict[str, Any] = {role: kind, "keys": getattr(part, "keys", [])}
    if role == SELECTOR:
        said |= {"dropped": sorted(part.dropped), "margin": part.margin}
    write_json(folder / f"{role}.json", said)
    weights = {name: value for name, value in part.state_dict().items() if not name.startswith(UNUSED)}
    save_file({name: value.contiguous().clone() for name, value in weights.items()}, folder / f"{role}.safetensors")


def load_kept(folder: Path) -> Any:
    """The part that `keep` wrote to this folder. Raises ValueError for weights that are not all of it."""
    role = next(role for role in (PLANNER, SELECTOR, RETRIEVER) if (folder / f"{role}.json").is_file())
    said = json.loads((folder / f"{role}.json").read_text(encoding="utf-8"))
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    kind = next(cls for cls, names in KINDS.items() if names == (role, said[role]))
    part: Any
    if kind is Seq2SeqPlanner:
        part = Seq2SeqPlanner(AutoModelForSeq2SeqLM.from_config(config), tokenizer)
    elif kind is PointerPlanner:
        part = PointerPlanner(tokenizer, config)
    elif kind is CRFPlanner:
        part = CRFPlanner(said["keys"], tokenizer, config)
    elif kind is PrototypeSelector:
        part = PrototypeSelector(config, tokenizer, said["dropped"], said["margin"])
    else:
        part = kind(config, tokenizer)
    report = part.load_state_dict(load_file(folder / f"{role}.safetensors"), strict=False)
    missing = [name for name in report.missing_keys if not name.startswith(UNUSED)]
    if missing or report.unexpected_keys:
        raise ValueError(f"{folder}: its weights are not those of a {said[role]} {role}; keep the part again")
    return part.eval()


def load_beside(folder: Path, role: str) -> Any:
    """The part with this role beside a model; None if there is none."""
    return load_kept(folder / role) if (folder / role / f"{role}.json").is_file() else None

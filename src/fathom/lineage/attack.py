"""Run an attack and prove, on logits, what it did to the model's function."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathom.lineage.transforms import EXACT
from fathom.lineage.weights import Weights


def stock_model(path: Path, dtype: torch.dtype) -> Any:
    """The transformers model of a local folder, eager kernels, without its progress bars."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    # eager experts: the grouped kernel has no float64
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    experts = any(getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    eager = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if experts else {})
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True, **eager).eval()
    finally:
        if shown:
            logging.enable_progress_bar()


def logits(weights: Weights, tokens: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Logits [batch, T, vocab] of the model as transformers computes them, from a checkpoint written and read back."""
    with tempfile.TemporaryDirectory(prefix="fathom-attack-") as folder:
        model = stock_model(weights.save(Path(folder) / "model", dtype), dtype)
        with torch.no_grad():
            return model(tokens).logits


def logit_error(original: Weights, changed: Weights, tokens: Tensor, dtype: torch.dtype = torch.float64) -> float:
    """max |a − b| / max |a| over the tokens, after undoing a renumbered vocabulary and a constant for each position.

    Softmax sees neither of the two, so they are no change of the function.
    """
    want, got_tokens = logits(original, tokens, dtype), tokens
    if changed.renumbering is not None:
        new_id = torch.tensor(changed.renumbering)
        got = logits(changed, new_id[got_tokens], dtype)[..., new_id]
    else:
        got = logits(changed, got_tokens, dtype)
    want, got = want - want.mean(-1, keepdim=True), got - got.mean(-1, keepdim=True)
    return ((want - got).abs().max() / want.abs().max().clamp_min(torch.finfo(dtype).tiny)).item()


def probe_tokens(weights: Weights, count: int = 24, seed: int = 0) -> Tensor:
    """Random token ids [1, count] of the model's vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, weights.tensors["embed"].shape[0], (1, count), generator=generator)


def apply_exact(weights: Weights, name: str, seed: int = 0) -> Weights:
    """The model after the exact transform `name` (a key of EXACT)."""
    if name not in EXACT:
        raise ValueError(f"transform: {name!r} is unknown; choose from {', '.join(EXACT)}")
    return EXACT[name].apply(weights, torch.Generator().manual_seed(seed))

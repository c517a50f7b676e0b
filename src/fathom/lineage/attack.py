"""Run an attack and prove, on logits, what it did to the model's function."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fathom.lineage.transforms import EXACT
from fathom.lineage.weights import Weights


@dataclass(frozen=True)
class Attack:
    """A changed model and how far its logits are from the original's: max |Δ| / max |logit| on the probe tokens."""

    name: str
    weights: Weights
    logit_error: float


def logits(weights: Weights, tokens: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Logits [batch, T, vocab] of the model as transformers computes them, from a checkpoint written and read back."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(prefix="fathom-attack-") as folder:
        path = weights.save(Path(folder) / "model", dtype)
        # eager experts: the grouped kernel has no float64
        eager = {"attn_implementation": "eager"} | (
            {"experts_implementation": "eager"} if weights.geometry.experts else {}
        )
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True, **eager)
        with torch.no_grad():
            return model.eval()(tokens).logits


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
    return ((want - got).abs().max() / want.abs().max()).item()


def probe_tokens(weights: Weights, count: int = 24, seed: int = 0) -> Tensor:
    """Random token ids [1, count] of the model's vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, weights.tensors["embed"].shape[0], (1, count), generator=generator)


def apply_exact(weights: Weights, name: str, seed: int = 0) -> Weights:
    """The model after the exact transform `name` (a key of EXACT)."""
    if name not in EXACT:
        raise ValueError(f"transform: {name!r} is unknown; choose from {', '.join(EXACT)}")
    return EXACT[name].apply(weights, torch.Generator().manual_seed(seed))

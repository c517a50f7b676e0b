"""Diffusion language models: text that is not written from left to right.

    model.generate(ids, attention_mask, generation_config=DiffusionGenerationConfig(policy="threshold", …))   ours
    fathom.diffusion.generate(model, ids, mask_token_id=…)      stock models whose config says is_causal=False

`base.py` has the seam, `sampling.py` the loop; the rest is one file a method.
"""

from typing import Any

from fathom.diffusion import block, masked, none
from fathom.diffusion.base import Block, BlockCache, Policy, View
from fathom.diffusion.dkv_cache import DKVCache
from fathom.diffusion.dllm_cache import DLLMCache
from fathom.diffusion.dual import Dual
from fathom.diffusion.dynamic import Dynamic
from fathom.diffusion.entropy import Entropy
from fathom.diffusion.entropy_bounded import EntropyBounded
from fathom.diffusion.fourier import Fourier
from fathom.diffusion.generation_config import DiffusionGenerationConfig
from fathom.diffusion.left_to_right import LeftToRight
from fathom.diffusion.longllada import LongLLaDA
from fathom.diffusion.low_confidence import LowConfidence
from fathom.diffusion.margin import Margin
from fathom.diffusion.prefix import Prefix
from fathom.diffusion.random_order import RandomOrder
from fathom.diffusion.sampling import DiffusionOutput, generate
from fathom.diffusion.sparse_dllm import SparseDLLM
from fathom.diffusion.threshold import Threshold

POLICIES: dict[str, Any] = {
    policy.name: policy
    for policy in (
        RandomOrder, LeftToRight, LowConfidence, Margin, Entropy, Threshold, Dynamic, EntropyBounded, Fourier,
    )
}  # fmt: skip
BLOCK_CACHES: dict[str, Any] = {cache.name: cache for cache in (Prefix, Dual, DKVCache, DLLMCache, SparseDLLM)}
METHODS: dict[str, Any] = {**POLICIES, **BLOCK_CACHES, LongLLaDA.name: LongLLaDA}

__all__ = [
    "BLOCK_CACHES", "METHODS", "POLICIES", "Block", "BlockCache", "DKVCache", "DLLMCache", "DiffusionGenerationConfig",
    "DiffusionOutput", "Dual", "Dynamic", "Entropy", "EntropyBounded", "Fourier", "LeftToRight", "LongLLaDA",
    "LowConfidence", "Margin", "Policy", "Prefix", "RandomOrder", "SparseDLLM", "Threshold", "View", "block",
    "generate", "masked", "none",
]  # fmt: skip

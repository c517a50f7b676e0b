"""Fathom: published language-model methods on today's PyTorch and Hugging Face stack, measured on the same footing.

Importing it registers `FathomConfig` and `FathomForCausalLM` with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModelForCausalLM

import fathom.depth  # fills the registries
import fathom.feed_forward
import fathom.positions  # noqa: F401
from fathom.models.causal_lm import FathomForCausalLM
from fathom.models.configuration import FathomConfig
from fathom.version import __version__

__all__ = ["FathomConfig", "FathomForCausalLM", "__version__"]

AutoConfig.register(FathomConfig.model_type, FathomConfig, exist_ok=True)
AutoModelForCausalLM.register(FathomConfig, FathomForCausalLM, exist_ok=True)

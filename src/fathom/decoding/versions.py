"""transformers' name for a model's cache: `past_key_values` before 5.24, `cache` from then on."""

import inspect

from transformers.masking_utils import create_causal_mask

CACHE_NAME = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"

"""Fathom: published language-model methods on today's PyTorch and Hugging Face stack, measured on the same footing."""

__version__ = "0.1.0"

"""The decoder, and the transformers classes around it."""

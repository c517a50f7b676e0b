"""The decoder and the Hugging Face face of it."""

"""Text to token ids to packed fixed-length blocks."""

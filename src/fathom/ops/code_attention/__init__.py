"""Attention over residual codes, without rebuilding a vector."""

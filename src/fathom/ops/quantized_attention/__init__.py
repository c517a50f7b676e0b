"""Attention over packed min/max codes."""

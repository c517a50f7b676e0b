"""Readers and writers of checkpoints: stock families, the authors' Depth-Attention layout, adapters."""

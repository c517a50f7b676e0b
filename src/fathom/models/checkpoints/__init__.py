"""Readers and writers of checkpoints: stock families, layouts of papers' authors, adapters."""

"""Residual vector quantisation."""

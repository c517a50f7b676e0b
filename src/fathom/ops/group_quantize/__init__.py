"""Asymmetric min/max quantisation in groups."""

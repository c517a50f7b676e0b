"""Attention in which every query sees one range of keys in each of a few segments."""

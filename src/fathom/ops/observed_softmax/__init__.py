"""Softmax of causal scores, and what every slot received."""

"""Folding the values of discarded slots into the next kept one."""

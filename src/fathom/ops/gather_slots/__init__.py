"""Slots of several banks and layers into one place."""

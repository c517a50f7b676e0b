"""The slots that stay, of keys, values and statistics together."""

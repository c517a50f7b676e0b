"""KV-cache methods, one file each. The code that supports them is one folder up."""

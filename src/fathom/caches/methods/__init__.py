"""KV-cache methods, one file each; what supports them lies one folder up."""

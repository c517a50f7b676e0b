"""The `caches` wing: how much memory does a token keep? KV-cache compression for stock transformers models."""

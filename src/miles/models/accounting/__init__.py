"""Accounting: parameters, FLOPs, KV-cache and activation bytes of a model; known model sizes (layer 1)."""

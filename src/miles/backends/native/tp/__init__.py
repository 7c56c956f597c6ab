"""Tensor parallelism of the engine: one leader runner and its worker processes (layer 3)."""

"""Tensor parallelism of models: sharding rules and the tensor-parallel decoder (layer 1)."""

"""Trainer checkpoints: sharded tensors, staging to host memory, writers (layer 2)."""

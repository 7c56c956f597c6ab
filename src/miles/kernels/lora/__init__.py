"""LoRA kernels: a batch of rows, each with an adapter of its own or none (layer 1)."""

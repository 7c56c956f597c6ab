"""Kernel runtime: Triton compatibility, KV cache storage, CUDA-graph inputs, checksum, self-test (layer 1)."""

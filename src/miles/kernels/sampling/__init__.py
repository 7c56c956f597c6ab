"""Sampling kernels: fused sampling, top-k and top-p thresholds (layer 1)."""

"""Fused elementwise and projection kernels: RMSNorm, QK-norm + RoPE, activation, log-probs, GEMV (layer 1)."""

"""Mixture-of-experts kernels: top-k router, grouped GEMM, fused MoE, MoE GEMV (layer 1)."""

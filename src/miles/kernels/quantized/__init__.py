"""Linear layers and experts with quantized weights: torch reference, FP8 GEMM and weight-only kernels."""

"""Linear-attention and state-space kernels: gated delta rule, Mamba-2 SSD, causal conv1d (layer 1)."""

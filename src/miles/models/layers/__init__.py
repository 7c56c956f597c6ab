"""Layers of a decoder: attention, MLA, MLP, MoE, norms, RoPE, Gated DeltaNet, Mamba (layer 1)."""

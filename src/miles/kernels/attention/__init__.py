"""Attention kernels: paged decode and prefill, varlen, MLA, tree, sinks; torch references and Triton (layer 1)."""

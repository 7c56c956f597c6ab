"""Optimizers: AdamW, Muon, master weights, quantized and offloaded state, learning-rate schedules (layer 2)."""

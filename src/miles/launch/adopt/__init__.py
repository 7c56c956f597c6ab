"""Adopting a checkpoint: which definition serves it, parity with transformers, and a recipe that fits (layer 4)."""

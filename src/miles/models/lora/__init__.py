"""LoRA: adapters, their configuration, target modules (layer 1)."""

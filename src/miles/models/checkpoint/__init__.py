"""Hugging Face checkpoints: read and write safetensors, parameter name mapping, PEFT (layer 1)."""

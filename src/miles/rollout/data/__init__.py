"""Prompt data: JSONL, Parquet and Hugging Face datasets, mixtures, curricula, procedural tasks (layer 2)."""

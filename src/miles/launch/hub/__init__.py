"""Models and data by name: the Hugging Face hub and object stores, for reading and for upload (layer 4)."""

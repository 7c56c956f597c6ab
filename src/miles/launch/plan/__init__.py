"""The run plan: batch sizes, memory, hardware, objective; computed without importing torch (layer 4)."""

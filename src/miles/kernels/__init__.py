"""Package kernels: operations with a torch reference and Triton kernels side by side, one operation per file.

Layer 1. Imports: torch. Never touches: models, configuration, files.
"""

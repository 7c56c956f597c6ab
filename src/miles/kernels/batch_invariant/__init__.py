"""Package kernels.batch_invariant: operations whose result for a row depends on that row alone, in engine and trainer.

Layer 1. Imports: torch, kernels. Never touches: models, configuration, files.
"""

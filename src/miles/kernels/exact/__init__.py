"""Room: kernels.exact -- operations whose results for a row depend on the row alone, in one form for both planes.

Floor 1. Imports: torch, kernels. Never touches: models, knobs, files.
"""

"""Room: kernels -- one operation a file, the plain torch reference and the fast path side by side.

Floor 1. Imports: torch. Never touches: models, knobs, files.
"""

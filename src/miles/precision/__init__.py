"""Room: precision -- number formats smaller than sixteen bits, and how values are had back from them.

Floor 1. Imports: core, torch. Never touches: models, files, planes. A format is a file: ``fp8`` (eight-bit floats with
a scale a block) and ``mxfp4`` (four-bit floats with a power of two for every 32).
"""

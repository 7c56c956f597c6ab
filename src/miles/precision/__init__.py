"""Number formats below 16 bits and their dequantization (layer 1).

Imports: core, torch. Never imports models, files or schedulers.
"""

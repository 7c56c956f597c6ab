"""Room: algo -- the mathematics. Rewards to advantages, log-probabilities to a loss.

Floor 1. Imports: core, config, numpy, torch (``credit``, ``config`` and ``ladder`` without torch).
Pure: no I/O, no ranks, no clock, no randomness. Never touches a model, an engine or a flag.
"""

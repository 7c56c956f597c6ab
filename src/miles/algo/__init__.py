"""Package algo: the RL mathematics; rewards to advantages, log-probabilities to a loss.

Layer 1. Imports: core, config, numpy, torch (``advantages``, ``config`` and ``correction_schedule`` without torch).
Pure functions: no I/O, no ranks, no clock, no randomness. It never touches a model, an engine or a flag.
"""

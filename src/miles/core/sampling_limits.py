"""Limits of sampling parameters: the numbers that an engine, which computes in float32, can tell from 0 or infinity."""

GREEDY_TEMPERATURE = 1e-6
"""A temperature below this is greedy decoding."""
MAX_TEMPERATURE = 1e6
MIN_TOP_P = 1e-6
MIN_REPETITION_PENALTY = 1e-6
MAX_LOGIT_BIAS = 1e6

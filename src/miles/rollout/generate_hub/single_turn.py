"""Upstream's generate function of one response."""

from miles.hooks.compat.generation import generate_single_turn as generate

__all__ = ["generate"]

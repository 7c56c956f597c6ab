"""Upstream's function loading, under its newer name."""

from miles.utils.misc import load_function

__all__ = ["load_function"]

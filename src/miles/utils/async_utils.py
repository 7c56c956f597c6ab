"""Upstream's event loop for plain functions."""

from miles.hooks.compat.generation import run

__all__ = ["run"]

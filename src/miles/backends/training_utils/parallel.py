"""Upstream's parallel layout of a loss."""

from miles.algo.hook_adapters import ParallelState

__all__ = ["ParallelState"]

"""Upstream's parallel layout of a loss."""

from miles.algo.hook_adapters import LossParallelState as ParallelState

__all__ = ["ParallelState"]

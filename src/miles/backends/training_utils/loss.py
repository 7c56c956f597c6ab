"""Upstream's log-probs and entropies of a loss."""

from miles.algo.hook_adapters import get_log_probs_and_entropy

__all__ = ["get_log_probs_and_entropy"]

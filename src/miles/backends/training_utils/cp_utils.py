"""Upstream's slices of samples over context-parallel ranks: a loss here has whole samples."""

from miles.algo.hook_adapters import all_gather_with_cp, slice_log_prob_with_cp

__all__ = ["all_gather_with_cp", "slice_log_prob_with_cp"]

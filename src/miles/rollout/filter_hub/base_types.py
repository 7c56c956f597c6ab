"""Upstream's result of a dynamic sampling filter."""

from miles.hooks.compat.types import DynamicFilterOutput, MetricGatherer

__all__ = ["DynamicFilterOutput", "MetricGatherer"]

"""Upstream's HTTP client: requests to the router are answered by the run's engine."""

from miles.hooks.compat.engine import get, post

__all__ = ["get", "post"]

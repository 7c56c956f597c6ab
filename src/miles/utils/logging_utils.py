"""Upstream's tracker, under its name in slime."""

from miles.hooks.compat.tracking import log

__all__ = ["log"]

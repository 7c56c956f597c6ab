"""Upstream's tracker: metrics that a log function logs itself join those of its step."""

from miles.hooks.compat.tracking import log

__all__ = ["log"]

"""Upstream's filters of groups."""

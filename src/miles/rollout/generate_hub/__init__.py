"""Upstream's generate functions."""

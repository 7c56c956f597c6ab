"""Upstream's parts of generate functions."""

"""Upstream's module names for functions that its losses import."""

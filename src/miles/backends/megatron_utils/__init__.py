"""Upstream's former module names for functions that its losses import."""

"""Runs with several policies: their configuration, plan and rules (layer 4)."""

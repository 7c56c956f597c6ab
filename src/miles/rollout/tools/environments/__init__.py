"""Connectors to third-party environments behind tools.environment.Environment, one library per file (layer 2).

Imports: core, rollout, stdlib. A connector imports its package when one of its environments is created.
"""

"""Builders: turn the configuration into engines, trainers, data, rewards and hooks (layer 4)."""

"""Offline data as rollouts: SFT demonstrations, preference pairs, replayed rollouts (layer 2)."""

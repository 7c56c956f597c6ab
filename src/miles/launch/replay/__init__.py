"""``miles replay``: repeat a recorded step and compare it with the log (layer 4)."""

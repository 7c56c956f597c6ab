"""``miles parity``: compare the log-probs and activations of two implementations (layer 4)."""

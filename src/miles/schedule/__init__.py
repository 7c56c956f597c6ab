"""Package schedule: the training loop, which decides when each plane moves.

Layer 2. Imports: core, config. It never imports rollout, train or backends (it sees them through protocols) or torch.
"""

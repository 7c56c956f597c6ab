"""Package sync: weight updates from a trainer to engines, as transactions.

Layer 1. Imports: core, config, kernels, cluster, torch. It never imports train, rollout or backends, which implement
``Receiver``.
"""

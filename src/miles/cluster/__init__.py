"""Package: cluster -- processes and devices: platforms, executors, child processes, SPMD ranks, workers, the router.

Layer 1. Imports: core, config, torch. Never: rollout, schedule, train, a backend, or another package's configuration.
"""

"""Upstream's module names for functions that its hooks import (layer 2): thin adapters over ours.

Nothing of ours imports this package. Its names, and those of ``rollout.rm_hub``, ``rollout.filter_hub``,
``rollout.generate_hub``, ``rollout.generate_utils``, ``backends.training_utils`` and ``backends.megatron_utils``, are
upstream's; new code uses the modules they lead to.
"""

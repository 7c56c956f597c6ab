"""Compatibility with upstream's ``(args, sample)`` hook signatures (layer 1).

    signature_adapter  detects upstream signatures, and makes slime's module names importable
    adapters           one adapter per protocol; ``rollout`` has those of whole rollouts and evaluations
    types              the samples, inputs and outputs of such functions; ``convert`` converts from and to our types
    engine             requests of such a function, answered by the run's own engine
    generation         upstream's generate, reward and rollout functions over that engine
    data_source        upstream's data sources over the run's prompts
    tracking           metrics that a log function sends to a tracker

Imports: core, stdlib, numpy; adapters that need torch are in ``algo.hook_adapters`` and ``sync.publish``. No text is
tokenized again: tokens that cannot be traced back to the engine are rejected.
"""

"""Compatibility with upstream's ``(args, sample)`` hook signatures (layer 1).

    signature_adapter  detects upstream signatures, and provides the modules they import
    adapters           one adapter per protocol
    types              the sample such a function reads and writes; ``convert`` converts it from and to our types
    engine             requests of such a function, answered by the run's own engine

Imports: core, stdlib, numpy. No text is tokenized again: tokens that cannot be traced back to the engine are rejected.
"""

"""Models: one decoder for engine and trainer, model families as specs, Hugging Face checkpoints (layer 1).

Imports: core, config, kernels, precision, torch. ``spec``, ``families``, ``accounting``, ``capabilities``, ``config``
and the name mapping in ``checkpoint`` do not import torch. Never imports engines, trainers or rollout code.
"""

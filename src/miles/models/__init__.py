"""Room: models -- one decoder for both planes, families as specs over it, Hugging Face checkpoints in and out.

Floor 1. Imports: core, config, kernels, precision, torch. ``spec``, ``names``, ``files``, ``reader``, ``sources``,
``footprint``, ``config`` and ``families`` need no torch. Never touches: engines, trainers, ranks, prompts.
"""

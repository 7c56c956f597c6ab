"""Megatron backend: the trainer's models run by Megatron-Core (layer 3).

Imports: train, models, kernels, cluster, core, torch, megatron-core. Never another backend, never rollout or schedule;
imported only when selected. ``model`` is the policy or its reference. Megatron's ``GPTModel``, parallel layers, token
dispatcher and pipeline schedules compute. Ours are what a packed batch needs (``packed_batch``, ``layer_spec``,
``mla``), the names of weights (``param_mapping``), where they are stored (``param_registry``), and the gradient
reduction (``model``). With Megatron's ``distributed_optimizer`` gradients are in its own ``buffers``; ``checkpoint``
reads and writes its format. ``patches`` fixes bugs of Megatron. With batch-invariant numerics the
layers are those of ``batch_invariant_layers`` and ``batch_invariant_moe``.
"""

"""FSDP backend: the trainer's models, run by the decoder in one process or sharded over ranks (layer 3).

Imports: train, models, kernels, cluster, core, torch. Never another backend, never rollout or schedule.
``local_model``, ``local_critic`` and ``reward_model`` run in one process.

Over several ranks: ``device_mesh`` has the process groups, ``autograd_collectives`` the differentiable collectives;
``tensor_parallel``, ``context_parallel`` and ``expert_parallel`` shard heads, tokens and experts, ``fully_shard`` gives
the rest to FSDP. ``packed_batch`` is a rank's part of a micro-batch, ``master_params`` are the tensors the optimizer
updates, ``param_shard`` maps full to local tensors; ``fsdp_model`` and ``head_models`` combine them.
"""

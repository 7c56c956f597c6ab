"""Room: train -- the plane that turns batches into weights.

Floor 2. Imports: core, config, algo, models, kernels, sync, cluster, observe, torch. Never: rollout, schedule.
From a batch to its gradient: ``worker`` (one batch) -> ``steps`` (one global batch) -> ``rows`` (tensors of
one micro-batch) -> the model behind ``roles.TrainModel`` -> ``logits`` -> ``algo`` -> ``optim``. Advantages that need
the whole batch are made by ``returns`` before that, of what a ``critic`` expects where there is one.
Never touches an engine, a prompt, a reward function or the clock of the loop.
"""

"""Package train: the training plane, which turns batches into weights.

Layer 2. Imports: core, config, algo, models, kernels, sync, cluster, observe, torch. Never: rollout, schedule.
From a batch to its gradient: ``policy_trainer`` (one batch) -> ``grad_accumulation`` (one global batch) ->
``batch_tensors`` (tensors of one micro-batch) -> the model behind ``model_protocols.TrainModel`` -> ``logprobs`` ->
``algo`` -> ``optim``. Advantages that need the whole batch are computed by ``advantages`` before that, with the values
of a ``critic`` if there is one.
It never touches an engine, a prompt, a reward function or the clock of the loop.

Calling the package is ``miles.train(model, data, reward, ...)``, the function of ``miles.api.train``.
"""

from miles.core.lazy_exports import make_callable

__callable__ = make_callable(__name__, "miles.api.train:train")

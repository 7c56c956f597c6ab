"""Room: backends/fsdp -- the embedded trainer's models: the one decoder behind the training plane's doors.

Floor 3. Imports: train, models, kernels, cluster, core, torch. Never another backend, never rollout or schedule.
``model`` is the policy or its reference held by one process, ``value`` the critic, ``reward`` a reward model.

Over several ranks: ``mesh`` is who talks to whom and ``collective`` what a gradient flows through between them;
``tensor``, ``context`` and ``expert`` cut heads, tokens and experts, ``wrap`` gives the rest to FSDP. ``packed`` is
what a rank reads, ``leaves`` what its optimizer writes to, ``holding`` how whole tensors come of it; ``sharded`` and
``sharded_value`` put these together.
"""

"""Room: backends/megatron -- the trainer's models as Megatron-Core has them, behind the training plane's doors.

Floor 3. Imports: train, models, kernels, cluster, core, torch, megatron-core. Never another backend, never rollout or
schedule; imported only when chosen. ``model`` is the policy or its reference. Megatron's own parts compute: its
``GPTModel``, its parallel layers, its token dispatcher, its pipeline schedules. Of ours are what a packed batch needs
(``packed``, ``modules``, ``latent``, ``experts``), the names of weights (``names``), where they live (``places``), and
the sums of gradients (``model``). Its distributed optimizer, when chosen, has these in its own ``buffers`` and is
``dealt`` out; ``checkpoint`` speaks its format.
``patches`` mends Megatron where it is broken.
"""

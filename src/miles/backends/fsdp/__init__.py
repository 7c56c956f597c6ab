"""Room: backends/fsdp -- the embedded trainer's models: the one decoder behind the training plane's doors.

Floor 3. Imports: train, models, kernels, core, torch. Never another backend, never rollout or schedule.
``model`` is the policy or its reference, ``value`` the critic. One process holds a whole model; sharding it over ranks
belongs in this room.
"""

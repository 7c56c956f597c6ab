"""Room: backends/fsdp -- the embedded trainer's model: the one decoder behind the training plane's door.

Floor 3. Imports: train, models, kernels, core, torch. Never another backend, never rollout or schedule.
One process holds the whole model; sharding it over ranks belongs in this room.
"""

"""Engine core: request scheduling, running batch, prefix cache and batch building (layer 3).

Holds no tensors of the model; a runner from ``backends.native.runner`` executes the batches built here.
"""

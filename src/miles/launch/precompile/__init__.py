"""Ahead-of-time compilation of a run's Triton kernels, in processes of its own while the run starts (layer 4).

``process`` starts it from a training command and imports nothing heavy; ``kernels`` runs the steps of engine and
trainer on a GPU that is not there, and ``compiler`` compiles what they launch. A run is the same without it: a kernel
that was not foreseen is compiled when it is launched.
"""

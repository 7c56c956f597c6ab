"""Package observe: what a run reports: event log, metrics, rollout dumps, terminal views, plots.

Layer 1. Imports: core, config; numpy, rich, pyarrow and (only on demand) matplotlib and tensorboard.
Everything here is an observer of ``core.events`` or a reader of a run directory. It never touches a plane,
a model or the clock of the loop, and never changes a number of the run.
"""

"""Room: observe -- what a run tells people: the event log, metrics, rollout dumps, the terminal, curves.

Floor 1. Imports core and config; numpy, rich, pyarrow and (only when asked for) matplotlib and tensorboard.
Everything here is an observer of ``core.events`` or a reader of a run directory. It never touches a plane,
a model or the clock of the loop, and nothing it does changes a number of the run.
"""

"""Rewards: built-in graders by name, reward servers, LLM judges, mixtures (layer 2).

Imports: core, stdlib. A grader that may not terminate, or that needs an optional package, runs in a worker process with
a time limit; servers are queried over HTTP. Never: torch, a clock of its own, a secret that was not passed in.
"""

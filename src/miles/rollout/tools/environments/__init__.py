"""Room: rollout.tools.environments -- other people's worlds behind tools.environment.Environment, one kind a file.

Floor 2. Imports: core, rollout, stdlib. A connector's package is imported when an environment of its kind is made.
"""

"""Room: rollout.reward -- ways to score an attempt: graders by name, and what makes a RewardFn of one.

Floor 2. Imports: core, stdlib. What may not end, or comes from an extra package, runs in a worker
process with a time limit; servers are asked over HTTP. Never: torch, a clock of its own, a secret
that was not handed in.
"""

"""Room: rollout.reward -- ways to score an attempt: pure graders of text, and what makes a RewardFn of one.

Floor 2. Imports: core, stdlib. Never: a model, a network, a clock.
"""

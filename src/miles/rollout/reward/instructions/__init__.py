"""Room: rollout.reward.instructions -- verifiable instructions: a table of small functions of a reply and settings.

Floor 2. Imports: rollout.reward.score, stdlib. Every function ends in time linear, or nearly so, in the reply.
"""

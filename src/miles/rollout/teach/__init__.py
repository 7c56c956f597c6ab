"""Room: rollout.teach -- teachers that are engines elsewhere: what they say of a trajectory is stamped on its spans.

Floor 2. Imports: core, rollout.reward's way of asking servers, numpy. What is learnt of it is the trainer's.
"""

"""On-policy distillation: teachers served over HTTP score trajectories; their log-probs go into the spans (layer 2).

Imports: core, rollout.reward's HTTP client, numpy. The loss on them is computed by train.
"""

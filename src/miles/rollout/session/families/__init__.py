"""Room: rollout/session/families -- what is particular to a family's conversations, a file each, and their table.

A family's own chat template writes every message; what stands here is what no template tells: which tokens frame a
turn, which of them the model samples itself, and how it marks its thoughts and its calls.
"""

"""Room: schedule -- when each plane moves. The only room that knows the order of things.

Floor 2. Imports: core, config. Never: rollout, train, backends (it sees them as doors), torch.
"""

"""Room: sync -- weights out of a trainer, into engines, as a transaction. One module a transport.

Floor 1. Imports: core, config, torch. Never: train, rollout, backends (they stand behind Receiver).
"""

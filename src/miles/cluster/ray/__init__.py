"""Room: cluster/ray -- the Ray runtime: what of a cluster a run asks for, whether it has it, and processes there.

Floor 1. Imports: core, config; ``ray`` in ``reserve`` and ``ranks`` alone, which are imported only when Ray is chosen.

``placement`` is arithmetic over nodes; ``reserve`` connects and holds what was placed; ``ranks`` are followers of a
team on other nodes.
"""

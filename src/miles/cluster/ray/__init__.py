"""Package: cluster/ray -- the Ray runtime: resource requests, placement groups, ranks and workers on nodes.

Layer 1. Imports: core, config; ``ray`` in ``placement_group``, ``spmd`` and ``workers`` only, which are imported only
if Ray is used.

``placement`` assigns nodes, without Ray; ``placement_group`` connects and holds the placement groups; ``spmd`` has
ranks and ``workers`` workers on other nodes.
"""

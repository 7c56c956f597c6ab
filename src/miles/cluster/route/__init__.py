"""Package: cluster.route -- one address for several engines that speak SGLang's HTTP API.

Imports: core, config, httptools. Never: torch, an engine's code, the environment, a clock but the one given.
A client's request (``inbound``) is looked up in a table (``router``) and is for one engine (``forward``), for
all of them (``broadcast``) or for the router itself (``manage``). Which engine is the ``policy``'s to say, out of
those the ``fleet`` has open; ``watch`` asks after their health; ``outbound`` keeps the connections to them.
"""

"""Package: cluster.router -- HTTP router: one address for several engines that speak SGLang's HTTP API.

Imports: core, config, httptools, prometheus_client. Never: torch, an engine's code, the environment, a clock but the
one given. A client's request (``http_server``) is looked up in a table (``router``) and is for one engine (``proxy``),
for all of them (``broadcast``) or for the router itself (``admin``). The ``policy`` chooses an engine out of the open
ones of the ``engine_pool``; ``health_check`` checks their health; ``http_client`` has the connections to them.
"""

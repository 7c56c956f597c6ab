"""Package: backends/remote -- engines behind HTTP: stock SGLang or ``miles serve``, started here or running elsewhere.

Layer 3. Imports: core, config, models, sync, cluster, aiohttp; torch for weight updates. Never: rollout, schedule,
train, another backend.

A request: the ``pool`` picks a server -> ``client`` posts it and reads the stream -> ``response`` validates each event
-> ``response_stitching`` keeps the tokens whatever happens to the server, and the pool has the rest sampled by it or by
another one. ``process`` starts servers, ``pool.health_monitor`` restarts them, ``weight_update`` sends all of them new
weights over one of the ``transports``.
"""

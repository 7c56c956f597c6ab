"""Room: backends/sglang -- engines behind HTTP: stock SGLang, or ``miles serve``, launched here or running elsewhere.

Floor 3. Imports: core, config, models, sync, aiohttp; torch where weights are sent. Never: a plane, another backend.

A request's life: ``fleet`` picks a server -> ``client`` posts it and reads the stream -> ``reply`` checks each piece ->
what came is kept whatever happens to the server, and ``fleet`` has the rest written by it or by another. ``launch``
starts processes, ``keeper`` looks after them, ``publication`` gives all of them new weights, over a ``carrier``.
"""

"""Training service (layer 3): several tenants train and sample LoRA adapters on one shared base, over the Tinker API.

``http_server`` is HTTP, ``service`` accepts requests, ``journal`` makes them durable, ``fair_queue`` decides whose is
next, ``training_loop`` computes them with ``trainer``, which runs packed passes over the rows of several adapters, and
``sampling`` has what is needed of an engine. It imports no other backend: ``launch.build.service`` connects it with the
native engine.
"""

"""Training service (layer 3): several tenants train and sample LoRA adapters on one shared base, over the Tinker API.

``server`` is HTTP, ``service`` accepts and orders requests, ``journal`` makes them durable, ``fair_queue`` decides whose
is next, ``trainer`` runs packed passes over the rows of several adapters, and ``sampling`` is what it needs of an
engine. It imports no other backend: ``launch.build.service`` connects it with the native engine.
"""

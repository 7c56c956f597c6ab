"""HTTP server of the native engine: SGLang's native API and OpenAI's (layer 3).

Imports: core, config, models, sync, cluster, rollout/serving, the engine. Never: schedule, train, another backend.

The path of a request: ``app`` checks the API key -> ``generation`` reads the body -> ``api/generate`` or ``api/chat``
parse it into ``ParsedRequest``s -> ``request_handler`` tokenizes each, compiles its ``grammar`` and submits a
``GenerateRequest`` to the engine -> an ``OutputState`` grows as tokens arrive -> ``api/generate`` or
``api/openai_response`` format it as JSON, complete or as server-sent events. ``admin`` and ``weights`` are the control
half: pause, abort, sleep, and weight updates. ``routes`` is the table of endpoints, from which OpenAPI is generated.
"""

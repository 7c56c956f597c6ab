"""Session server: agents' sessions over HTTP, as OpenAI's chat and responses and Anthropic's messages (layer 2).

Imports: core, rollout/serving, rollout/session, aiohttp and pydantic (the ``serve`` extra). Never: a backend; engines
are passed in as ``core.protocols.Engine``.

The path of a request: ``app`` checks the API key -> ``handlers`` reads the body -> ``chat``, ``responses`` or
``messages`` parse it into a ``TurnRequest`` -> ``turn`` finds the session's tokens, calls the engine and stores what it
sampled -> the same API module formats the ``TurnResult`` as JSON, or as events (``sse``) while tokens arrive.
``registry`` holds the open sessions; ``session_api`` has their own endpoints' bodies.
"""

"""Room: rollout/session/server -- sessions over HTTP, as OpenAI's chat and responses and Anthropic's messages.

Floor 2. Imports: core, rollout/session, aiohttp (the ``serve`` extra). Never: a backend; engines come by their door.

A turn's life: ``app`` checks the key -> ``desk`` reads the body -> ``chat``, ``responses`` or ``messages`` make an
``Ask`` of it (pure: JSON in, nouns out) -> ``turn`` has the session find its tokens, asks the engine, and stores what
was sampled -> ``chat_reply``, ``responses_reply`` or ``messages_reply`` write it as JSON (pure again), whole or in
events (``stream``) while tokens come. ``sessions`` knows which are open; ``opening`` and ``told`` are their JSON.
"""

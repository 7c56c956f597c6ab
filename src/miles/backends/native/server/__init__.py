"""Room: backends/native/server -- the native engine over HTTP: SGLang's native API and OpenAI's.

Floor 3. Imports: core, config, models, sync, cluster, the engine. Never: a plane, another backend.

A request's life: ``app`` checks the key and reads the body -> ``generate``, ``chat`` or ``completions`` make ``Wish``es
of it (pure: JSON in, nouns out) -> ``desk`` turns each into an ``Ask``, with a ``grammar`` where one is wanted, and
opens it at the engine -> a ``Reply`` grows as tokens come, its text through ``core.spelling`` -> ``native`` or
``openai`` write it as JSON (pure again), whole or in pieces (``stream``). ``control`` and ``weights`` are the other
half: pause, abort, sleep, and new weights through the engine's own doors.
"""

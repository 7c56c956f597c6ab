"""Request bodies and responses of the engine's HTTP API: SGLang's ``/generate`` and OpenAI's ``/v1`` (layer 3)."""

"""The chat-serving code that the engine's HTTP server and the agents' session server share (layer 2).

``body`` and ``openai_bodies`` hold the pydantic request bodies, ``tool_parsers`` and ``output_parser`` split a reply
into reasoning, content and tool calls, ``messages`` reads chat messages, ``errors`` formats error bodies, ``http`` has
JSON, server-sent events, origin and API-key checks, and ``openapi`` builds the OpenAPI document.

Imports: core, the standard library, pydantic and orjson. Never: an HTTP framework, an engine, a session.
"""

"""Generate functions: single turn, multi turn with tools, agents over HTTP; each a core.protocols.Generate (layer 2).

Imports: core, numpy. Never: a tokenizer or an engine of its own; both are passed in.
"""

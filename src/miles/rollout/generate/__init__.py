"""Room: rollout.generate -- ways to answer a prompt, one a file, each a core.protocols.Generate.

Floor 2. Imports: core, numpy. Never: a tokenizer or an engine of its own; both are handed in.
"""

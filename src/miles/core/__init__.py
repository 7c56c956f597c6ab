"""Package core: shared types, protocols, errors and events.

Layer 0. Imports: stdlib, numpy. It holds no configuration and no policy; it never touches a model, an engine or a file
of a run.
"""

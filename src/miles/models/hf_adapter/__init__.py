"""transformers adapter: models without a native spec run as transformers' own modules, packed in the trainer and paged
in the engine (layer 1).

They call our attention backends through transformers' attention interface; loading verifies that the logits match.
``spec`` imports neither torch nor transformers; the rest imports transformers when a model is loaded.
"""

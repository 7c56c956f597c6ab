"""Models with no spec of ours: transformers' own modules, packed in the trainer and paged in the engine. Floor 1.

They reach whoever remembers through transformers' attention interface, and are proven at load to be what they say.
``spec`` imports neither torch nor transformers; the rest imports transformers when a model is loaded.
"""

"""Room: backends/native -- the embedded engine: continuous batching over the one decoder, nothing but torch.

Floor 3. Imports: core, config, models, kernels, sync, cluster. Never: a plane, another backend.

A request's life: ``engine`` checks it and makes a ``request.Sequence`` -> it waits in ``scheduler`` until a seat and
pages (``cache``) are free -> each step the scheduler plans, ``runner`` computes, ``sampler`` draws, the sequence
remembers -> it ends at a stop, a limit or an abort, and gives its pages back. ``weights`` takes publications.
"""

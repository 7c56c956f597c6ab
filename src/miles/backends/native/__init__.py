"""Room: backends/native -- the embedded engine: continuous batching over the one decoder, nothing but torch.

Floor 3. Imports: core, config, models, kernels, sync, cluster. Never: a plane, another backend.

A request's life: ``gate`` checks an ``Ask`` and makes a ``sequence.Sequence`` -> it waits in ``scheduler`` until the
``hall`` has a seat (``seats``) and pages (``cache``) -> each step the scheduler makes a ``plan``, whose ``order``
``runner`` launches; ``flights`` lets it land, and the sequence remembers what ``sampler`` drew -> its ``answer`` tells
whoever reads -> it ends at a stop, a limit or an abort, and gives its pages back. ``weights`` takes publications.
"""

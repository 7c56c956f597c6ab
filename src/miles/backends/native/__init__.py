"""Package backends/native: the embedded inference engine, continuous batching over the package's own decoder.

Layer 3. Imports: core, config, models, kernels, sync, cluster. Never: rollout, train, schedule, another backend.

A request's life: ``engine.validate`` checks a ``GenerateRequest`` and creates a ``Req`` -> it waits in
``engine.scheduler`` until there are a slot (``req_slots``) and pages (``prefix_cache``) -> each step the scheduler
builds a ``ForwardBatch`` (``forward_batch``), which ``runner.model_runner`` launches, eagerly or as a CUDA graph
(``cuda_graph``, ``step_inputs``), and samples from (``sampler``); ``engine.engine`` reads the output when the next
step is launched, and the ``Req`` (``req``) records it -> its ``RequestOutput`` wakes the reader -> the request ends at
a stop, a limit or an abort, and releases its pages. ``runner.weight_update`` receives new weights.
"""

"""A fixture that makes engines capture CUDA graphs without a GPU: stubs call what was captured."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from miles.backends.native.runner import cuda_graph, draft_head_graph, model_runner


class Event:
    def record(self): ...
    def synchronize(self): ...


class Graph:
    """Replays by calling: ``call`` is what was recorded."""

    def replay(self):
        with torch.inference_mode():
            self.call()


@pytest.fixture
def recording(monkeypatch):
    """Make engines capture graphs; returns the keys of all replays."""
    begun, replayed = [], []

    def note(runner):
        forward = runner._forward

        def noted(self, key):
            begun.append(lambda: (replayed.append(key), forward(self, key)))
            forward(self, key)

        monkeypatch.setattr(runner, "_forward", noted)

    @contextmanager
    def graph(made, **_):
        yield
        made.call = begun[-1]

    note(cuda_graph.CudaGraphRunner)
    note(draft_head_graph.DraftHeadGraphs)
    for name, fake in {
        "CUDAGraph": Graph,
        "graph": graph,
        "Event": Event,
        "graph_pool_handle": lambda: None,
        "synchronize": lambda: None,
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=1),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(model_runner, "supports_gpu_kernels", lambda spec, model, device: True)
    return replayed

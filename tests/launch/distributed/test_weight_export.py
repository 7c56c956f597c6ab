"""Weights of ranks in other processes: the same bits arrive, in memory of their own, and shared memory is freed."""

from pathlib import Path

import pytest
import torch

from miles.launch.distributed.driver import CODEC
from miles.launch.distributed.weight_export import WeightExporter, import_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("shares_memory", [True, False])
def test_exported_weights_arrive_to_the_bit(shares_memory):
    chance = torch.Generator().manual_seed(0)
    weights = {
        "odd": torch.randn(3, 5, generator=chance).to(torch.bfloat16),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "strided": torch.randn(4, 6, generator=chance).T,
        "empty": torch.empty(0, 3),
        "bytes": torch.arange(11, dtype=torch.uint8),
        "wide": torch.randn(2, 3, 4, generator=chance, dtype=torch.float64),
    }
    exporter = WeightExporter(CPU, shares_memory=shares_memory)
    _, sent = CODEC.unpack(CODEC.pack("weights", exporter.export(weights)))
    found = import_weights(sent, CPU)
    files = [Path("/dev/shm") / sent.handle["name"]] if shares_memory else []
    assert all(file.exists() for file in files)
    exporter.release()
    assert not any(file.exists() for file in files)
    assert list(found) == list(weights)
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    found["wide"].zero_()  # it is the caller's own
    assert weights["wide"].abs().sum() > 0

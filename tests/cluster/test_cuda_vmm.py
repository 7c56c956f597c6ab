"""CUDA virtual memory: released and restored at the same address, on a GPU or with a fake driver."""

import ctypes
import gc

import pytest
import torch

from miles.cluster import cuda_vmm as module
from miles.cluster.cuda_vmm import VmmAllocator, create_vmm_allocator
from miles.core.errors import EngineError

card = pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip), reason="needs a CUDA device")
GIB = 2**30


def free():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_a_cpu_has_none():
    assert create_vmm_allocator(torch.device("cpu")) is None


@card
def test_what_is_given_back_is_free_and_comes_back_as_zeros_in_its_place():
    memory = create_vmm_allocator(torch.device("cuda"))
    assert memory is not None
    # So much that what others do on the card meanwhile is little beside it. A tensor whose memory is away cannot be
    # shown, so nothing is asserted of it then.
    rows = free() // 4 // GIB
    held = memory.zeros((rows, GIB // 2), torch.bfloat16)
    assert held.shape == (rows, GIB // 2) and held.is_cuda and not held.any()
    graph, at, with_it = torch.cuda.CUDAGraph(), held.data_ptr(), free()
    with torch.cuda.graph(graph):
        held.add_(1)
    for _ in range(3):
        memory.release()
        memory.release()  # nothing is left to give
        given = free() - with_it
        memory.restore()
        assert given > rows * GIB / 2
        assert held.data_ptr() == at and not held.any()
        graph.replay()
        assert held.min() == held.max() == 1
    del graph, held
    gc.collect()
    assert free() - with_it > rows * GIB / 2


@card
def test_more_than_there_is_is_refused():
    memory = create_vmm_allocator(torch.device("cuda"))
    assert memory is not None
    small = memory.zeros((1000,), torch.uint8)
    with pytest.raises(EngineError, match="lower --engine-memory-fraction or --engine-kv-tokens"):
        memory.zeros((torch.cuda.mem_get_info()[1] * 2,), torch.uint8)
    memory.release()
    memory.restore()
    assert small.shape == (1000,) and not small.any()


class Driver:
    """A driver with room for so many mappings."""

    def __init__(self, room):
        self.room, self.mapped = room, 0

    def cuMemCreate(self, handle, size, wanted, flags):
        return 2 if self.mapped == self.room else 0

    def cuMemMap(self, *_):
        self.mapped += 1
        return 0

    def cuMemUnmap(self, *_):
        self.mapped -= 1
        return 0

    def cuMemGetAllocationGranularity(self, grain, *_):
        ctypes.cast(grain, ctypes.POINTER(ctypes.c_size_t))[0] = 1 << 21
        return 0

    def cuMemAddressReserve(self, address, *_):
        return 0

    cuMemSetAccess = cuMemRelease = cuMemAddressFree = cuMemAddressReserve


def test_it_comes_back_whole_or_not_at_all(monkeypatch):
    driver = Driver(2)
    monkeypatch.setattr(module, "load_driver", lambda: driver)
    monkeypatch.setattr(module._Block, "bytes", lambda self: torch.ones(self._size, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    memory = VmmAllocator(torch.device("cuda", 0))
    blocks = [module._Block(100, torch.device("cuda", 0)) for _ in range(2)]
    memory._blocks = [module.weakref.ref(block) for block in blocks]
    memory.release()
    assert driver.mapped == 0
    driver.room = 1
    with pytest.raises(EngineError, match=r"needs 0\.0 GiB on cuda:0, but 0\.0 GiB are free"):
        memory.restore()
    assert driver.mapped == 0
    driver.room = 2
    memory.restore()
    memory.restore()
    assert driver.mapped == 2
    del blocks
    gc.collect()
    assert driver.mapped == 0


def test_a_driver_that_refuses_is_quoted(monkeypatch):
    class Refusing(Driver):
        def cuMemAddressReserve(self, address, *_):
            return 801

        def cuGetErrorString(self, failed, said):
            ctypes.cast(said, ctypes.POINTER(ctypes.c_char_p))[0] = b"operation not supported"

    monkeypatch.setattr(module, "load_driver", lambda: Refusing(1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    with pytest.raises(EngineError, match="cuMemAddressReserve failed: operation not supported"):
        module._Block(100, torch.device("cuda", 0))

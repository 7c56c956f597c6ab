"""Host copies: values are exact, host memory is used again and freed; on a GPU it is page-locked."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.cluster.host_copies import HostCopies

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def random_tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Any bits, NaN patterns too."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


shapes = st.lists(st.integers(0, 70), min_size=0, max_size=3).map(tuple)


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=6))
def test_a_copy_has_the_bits_the_shape_and_the_strides_of_its_tensor(kinds):
    tensors = {str(n): random_tensor(n, shape, dtype) for n, (shape, dtype) in enumerate(kinds)}
    tensors |= {f"{name} turned": tensor.mT for name, tensor in tensors.items() if tensor.ndim > 1}
    copies = HostCopies().copy(tensors, CPU)
    assert copies.keys() == tensors.keys()
    for name, tensor in tensors.items():
        copy = copies[name]
        assert (copy.shape, copy.dtype, copy.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
        assert raw_bytes(copy) == raw_bytes(tensor)
        assert copy.untyped_storage().nbytes() == tensor.nbytes and copy.storage_offset() == 0
        assert not tensor.numel() or copy.data_ptr() != tensor.data_ptr()


def test_the_next_copy_under_a_name_is_in_the_same_memory():
    host = HostCopies()
    first = {name: copy.data_ptr() for name, copy in host.copy(some_tensors(0), CPU).items()}
    again = host.copy(some_tensors(1), CPU)
    assert {name: copy.data_ptr() for name, copy in again.items()} == first
    assert all(torch.equal(copy, some_tensors(1)[name]) for name, copy in again.items())


def some_tensors(seed: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((33,), seed), "b": torch.full((7, 5), seed + 0.5)}


def test_a_tensor_of_another_size_gets_other_memory_and_leaves_the_old_copy_as_it_was():
    host = HostCopies()
    old = host.copy(some_tensors(0), CPU)
    grown = host.copy({"a": torch.full((34,), 7), "c": torch.ones(3)}, CPU)
    assert old["a"].tolist() == [0] * 33 and grown["a"].tolist() == [7] * 34 and grown["c"].tolist() == [1.0] * 3
    assert host.bytes == 34 * 8 + 35 * 4 + 3 * 4
    assert host.copy(some_tensors(2), CPU)["b"].data_ptr() == old["b"].data_ptr()


def test_tensors_that_are_there_already_are_left_alone():
    host, tensors = HostCopies(), some_tensors(0)
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    host.move(tensors, CPU)
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == pointers
    assert host.bytes == 0


def test_the_memory_is_freed_with_its_last_user():
    host = HostCopies()
    copies = host.copy(some_tensors(0), CPU)
    blocks = [weakref.ref(place.block) for place in host._places.values()]
    host.copy({name: torch.ones(100) for name in copies}, CPU)
    assert [block() for block in blocks] == [None, None], "replaced memory is kept"
    blocks = [weakref.ref(place.block) for place in host._places.values()]
    gc.disable()  # a cycle would be found by it, late
    try:
        del host
        assert [block() for block in blocks] == [None, None]
    finally:
        gc.enable()
    assert torch.equal(copies["b"], some_tensors(0)["b"]), "a tensor keeps its memory"


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_round_trip_is_exact_and_page_locked_and_gives_the_device_memory_back(dtype):
    host, device = HostCopies(), torch.device("cuda", torch.cuda.current_device())
    tensors = {str(n): random_tensor(n, shape, dtype).cuda() for n, shape in enumerate([(1 << 22,), (513, 77), ()])}
    wanted = {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    same, total = dict(tensors), sum(tensor.nbytes for tensor in tensors.values())
    before, pointers = torch.cuda.memory_allocated(), []
    for _ in range(3):
        host.move(tensors, CPU)
        assert all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in tensors.values())
        assert before - torch.cuda.memory_allocated() >= total
        pointers.append([tensor.data_ptr() for tensor in tensors.values()])
        assert {name: raw_bytes(tensor) for name, tensor in tensors.items()} == wanted
        host.move(tensors, device)
        assert torch.cuda.memory_allocated() == before
        assert {name: raw_bytes(tensor) for name, tensor in tensors.items()} == wanted
    assert pointers[0] == pointers[1] == pointers[2] and host.bytes == total
    assert all(tensors[name] is same[name] for name in same)


@needs_cuda
def test_memory_is_page_locked_only_as_long_as_its_host_copies():
    host, tensors = HostCopies(), {"a": torch.arange(1 << 20, device="cuda")}
    host.move(tensors, CPU)
    assert tensors["a"].is_pinned()
    del host
    assert not tensors["a"].is_pinned() and torch.equal(tensors["a"], torch.arange(1 << 20))


@needs_cuda
def test_a_copy_waits_for_what_the_device_is_still_computing():
    host, x = HostCopies(), torch.eye(2048, device="cuda")
    for _ in range(50):
        x = x @ x
    x.mul_(3)
    host.move({"x": x}, CPU)
    assert torch.equal(x, 3 * torch.eye(2048))


@needs_cuda
def test_memory_that_cannot_be_page_locked_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("miles.cluster.host_copies.load_driver", lambda: None)
    host, tensors = HostCopies(), {"a": torch.arange(1000, device="cuda")}
    host.move(tensors, CPU)
    assert not tensors["a"].is_pinned() and torch.equal(tensors["a"], torch.arange(1000))
    host.move(tensors, torch.device("cuda"))
    assert torch.equal(tensors["a"].cpu(), torch.arange(1000))

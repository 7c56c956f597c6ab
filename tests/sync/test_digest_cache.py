"""Tensors are those of the last time only where their very memory is."""

import gc

import torch

from miles.kernels.runtime.checksum import ChecksumBatch, compute_checksums
from miles.sync.digest_cache import DigestCache, StorageTracker
from miles.sync.manifest import combine_sums, combine_sums_batch, compute_digests, decode_digests, encode_digests


def test_only_the_same_names_in_the_same_memory_are_those_of_the_last_time():
    resident, tensors = StorageTracker(), {"a": torch.randn(8), "b": torch.randn(3)}
    assert not resident.same(tensors) and resident.same(tensors)
    assert resident.same({name: tensor.detach() for name, tensor in tensors.items()}), "other views of one memory"
    tensors["a"].add_(1)
    assert resident.same(tensors), "numbers may change"
    assert not resident.same({"b": tensors["b"], "a": tensors["a"]}), "the order is part of what is published"
    assert not resident.same({"b": tensors["b"], "a": tensors["a"].clone()})
    resident.forget()
    assert not resident.same(tensors) and resident.same(tensors)
    assert not resident.same({}) and not resident.same({})


def test_memory_that_was_let_go_of_is_not_kept_and_not_taken_for_what_it_was():
    resident = StorageTracker()
    tensors = {"a": torch.randn(1000)}
    resident.same(tensors)
    storage = tensors["a"].untyped_storage()._weak_ref()
    at = tensors["a"].data_ptr()
    del tensors
    gc.collect()
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)
    fresh = [torch.randn(1000) for _ in range(20)]
    again = next((tensor for tensor in fresh if tensor.data_ptr() == at), fresh[0])
    assert not resident.same({"a": again})


def test_what_is_counted_over_and_over_is_what_is_there_each_time():
    counted, tensors = (
        DigestCache(),
        {"a": torch.randn(70, 3), "b": torch.zeros(0), "c": torch.randn(5).to(torch.bfloat16)},
    )
    tally = ChecksumBatch(list(tensors.values()))
    for _ in range(3):
        tensors["a"].mul_(-1.5)
        tally.start()
        found = combine_sums_batch(tally.read())
        assert (
            dict(zip(tensors, found.tolist(), strict=True))
            == counted.compute_digests(tensors)
            == compute_digests(tensors)
        )
        assert found.tolist() == [combine_sums(pair) for pair in compute_checksums(list(tensors.values()))]
        assert decode_digests(encode_digests(found), 3).tolist() == found.tolist()

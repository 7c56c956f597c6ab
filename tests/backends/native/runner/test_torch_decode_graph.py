"""Decode steps with torch attention read nothing from the host, so a CUDA graph may capture them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.parity.planes import spec_of_kind
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miles.backends.native.runner.cuda_graph import choose_context
from miles.backends.native.runner.model_runner import _kv_shape, _state_shapes
from miles.kernels.attention.metadata import DecodeMetadata, build_attention_metadata
from miles.kernels.attention.paged import PagedAttentionBackend, PagedKVCache, RecurrentStatePool
from miles.kernels.numerics import FAST
from miles.models.accounting.kv_cache import PerTokenCache, cache_layout, list_states
from miles.models.decoder import Decoder
from miles.models.spec import MlpSpec

KINDS = [
    "deepseek v3.2",
    "glm 5 shared choices",
    "minimax-m3",
    "deepseek v4",
    "inkling whole",
    "hybrid qwen4",
    "hybrid glm 5.3 flash",
]
ROWS, PAGE, CONTEXT = 3, 4, 64


class HostReads(TorchDispatchMode):
    """Collects the operations on tensors of a device that also read a tensor of the CPU, or make one."""

    found: list[str]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        kinds = {each.device.type for each in tensors}
        if kinds == {"cpu", "meta"}:
            self.found.append(str(function))
        return result


def without_experts(spec):
    """The same mixers with plain feed-forward layers: experts have kernels of their own on a GPU."""
    layers = [replace(layer, ffn=MlpSpec(size=40)) if layer.ffn is not None else layer for layer in spec.layers]
    return replace(spec, layers=tuple(layers))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_a_device_without_numbers_needs_none_of_them(kind):
    """On the meta device whatever asks for a number fails; copies from the host are collected."""
    spec, device, dtype = without_experts(spec_of_kind(kind)), torch.device("meta"), torch.bfloat16
    decoder = Decoder(spec, device=device, dtype=dtype, numerics=FAST)
    layouts = [cache_layout(layer.mixer, FAST) for layer in spec.layers]
    shapes = [_kv_shape(layout) if isinstance(layout, PerTokenCache) else None for layout in layouts]
    cache = PagedKVCache(shapes, pages=40, page_size=PAGE, device=device, dtype=dtype)
    states = {key: _state_shapes(layout, dtype) for key, layout in list_states(spec, FAST).items()}
    pool = RecurrentStatePool(states, slots=5, device=device)

    def run():
        tokens, starts = (torch.zeros(ROWS, dtype=torch.int64, device=device) for _ in range(2))
        metadata = DecodeMetadata(
            starts,
            torch.zeros_like(tokens),
            torch.zeros(ROWS, 32, dtype=torch.int32, device=device),
            context=CONTEXT,
            page_size=PAGE,
            dtype=dtype,
            padding_slot=0,
        )
        backend = PagedAttentionBackend(cache, metadata, pool.select_rows(tokens, starts == 0))
        return decoder(tokens, starts, backend)

    reads = HostReads()
    reads.found = []
    with torch.inference_mode():
        run()  # builds the tables of rotations
        with reads:
            assert run().shape == (ROWS, spec.hidden_size)
    assert not reads.found


def test_a_copy_from_the_host_would_be_found():
    reads = HostReads()
    reads.found = []
    with reads:
        torch.zeros(3).to("meta")
    assert reads.found == ["aten._to_copy.default"]


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (6, None), (None, 8), (11, 8)])
def test_the_block_of_a_step_shows_each_row_the_tokens_that_blocks_of_its_length_do(window, chunk):
    table = np.random.default_rng(0).permutation(3 * 16).reshape(3, 16)
    starts = np.array([0, 21, 62])
    _, expected = build_attention_metadata(
        starts, np.ones(3, np.int64), table, PAGE, device=torch.device("cpu"), dtype=torch.float32
    )
    found = DecodeMetadata(
        torch.from_numpy(starts),
        torch.zeros(3, dtype=torch.int64),
        torch.from_numpy(table.astype(np.int32)),
        context=CONTEXT,
        page_size=PAGE,
        dtype=torch.float32,
        padding_slot=999,
    )

    def list_visible(metadata):
        """The slots that each row sees, in order."""
        blocks, rows = metadata.get_blocks(window, chunk), []
        for block in blocks.decode:
            slots_NC = (block.pages.view(block.rows, -1, 1) * PAGE + torch.arange(PAGE)).flatten(1)[:, : block.context]
            rows += [slots[mask == 0].tolist() for slots, mask in zip(slots_NC, block.mask[:, 0, 0], strict=True)]
        return rows if blocks.decode_order is None else [rows[i] for i in blocks.decode_order]

    assert list_visible(found) == list_visible(expected)
    if window is None and chunk is None:
        assert [len(row) for row in list_visible(found)] == [1, 22, 63]


@pytest.mark.parametrize(("rate", "reach"), [(2, 2), (3, 6), (4, 8)])
def test_windows_that_tokens_complete_are_those_of_the_host_and_others_go_to_the_padding(rate, reach):
    table = np.random.default_rng(0).permutation(6 * 16).reshape(6, 16)
    starts = np.array([0, 1, 2, 3, 22, 63])
    _, expected = build_attention_metadata(
        starts, np.ones(6, np.int64), table, PAGE, device=torch.device("cpu"), dtype=torch.float32
    )
    found = DecodeMetadata(
        torch.from_numpy(starts),
        torch.zeros(6, dtype=torch.int64),
        torch.from_numpy(table.astype(np.int32)),
        context=CONTEXT,
        page_size=PAGE,
        dtype=torch.float32,
        padding_slot=999,
    )
    slots_BL, numbers_B = found.get_windows(rate, reach)
    is_complete = slots_BL[:, -1] != 999
    assert is_complete.tolist() == [(start + 1) % rate == 0 for start in starts]
    wanted_slots, wanted_numbers = expected.get_windows(rate, reach)
    assert slots_BL[is_complete].tolist() == wanted_slots.tolist()
    assert numbers_B[is_complete].tolist() == wanted_numbers.tolist()


def test_contexts_are_few_hold_what_is_asked_and_are_padded_by_half_at_most():
    sizes = {choose_context(longest, 16, 4096) for longest in range(1, 65_537)}
    assert len(sizes) == 17 and all(size % 16 == 0 for size in sizes)
    for longest in (1, 256, 257, 300, 1000, 5000, 65_536):
        context = choose_context(longest, 16, 4096)
        assert longest <= context <= max(256, 1.5 * longest + 16)
    assert choose_context(900, 16, 57) == 912

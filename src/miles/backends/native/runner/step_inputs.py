"""CUDA graph inputs at fixed device addresses: those of decode-only steps, and of steps that contain prefill.

The host writes one buffer of pinned memory, and one copy brings it to the device. The block table is there already:
only its changed entries are in the buffer. Padding rows write to a page, a request slot and a table entry that no
request uses.

Shapes: R rows of the largest graph, n rows or tokens of one, M pages of the longest sequence, I attention tiles, D
sampled tokens; others as in ``forward_batch``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles.backends.native.engine.forward_batch import (
    ForwardBatch,
    SamplingBatch,
    compute_cache_locs,
    compute_positions,
    compute_rope_positions,
)
from miles.backends.native.engine.request import Ints
from miles.core.types import Array
from miles.kernels.attention.gpu_backend import SplitKVPlans, StepMetadata
from miles.kernels.attention.metadata import DecodeMetadata
from miles.kernels.attention.paged_prefill import TILE, build_prefill_tiles
from miles.kernels.runtime.graph_inputs import GraphInputs, unpack_graph_inputs
from miles.kernels.runtime.kv_cache import RecurrentStatePool

_INT_COLUMNS = ("tokens", "starts", "positions", "cache_locs", "req_slots", "top_k")
_FLOAT_COLUMNS = ("temperature", "uniform", "top_p", "min_p")
# Changed block table entries that fit into the input buffer; beyond that the table is copied whole.
_MAX_TABLE_UPDATES = 1024
_TABLE_COLUMNS = {"table_index": _MAX_TABLE_UPDATES, "table_pages": _MAX_TABLE_UPDATES}
# Host buffers of inputs in rotation: one the device reads, one being filled, one spare.
_NUM_HOST_BUFFERS = 3

# Padded tokens of steps with prefill: from 256 to 2,048 each at most a quarter more than the one before it.
_TOKEN_SIZES = (32, 64, 128, *range(256, 512, 64), *range(512, 1024, 128), *range(1024, 2048, 256), 2048, 3072, 4096)
# Padded rows that decode or are sampled from, of engines that run more requests: fewer cost next to nothing.
_FEW_ROWS = 256


def capture_token_sizes(max_tokens: int) -> list[int]:
    """Return the padded numbers of tokens that steps with prefill are captured for."""
    return list(_TOKEN_SIZES[: bisect_left(_TOKEN_SIZES, max_tokens) + 1])


def count_graph_tiles(num_tokens: int) -> int:
    """Return the attention tiles of a graph of so many tokens: twice those of one sequence, and some of short ones."""
    return 2 * -(-num_tokens // TILE) + 8


class _InputBuffer:
    """One buffer of int32 on the device, and several in pinned host memory, which are filled in turn."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self.hosts = [torch.zeros(size, dtype=torch.int32).pin_memory() for _ in range(_NUM_HOST_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(_NUM_HOST_BUFFERS)]
        self._current = 0

    def next(self) -> int:
        """Return the number of a host buffer that the device no longer reads.

        It waits if more steps were launched in a row than there are buffers: a draft is several steps.
        """
        self._current = (self._current + 1) % _NUM_HOST_BUFFERS
        self._copied[self._current].synchronize()
        return self._current

    def send(self, size: int) -> None:
        """Copy so much of the buffer last returned by ``next`` to the device."""
        self.device[:size].copy_(self.hosts[self._current][:size], non_blocking=True)
        self._copied[self._current].record()


def _split_columns(buffer: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the columns of a buffer, one behind the other."""
    used = buffer[: sum(sizes.values())]
    columns: dict[str, Tensor] = dict(zip(sizes, used.split(list(sizes.values())), strict=True))
    return {name: each.view(torch.float32) if name in _FLOAT_COLUMNS else each for name, each in columns.items()}


def _as_arrays(columns: Mapping[str, Tensor]) -> dict[str, Array]:
    return {name: column.numpy() for name, column in columns.items()}


class BlockTableBuffer:
    """The block table on the device, one row per sequence of a step, and what was sent of it.

    Its last entry belongs to no row: unused updates go there.
    """

    def __init__(self, rows: int, max_pages: int, device: torch.device) -> None:
        self.table_RM = torch.zeros(rows + 1, max_pages, dtype=torch.int32, device=device)
        self.unused_index = self.table_RM.numel() - 1
        self._sent_RM = np.zeros((rows, max_pages), np.int32)

    def update(self, block_table_BM: Ints, columns: Mapping[str, Array]) -> None:
        """Send changed entries: in the input buffer with these host columns if they fit, else the whole table."""
        count, max_pages = block_table_BM.shape
        sent_BM = self._sent_RM[:count, :max_pages]
        rows, pages = (sent_BM != block_table_BM).nonzero()
        columns["table_index"][:] = self.unused_index
        if not len(rows):
            return
        if len(rows) <= len(columns["table_index"]):
            columns["table_index"][: len(rows)] = rows * self._sent_RM.shape[1] + pages
            columns["table_pages"][: len(rows)] = block_table_BM[rows, pages]
        else:
            pinned_BM = torch.from_numpy(block_table_BM.astype(np.int32)).pin_memory()
            self.table_RM[:count, :max_pages].copy_(pinned_BM, non_blocking=True)
        sent_BM[rows, pages] = block_table_BM[rows, pages]


class StepInputs:
    """The inputs of decode-only steps at fixed device addresses: the rows' columns, the block table, split-KV plans.

    Padding rows use ``padding_slot``, which no request has, and write to ``padding_cache_loc``, in a page of no
    request.
    """

    def __init__(
        self,
        *,
        rows: int,
        max_pages: int,
        page_size: int,
        padding_cache_loc: int,
        padding_slot: int,
        plans: SplitKVPlans,
        device: torch.device,
    ) -> None:
        self.plans = plans
        self.page_size = page_size
        self.max_pages = max_pages
        self.padding_cache_loc = padding_cache_loc
        self.padding_slot = padding_slot
        self.block_table = BlockTableBuffer(rows, max_pages, device)
        self.rows_R = torch.arange(rows, dtype=torch.int32, device=device)
        sizes = dict.fromkeys((*_INT_COLUMNS, *_FLOAT_COLUMNS), rows) | _TABLE_COLUMNS
        self._size = sum(sizes.values())
        self._buffer = _InputBuffer(self._size, device)
        # The columns on the device, and those of each host buffer, by name.
        self.columns = _split_columns(self._buffer.device, sizes)
        self._host_columns = [_as_arrays(_split_columns(host, sizes)) for host in self._buffer.hosts]

    def send(self, batch: ForwardBatch, batch_size: int, *, reads_plans: bool) -> None:
        """Copy the rows of a batch, padded to ``batch_size``, to the device."""
        count, size = len(batch.req_slots_B), self.page_size
        starts_B = batch.starts_B
        columns = self._host_columns[self._buffer.next()]
        last_page_B = batch.block_table_BM[np.arange(count), starts_B // size]
        values: dict[str, tuple[Array, float]] = {
            "tokens": (batch.tokens_T, 0),
            "starts": (starts_B, 0),
            "positions": (compute_rope_positions(batch, starts_B), 0),
            "cache_locs": (last_page_B * size + starts_B % size, self.padding_cache_loc),
            "req_slots": (batch.req_slots_B, self.padding_slot),
            **_list_sampling_columns(batch.sampling),
        }
        for name, (value, padding) in values.items():
            columns[name][:count] = value
            if count < batch_size:
                columns[name][count:batch_size] = padding
        self.block_table.update(batch.block_table_BM, columns)
        self._buffer.send(self._size)
        if reads_plans:
            lengths_R = np.zeros(batch_size, np.int64)
            lengths_R[:count] = starts_B + 1
            pad = (0, batch_size - count)
            self.plans.fill(lengths_R, np.pad(batch.group_B, pad, constant_values=-1), np.pad(batch.shared_B, pad))

    def send_padding(self, batch_size: int) -> None:
        """Send inputs that consist of padding rows only."""
        columns = self._host_columns[self._buffer.next()]
        for name in (*_INT_COLUMNS, *_FLOAT_COLUMNS):
            columns[name][:] = 0
        columns["temperature"][:] = 1
        columns["top_p"][:] = 1
        columns["cache_locs"][:] = self.padding_cache_loc
        columns["req_slots"][:] = self.padding_slot
        columns["table_index"][:] = self.block_table.unused_index
        self._buffer.send(self._size)
        zeros = np.zeros(batch_size, np.int64)
        self.plans.fill(zeros, zeros - 1, zeros)

    def unpack(
        self,
        count: int,
        last_tokens_S: Tensor,
        *,
        has_prefixes: bool,
        states: RecurrentStatePool | None = None,
    ) -> tuple[GraphInputs, StepMetadata]:
        """Return the first ``count`` rows and the metadata of their attention; part of what a graph captures."""
        columns = self.columns
        inputs = unpack_graph_inputs(
            columns["tokens"][:count],
            columns["positions"][:count],
            columns["cache_locs"][:count],
            columns["req_slots"][:count],
            last_tokens_S=last_tokens_S,
            table_index_N=columns["table_index"],
            pages_N=columns["table_pages"],
            block_table_RM=self.block_table.table_RM,
        )
        starts_n = columns["starts"][:count]
        step_states = None
        if states is not None:
            rows_n = inputs.req_slots_n.masked_fill(inputs.req_slots_n == self.padding_slot, states.rows - 1)
            step_states = states.select_rows(rows_n, starts_n == 0)
        step = StepMetadata(
            slots_T=inputs.slots_n,
            block_table_BM=self.block_table.table_RM,
            req_slots_B=self.rows_R[:count],
            num_decodes=count,
            plans=self.plans,
            has_prefixes=has_prefixes,
            prefill_tiles=None,
            page_size=self.page_size,
            starts_B=starts_n,
            states=step_states,
        )
        return inputs, step

    def build_torch_metadata(self, step: StepMetadata, context: int, dtype: torch.dtype) -> DecodeMetadata:
        """Return the metadata of torch attention for the rows of a step; part of what a graph captures."""
        assert step.starts_B is not None
        return DecodeMetadata(
            step.starts_B,
            step.slots_T,
            step.block_table_BM[: len(step.slots_T)],
            context=context,
            page_size=self.page_size,
            dtype=dtype,
            padding_slot=self.padding_cache_loc,
        )


class PrefillShape(NamedTuple):
    """The padded size of a step with prefill: tokens, and rows that decode or are sampled from."""

    num_tokens: int
    num_rows: int


class PrefillInputs:
    """The inputs of steps with prefill at fixed device addresses, for up to ``max_tokens`` tokens.

    As in an eager step the first tokens are those of sequences with one new token, which the split-KV plans describe,
    and attention tiles cover the others. Surplus tiles are empty. Padding tokens are in no tile and no plan. The block
    table and the plans are those of decode-only steps.
    """

    def __init__(self, steps: StepInputs, *, max_tokens: int, max_rows: int, device: torch.device) -> None:
        self._steps = steps
        self._token_sizes = capture_token_sizes(max_tokens)
        self._row_sizes = sorted({min(_FEW_ROWS, max_rows), max_rows})
        self.max_tokens = self._token_sizes[-1]
        largest = PrefillShape(self.max_tokens, max_rows)
        self._buffer = _InputBuffer(sum(self._column_sizes(largest).values()), device)
        self._columns: dict[PrefillShape, dict[str, Tensor]] = {}
        self._host_columns: dict[PrefillShape, list[dict[str, Array]]] = {}

    @property
    def common_shapes(self) -> list[PrefillShape]:
        """The padded sizes of all steps with few rows."""
        return [PrefillShape(size, min(size, self._row_sizes[0])) for size in self._token_sizes]

    def choose_shape(self, batch: ForwardBatch) -> PrefillShape | None:
        """Return the padded size of a step; None if it is too large, or has too many rows or short sequences.

        A step that verifies drafted tokens beside prompts may have more rows than there are requests.
        """
        num_rows = max(batch.num_decodes, len(batch.rows_D))
        if max(num_rows, len(batch.counts_B)) > self._row_sizes[-1]:
            return None
        tiles = int((-(-batch.counts_B[batch.num_decodes :] // TILE)).sum())
        first = bisect_left(self._token_sizes, max(len(batch.tokens_T), num_rows))
        fits = (size for size in self._token_sizes[first:] if tiles <= count_graph_tiles(size))
        size = next(fits, None)
        if size is None:
            return None
        return PrefillShape(size, min(size, self._row_sizes[bisect_left(self._row_sizes, num_rows)]))

    def get_columns(self, shape: PrefillShape) -> dict[str, Tensor]:
        """Return the columns of a size on the device, by name."""
        if shape not in self._columns:
            self._columns[shape] = _split_columns(self._buffer.device, self._column_sizes(shape))
        return self._columns[shape]

    def _column_sizes(self, shape: PrefillShape) -> dict[str, int]:
        per_token = dict.fromkeys(("tokens", "positions", "cache_locs", "req_slots"), shape.num_tokens)
        per_row = dict.fromkeys(("sampled_rows", "sampled_slots", "top_k", *_FLOAT_COLUMNS), shape.num_rows)
        return per_token | _TABLE_COLUMNS | {"tiles": 4 * count_graph_tiles(shape.num_tokens)} | per_row

    def send(self, batch: ForwardBatch, shape: PrefillShape) -> None:
        """Copy a step, padded to ``shape``, to the device."""
        steps, n = self._steps, batch.num_decodes
        if shape not in self._host_columns:
            sizes = self._column_sizes(shape)
            self._host_columns[shape] = [_as_arrays(_split_columns(host, sizes)) for host in self._buffer.hosts]
        columns = self._host_columns[shape][self._buffer.next()]
        positions_T = compute_positions(batch)
        tiles_I4 = build_prefill_tiles(
            batch.starts_B[n:], batch.counts_B[n:], np.arange(n, len(batch.counts_B)), first_row=n
        )
        values: dict[str, tuple[Array, float]] = {
            "tokens": (batch.tokens_T, 0),
            "positions": (compute_rope_positions(batch, positions_T), 0),
            "cache_locs": (compute_cache_locs(batch, positions_T, steps.page_size), steps.padding_cache_loc),
            "req_slots": (batch.req_slots_B[:n], steps.padding_slot),
            "tiles": (tiles_I4.ravel(), 0),
            "sampled_rows": (batch.rows_D, 0),
            "sampled_slots": (batch.req_slots_D, steps.padding_slot),
            **_list_sampling_columns(batch.sampling),
        }
        for name, (value, padding) in values.items():
            columns[name][: len(value)] = value
            columns[name][len(value) :] = padding
        steps.block_table.update(batch.block_table_BM, columns)
        self._buffer.send(sum(self._column_sizes(shape).values()))
        pad = (0, shape.num_rows - n)
        steps.plans.fill(
            np.pad(batch.starts_B[:n] + 1, pad),
            np.pad(batch.group_B[:n], pad, constant_values=-1),
            np.pad(batch.shared_B[:n], pad),
        )

    def send_padding(self, shape: PrefillShape) -> None:
        """Send inputs that consist of padding alone."""
        self.send(_build_empty_batch(), shape)

    def unpack(
        self, shape: PrefillShape, last_tokens_S: Tensor, *, has_prefixes: bool
    ) -> tuple[GraphInputs, StepMetadata]:
        """Return the tokens of a step and the metadata of their attention; part of what a graph captures."""
        columns, steps = self.get_columns(shape), self._steps
        inputs = unpack_graph_inputs(
            columns["tokens"],
            columns["positions"],
            columns["cache_locs"],
            columns["req_slots"],
            last_tokens_S=last_tokens_S,
            table_index_N=columns["table_index"],
            pages_N=columns["table_pages"],
            block_table_RM=steps.block_table.table_RM,
        )
        step = StepMetadata(
            slots_T=inputs.slots_n,
            block_table_BM=steps.block_table.table_RM,
            req_slots_B=steps.rows_R[: shape.num_rows],
            num_decodes=shape.num_rows,
            plans=steps.plans,
            has_prefixes=has_prefixes,
            prefill_tiles=columns["tiles"].view(-1, 4),
            page_size=steps.page_size,
            has_padding=True,
        )
        return inputs, step


def _list_sampling_columns(sampling: SamplingBatch) -> dict[str, tuple[Array, float]]:
    """Return the sampling parameters by column, and what a padding row has."""
    return {
        "top_k": (sampling.top_k_D, -1),
        "temperature": (sampling.temperature_D, 1),
        "uniform": (sampling.uniform_D, 0),
        "top_p": (sampling.top_p_D, 1),
        "min_p": (sampling.min_p_D, 0),
    }


def _build_empty_batch() -> ForwardBatch:
    ints, floats = np.zeros(0, np.int64), np.zeros(0, np.float32)
    return ForwardBatch(
        tokens_T=ints,
        starts_B=ints,
        counts_B=ints,
        req_slots_B=ints,
        num_decodes=0,
        block_table_BM=ints.reshape(0, 0),
        shared_B=ints,
        group_B=ints,
        rows_D=ints,
        req_slots_D=ints,
        sampling=SamplingBatch(
            temperature_D=floats,
            top_k_D=ints,
            top_p_D=floats,
            min_p_D=floats,
            has_filter_D=np.zeros(0, bool),
            uniform_D=floats,
        ),
    )

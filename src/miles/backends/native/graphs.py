"""Steps in which everyone runs one token, recorded once for a number of rows and replayed after that.

A recording reads what changes from step to step out of one sheet of numbers at a fixed place on the device, and pages
out of a table there; the host sends the sheet, and of the table only what is new. Whatever a row needs but does not
have, because there are fewer requests than rows, lies in a page, a seat and a table entry that nobody reads.

Shapes: R rows of the largest recording, n of one, M most pages of a sequence, V vocabulary, L layers with experts,
k experts a token.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles.backends.native.order import Drawn, Order
from miles.core.errors import EngineError
from miles.core.types import Array
from miles.kernels.arithmetic import exact
from miles.kernels.begin import begin
from miles.kernels.cache import Ints, PagedCache
from miles.kernels.card import CardAttend, Step, Works
from miles.kernels.draw import draw
from miles.kernels.exact.draw import draw as exact_draw
from miles.kernels.exact.paged import ExactCardAttend
from miles.kernels.head import logits_of
from miles.models.decoder import Decoder, Layer
from miles.models.moe import Routing

_INTS = ("tokens", "positions", "slots", "seats", "top_k")
_FLOATS = ("temperature", "uniform", "top_p", "min_p")
# Entries of the page table that a sheet can bring; beyond that the table is sent whole.
_NEWS = 1024
# How many sheets and answers may be on their way at once: one that runs, one that is made, one to spare.
_RING = 3


def ladder(most: int) -> list[int]:
    """The numbers of rows that are recorded: close together where a row more is felt."""
    rungs = [1, 2, 4, 8, 12, *range(16, 64, 8), *range(64, 256, 16), *range(256, 1025, 32)]
    return [*(n for n in rungs if n < most), most]


class Key(NamedTuple):
    """What a recording is for: rows, whether some share a prefix, whether some filter what they draw from."""

    rows: int
    trunks: bool
    filters: bool


class Recording(NamedTuple):
    """A step, and whether its kernels read how rows are ``cut`` into pieces: where one row is alone, none may."""

    graph: torch.cuda.CUDAGraph
    cut: bool


class _Sheet:
    """What changes from step to step: on the device, and in pinned memory several times over."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows = rows
        size = rows * (len(_INTS) + len(_FLOATS)) + 2 * _NEWS
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(size, dtype=torch.int32).pin_memory() for _ in range(_RING)]
        self._columns = [{name: column.numpy() for name, column in self._split(host).items()} for host in self._hosts]
        self.columns = self._split(self._device)
        self._turn = 0

    def next(self) -> dict[str, Array]:
        """The columns of a sheet that nobody reads any more."""
        self._turn = (self._turn + 1) % _RING
        return self._columns[self._turn]

    def send(self) -> None:
        """Give the device the sheet that ``next`` gave last."""
        self._device.copy_(self._hosts[self._turn], non_blocking=True)

    def _split(self, whole: Tensor) -> dict[str, Tensor]:
        rows = self._rows
        columns: dict[str, Tensor] = dict(zip((*_INTS, *_FLOATS), whole.split(rows), strict=False))
        for name in _FLOATS:
            columns[name] = columns[name].view(torch.float32)
        columns["places"], columns["pages"] = whole[-2 * _NEWS :].split(_NEWS)
        return columns


class _Answers:
    """What recordings leave behind: on the device, and in pinned memory several times over."""

    def __init__(self, rows: int, none_expert: Array | None, device: torch.device) -> None:
        # Tokens and log-probs come home in one piece.
        self._drawn = torch.zeros(rows * 3, dtype=torch.int32, device=device)
        self.tokens_R, self.logprobs_R = _parted(self._drawn, rows)
        self.routed_RLk: Tensor | None = None
        if none_expert is not None:
            kind = torch.uint8 if none_expert.dtype == np.uint8 else torch.int16
            self.routed_RLk = torch.zeros(rows, *none_expert.shape, dtype=kind, device=device)
        self._hosts = [torch.zeros_like(self._drawn, device="cpu").pin_memory() for _ in range(_RING)]
        self._read = [tuple(each.numpy() for each in _parted(host, rows)) for host in self._hosts]
        routed = self.routed_RLk
        self._routed = (
            [] if routed is None else [torch.zeros_like(routed, device="cpu").pin_memory() for _ in range(_RING)]
        )
        self._events = [torch.cuda.Event() for _ in range(_RING)]
        self._turn = 0

    def landing(self, count: int) -> Landing:
        """Bring the first ``count`` rows home, whenever the device gets there."""
        turn = self._turn = (self._turn + 1) % _RING
        event, routed = self._events[turn], None
        self._hosts[turn].copy_(self._drawn, non_blocking=True)
        if self.routed_RLk is not None:
            there = self._routed[turn][:count]
            there.copy_(self.routed_RLk[:count], non_blocking=True)
            routed = _unsigned(there.numpy())
        event.record()
        tokens_R, logprobs_R = self._read[turn]
        return Landing(event, tokens_R[:count], logprobs_R[:count], routed)


class Landing:
    """A step under way (a ``Flight``)."""

    def __init__(self, event: torch.cuda.Event, tokens_n: Array, logprobs_n: Array, routed_nLk: Array | None) -> None:
        self._event = event
        self._read = tokens_n, logprobs_n, routed_nLk

    def land(self) -> Drawn:
        """Wait for the device, and read what it drew."""
        self._event.synchronize()
        tokens_n, logprobs_n, routed_nLk = self._read
        if not np.isfinite(logprobs_n).all():
            raise EngineError("the model's logits are not finite: its weights are broken, or too large for their dtype")
        return Drawn(
            tokens_D=tokens_n.copy(),
            logprobs_D=logprobs_n.copy(),
            routed_TLx=None if routed_nLk is None else routed_nLk.copy(),
        )


class Graphs:
    """The recordings of one engine. ``works`` and ``drawn_S`` are shared with steps that are not recorded; ``whole``
    says whether this process computes all of a step, without which none is recorded.

    ``drawn_S`` has one seat more than there are, and ``spare_slot`` is one that no page of a request has: what rows
    without a request write goes there. ``warmed`` are steps that ran before, to outlive these recordings.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        cache: PagedCache,
        works: Works,
        drawn_S: Tensor,
        max_rows: int,
        longest: int,
        page_size: int,
        spare_slot: int,
        none_expert: Array | None,
        warmed: set[Key],
    ) -> None:
        self._warmed = warmed
        self._decoder, self.cache, self._works, self._drawn_S = decoder, cache, works, drawn_S
        self._page_size, self._spare_slot, self._records = page_size, spare_slot, none_expert is not None
        self._spare_seat = len(drawn_S) - 1
        self.whole = all(layer.reduce is None for layer in decoder.layers if isinstance(layer, Layer))
        self._rungs = ladder(max_rows)
        device = drawn_S.device
        self._sheet = _Sheet(max_rows, device)
        self._answers = _Answers(max_rows, none_expert, device)
        self._table_RM = torch.zeros(max_rows + 1, longest, dtype=torch.int32, device=device)
        self._spare_place = self._table_RM.numel() - 1
        self._shown_RM = np.zeros((max_rows, longest), np.int32)
        self._rows_R = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._graphs: dict[Key, Recording] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def any(self) -> bool:
        """Whether anything is recorded."""
        return bool(self._graphs)

    def holds(self, order: Order) -> bool:
        """Whether a step can be replayed: one token each, computed by this rank alone."""
        return order.plain and self.whole

    def launch(self, order: Order) -> Landing:
        """Start a step; nothing waits for the device."""
        count = len(order.seats_B)
        rows = self._rungs[bisect_left(self._rungs, count)]
        key = Key(rows, bool(order.shared_B.any()), bool(order.manner.filters_D.any()))
        recording = self._graphs.get(key)
        if recording is None:
            recording = self._record(key)
        self._send(order, rows, cut=recording.cut)
        recording.graph.replay()
        return self._answers.landing(count)

    def warm_up(self) -> Iterator[tuple[int, int]]:
        """Record every number of rows, the largest first; yields how many are done, and of how many."""
        keys = [Key(rows, trunks, False) for rows in reversed(self._rungs) for trunks in (False, True)]
        for done, key in enumerate(keys if self.whole else ()):
            if key not in self._graphs:
                self._record(key)
            yield done + 1, len(keys)

    def forget(self) -> None:
        """Weights are going to lie elsewhere: nothing recorded so far holds."""
        self._graphs.clear()
        # What a library keeps of the memory they had would keep it from being used again.
        self._pool = torch.cuda.graph_pool_handle()

    # -- what changes from step to step -------------------------------------------------------

    def _send(self, order: Order, rows: int, *, cut: bool) -> None:
        count, size, manner = len(order.seats_B), self._page_size, order.manner
        sheet = self._sheet.next()
        starts_B = order.starts_B
        last_B = order.pages_BM[np.arange(count), starts_B // size]
        values: dict[str, tuple[Array, float]] = {
            "tokens": (order.tokens_T, 0),
            "positions": (starts_B, 0),
            "slots": (last_B * size + starts_B % size, self._spare_slot),
            "seats": (order.seats_B, self._spare_seat),
            "top_k": (manner.top_k_D, -1),
            "temperature": (manner.temperature_D, 1),
            "uniform": (manner.uniform_D, 0),
            "top_p": (manner.top_p_D, 1),
            "min_p": (manner.min_p_D, 0),
        }
        for name, (given, spare) in values.items():
            sheet[name][:count] = given
            if count < rows:
                sheet[name][count:rows] = spare
        self._show(order.pages_BM, sheet)
        self._sheet.send()
        if cut:
            lengths_R = np.zeros(rows, np.int64)
            lengths_R[:count] = starts_B + 1
            fill = (0, rows - count)
            self._works.send(lengths_R, np.pad(order.group_B, fill, constant_values=-1), np.pad(order.shared_B, fill))

    def _show(self, pages_BM: Ints, sheet: dict[str, Array]) -> None:
        """Bring what is new in the rows' pages, in the sheet if it is little."""
        count, most = pages_BM.shape
        shown_BM = self._shown_RM[:count, :most]
        rows, columns = (shown_BM != pages_BM).nonzero()
        sheet["places"][:] = self._spare_place
        if not len(rows):
            return
        if len(rows) <= _NEWS:
            sheet["places"][: len(rows)] = rows * self._shown_RM.shape[1] + columns
            sheet["pages"][: len(rows)] = pages_BM[rows, columns]
        else:
            whole_BM = torch.from_numpy(pages_BM.astype(np.int32)).pin_memory()
            self._table_RM[:count, :most].copy_(whole_BM, non_blocking=True)
        shown_BM[rows, columns] = pages_BM[rows, columns]

    def _blank(self, rows: int) -> None:
        """A step of nobody."""
        sheet = self._sheet.next()
        for name in (*_INTS, *_FLOATS):
            sheet[name][:] = 0
        sheet["temperature"][:] = sheet["top_p"][:] = 1
        sheet["slots"][:] = self._spare_slot
        sheet["seats"][:] = self._spare_seat
        sheet["places"][:] = self._spare_place
        self._sheet.send()
        none = np.zeros(rows, np.int64)
        self._works.send(none, none - 1, none)

    # -- what a recording does ----------------------------------------------------------------

    @torch.inference_mode()
    def _record(self, key: Key) -> Recording:
        self._blank(key.rows)
        if key not in self._warmed:
            # A first run outside: what compilers and libraries make then, no recording could hold.
            self._forward(key)
            torch.cuda.synchronize()
            self._warmed.add(key)
        graph = torch.cuda.CUDAGraph()
        self._works.read = False
        with _undisturbed(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._forward(key)
        self._graphs[key] = recording = Recording(graph, self._works.read)
        return recording

    def _forward(self, key: Key) -> None:
        n = key.rows
        column = {name: each[:n] for name, each in self._sheet.columns.items() if name not in ("places", "pages")}
        begun = begin(
            *(column["tokens"], column["positions"], column["slots"], column["seats"]),
            drawn_S=self._drawn_S,
            places_N=self._sheet.columns["places"],
            pages_N=self._sheet.columns["pages"],
            table_RM=self._table_RM,
        )
        routing = Routing(record=True) if self._records else None
        step = Step(
            slots_T=begun.slots_n,
            pages_BM=self._table_RM,
            rows_B=self._rows_R[:n],
            singles=n,
            works=self._works,
            trunks=key.trunks,
            tiles=None,
            page_size=self._page_size,
        )
        attend = (ExactCardAttend if exact() else CardAttend)(self.cache, step)
        hidden_nD = self._decoder(begun.tokens_n, begun.positions_n, attend, routing)
        answers, drawing = self._answers, exact_draw if exact() else draw
        drawing(
            logits_of(hidden_nD, self._decoder.head(), self._decoder.spec.logit_softcap),
            column["temperature"],
            column["uniform"],
            top_k_B=column["top_k"],
            top_p_B=column["top_p"],
            min_p_B=column["min_p"],
            filters=key.filters,
            tokens_out_B=answers.tokens_R[:n],
            logprobs_out_B=answers.logprobs_R[:n],
        )
        self._drawn_S.index_copy_(0, begun.seats_n, answers.tokens_R[:n])
        if routing is not None and answers.routed_RLk is not None:
            answers.routed_RLk[:n] = torch.stack(routing.recorded, 1)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage is collected: recordings of an engine that is gone, freed in the middle of one, would spoil it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _parted(drawn: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Tokens, and their log-probs behind them."""
    return drawn[: 2 * rows].view(torch.int64), drawn[2 * rows :].view(torch.float32)


def _unsigned(routed_nLk: Array) -> Array:
    return routed_nLk if routed_nLk.dtype == np.uint8 else routed_nLk.view(np.uint16)

"""The running batch: request slots, KV cache pages, prefix sharing and forks of the requests that run.

Shapes: as in ``forward_batch``; C token locations of the KV cache, S request slots.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from miles.backends.native.engine.draft_tree import DraftBranch
from miles.backends.native.engine.forward_batch import Fork, ForwardBatch, compute_cache_locs, compute_positions
from miles.backends.native.engine.prefix_cache import PageAllocator
from miles.backends.native.engine.req import Req
from miles.backends.native.engine.req_slots import ReqSlots
from miles.backends.native.engine.request import Ints
from miles.core.types import EMPTY, Array


@dataclass(slots=True)
class Counters:
    """Totals since the engine was created. ``state_hits`` requests began with a cached recurrent state."""

    prefilled_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    state_hits: int = 0
    saved_states: int = 0


class TokenRecordStore:
    """A record of every token in the KV cache, in host memory, so that a prefix hit finds its records too: routed
    experts, or selections of indexers.

    ``unrecorded`` is the record of a token without one. ``inflight_copies`` (target -> source) are page copies of steps
    whose output has not arrived: the records they copy are still at the source.
    """

    def __init__(self, unrecorded: Array, pages: int, page_size: int) -> None:
        # Zero pages are mapped by the operating system on first write: unused locations take no memory.
        self._records_CLx = np.zeros((pages * page_size, *unrecorded.shape), unrecorded.dtype)
        self._known_C = np.zeros(pages * page_size, np.bool_)
        self._unrecorded = unrecorded
        self._page_size = page_size
        self.inflight_copies: dict[int, int] = {}
        self.empty_TLx = self._records_CLx[:0]

    def write(self, batch: ForwardBatch, records_TLx: Array | None) -> None:
        """Store the records of a step, after its page copies; None: its tokens have none."""
        sources, targets = batch.page_copies
        if len(targets):
            self._copy_pages(sources, targets)
        locs_T = compute_cache_locs(batch, compute_positions(batch), self._page_size)
        self._known_C[locs_T] = records_TLx is not None
        if records_TLx is not None:
            assert records_TLx.shape[1:] == self._unrecorded.shape, "records of another model"
            self._records_CLx[locs_T] = records_TLx

    def _copy_pages(self, sources: Ints, targets: Ints) -> None:
        pages = self._records_CLx.reshape(-1, self._page_size, *self._records_CLx.shape[1:])
        known = self._known_C.reshape(-1, self._page_size)
        known[targets] = known[sources]
        some = known[sources].any(1)
        pages[targets[some]] = pages[sources[some]]
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            if self.inflight_copies.get(target) == source:
                del self.inflight_copies[target]

    def read(self, pages: Sequence[int], first: int, end: int, due_copies: Mapping[int, int]) -> Array:
        """Return the records of tokens ``first`` to ``end`` of a sequence in these pages.

        Some pages may be copies still due: a request that ends with its first token never gets its own.
        """
        copies = self.inflight_copies | dict(due_copies)
        pages = [copies.get(page, page) for page in pages]
        positions: Ints = np.arange(first, end)
        size = self._page_size
        locs = np.array(pages, np.int64)[positions // size] * size + positions % size
        out = np.tile(self._unrecorded, (len(locs), *(1,) * self._unrecorded.ndim))
        known = self._known_C[locs]
        out[known] = self._records_CLx[locs[known]]
        return out


get_sort_key = attrgetter("sort_key")
"""What running and waiting requests are sorted by."""


def insert_sorted(reqs: list[Req], req: Req) -> None:
    """Insert a request into sorted ones; mostly it comes last."""
    if not reqs or reqs[-1].sort_key <= req.sort_key:
        reqs.append(req)
    else:
        insort(reqs, req, key=get_sort_key)


class RunningBatch:
    """Running requests: slot and page allocation, prefix sharing, n-sample forking.

    ``running`` requests have pages and are sorted; ``followers`` have only a slot. ``membership`` counts joins and
    leaves. With ``share_prefill``, requests with the same prompt have it computed by the first of them (the leader).
    ``records`` are what is kept of every token, by the names of ``core.token_fields``.
    """

    def __init__(
        self,
        pages: PageAllocator,
        slots: ReqSlots,
        *,
        share_prefill: bool,
        records: Mapping[str, TokenRecordStore] = EMPTY,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.pages = pages
        self.slots = slots
        self.records = records
        self.running: list[Req] = []
        self.needing_last_token: set[Req] = set()
        self.counters = Counters()
        self.membership = 0
        self._share_prefill = share_prefill
        self._clock = clock
        self._leaders: dict[bytes, Req] = {}
        self._slots_R: Ints | None = None

    @property
    def slots_R(self) -> Ints:
        """The slots of the running requests, in order."""
        if self._slots_R is None:
            self._slots_R = np.array([req.slot for req in self.running], np.int64)
        return self._slots_R

    def iter_reqs(self) -> Iterator[Req]:
        """Yield every request with a slot."""
        for req in self.running:
            yield req
            yield from req.followers

    def req_at(self, slot: int) -> Req:
        req = self.slots.reqs[slot]
        assert req is not None
        return req

    def reqs_at(self, slots_B: Ints) -> list[Req]:
        reqs = self.slots.reqs
        return [req for slot in slots_B.tolist() if (req := reqs[slot]) is not None]

    def find_slots_needing_page(self) -> Ints:
        slots, slots_R = self.slots, self.slots_R
        num_computed_R = slots.num_computed_S[slots_R]
        return slots_R[(num_computed_R == slots.capacity_S[slots_R]) & (num_computed_R < slots.target_S[slots_R])]

    # -- joining ----------------------------------------------------------------------------

    def follow_leader(self, req: Req) -> bool:
        """Give the request a slot behind one that prefills the same prompt; return False if there is none."""
        if not req.can_share_prefill:
            return False
        leader = self._leaders.get(req.prompt_key)
        if leader is None or leader.cache_epoch != self.pages.epoch:
            return False
        self.slots.allocate(req)
        leader.followers.append(req)
        return True

    def admit(self, req: Req) -> bool:
        """Give a request a slot and pages for all its tokens, if that leaves one page for each running request."""
        pages = self.pages
        # Positions to score must be computed, even if they are in the prefix cache.
        num_tokens = req.next_scored if req.next_scored < req.prompt_length else len(req.tokens)
        keys, state = req.prefix_keys(0, num_tokens), None
        if pages.states is None:
            match = pages.match_prefix(keys, req.prefix_root)
        else:
            match, state = pages.match_state(keys, req.prefix_root)
        pages.acquire(match.pages)
        new_pages = -(-len(req.tokens) // pages.size) - len(match.pages)
        if pages.available < new_pages + len(self.running):
            pages.release(match.pages)
            return False
        req.pages = match.pages + [pages.allocate() for _ in range(new_pages)]
        req.prefix_nodes = match.nodes
        req.cache_epoch = pages.epoch
        num_computed = len(match.pages) * pages.size
        if match.tail is not None:
            pages.copies[req.pages[len(match.pages)]] = match.tail
            num_computed = num_tokens - 1 if state is None else state.num_tokens
        self.slots.allocate(req)
        if state is not None:
            # A row that is still to be filled gets its state from a slot, and so does this request.
            self.slots.copies[req.slot] = self.slots.copies.get(state.row, state.row)
            self.counters.state_hits += 1
        self._start(req, num_computed)
        if req.can_share_prefill and self._share_prefill:
            self._leaders[req.prompt_key] = req
        return True

    def plan_forks(self, leaders: list[Req]) -> tuple[list[Fork], list[Req]]:
        """Return forks of the followers of these leaders, and the followers without a page, which lose their slot."""
        forks, rejected = list[Fork](), list[Req]()
        for leader in leaders:
            for follower in leader.followers:
                page = -1
                if leader.prompt_length % self.pages.size:
                    if self.pages.available <= len(self.running) + len(forks):
                        self.slots.release(follower)
                        rejected.append(follower)
                        continue
                    page = self.pages.allocate()
                forks.append(Fork(leader, follower, page))
            leader.followers = []
        return forks, rejected

    def finish_prefill(self, leader: Req) -> None:
        """Insert the last page of a computed prompt into the prefix cache."""
        pages, size = self.pages, self.pages.size
        if self._leaders.get(leader.prompt_key) is leader:
            del self._leaders[leader.prompt_key]
        full_pages = (leader.prompt_length - 1) // size
        if pages.share and leader.cache_epoch == pages.epoch:
            node = leader.prefix_nodes[full_pages - 1] if full_pages else leader.prefix_root
            keys = leader.prefix_keys(full_pages * size, leader.prompt_length)
            pages.insert(node, keys, leader.pages[full_pages])

    def apply_fork(self, fork: Fork) -> None:
        """Share the leader's prompt: full pages by reference, the last one by copy."""
        leader, follower, page = fork
        full_pages = leader.prompt_length // self.pages.size
        follower.pages = leader.pages[:full_pages]
        self.pages.acquire(follower.pages)
        if page >= 0:
            follower.pages.append(page)
            self.pages.copies[page] = leader.pages[full_pages]
        follower.prefix_nodes = leader.prefix_nodes[:full_pages]
        follower.cache_epoch = leader.cache_epoch
        self.slots.copies[follower.slot] = leader.slot
        self._start(follower, leader.prompt_length)
        # Its first token was sampled together with its leader's.
        self.slots.length_S[follower.slot] += 1
        self.slots.token_S[follower.slot] = -1

    def _start(self, req: Req, num_computed: int) -> None:
        if req.cached_tokens < 0:
            req.cached_tokens = num_computed
            req.start_time = self._clock()
        self.counters.cached_tokens += num_computed
        self.slots.start(req, num_computed, self.pages.size)
        insert_sorted(self.running, req)
        self._slots_R = None
        self.membership += 1
        if req.needs_last_token:
            self.needing_last_token.add(req)

    # -- running ----------------------------------------------------------------------------

    def add_page(self, req: Req) -> None:
        """Allocate one more page; at least one must be available."""
        self.slots.add_page(req, self.pages.allocate(), self.pages.size)

    def insert_prefix(self, req: Req, num_tokens: int) -> None:
        """Insert the full pages among the first ``num_tokens`` tokens into the prefix cache."""
        pages, nodes = self.pages, req.prefix_nodes
        size = pages.size
        if not pages.share or req.cache_epoch != pages.epoch:
            return
        for i in range(len(nodes), num_tokens // size):
            keys = req.prefix_keys(i * size, (i + 1) * size)
            nodes.append(pages.insert(nodes[-1] if nodes else req.prefix_root, keys, req.pages[i]))

    def align_chunk(self, req: Req, start: int, count: int) -> int:
        """Return how many of ``count`` tokens of a prompt are computed, so that a state can be saved behind them.

        A chunk ends at the end of a page, and the last one a token before the end of the prompt, unless it is short.
        """
        if self.pages.states is None or not self.pages.share or not req.can_share_prefill or count < self.pages.size:
            return count
        if start + count == req.prompt_length:
            return count - 1 if count > 1 else count
        return max((start + count) // self.pages.size * self.pages.size - start, 1)

    def can_save_state(self, req: Req, end: int) -> bool:
        """Return whether the recurrent state after ``end`` tokens of a prompt is one that others may use."""
        if self.pages.states is None or not req.can_share_prefill:
            return False
        return end < req.prompt_length and (end % self.pages.size == 0 or end == req.prompt_length - 1)

    def save_state(self, req: Req) -> None:
        """Keep the recurrent state of a request, and let requests that begin with its computed tokens find it.

        The state is copied before the next step: until then, nothing may change it but a copy that is due too.
        """
        pages, size = self.pages, self.pages.size
        states = pages.states
        num_tokens = int(self.slots.num_computed_S[req.slot])
        if states is None or not states.count or not pages.share or req.cache_epoch != pages.epoch:
            return
        if not 0 < num_tokens <= len(req.tokens):
            return
        self.insert_prefix(req, num_tokens)
        full = num_tokens // size
        parent = req.prefix_nodes[full - 1] if full else req.prefix_root
        keys = req.prefix_keys(full * size, num_tokens)
        if keys and req.pages[full] in pages.copies:  # the page of these tokens is itself still to be copied
            return
        node = pages.insert(parent, keys, req.pages[full]) if keys else parent
        row = states.save(node)
        if row is None:
            return
        if keys:
            states.add_partial(parent, keys, node, pages.find_page(parent, keys))
        self.slots.copies[row] = self.slots.copies.get(req.slot, req.slot)
        self.counters.saved_states += 1

    # -- branches of drafts -------------------------------------------------------------------

    def add_branch(self, req: Req, branch: DraftBranch) -> bool:
        """Give a branch of a request's drafts pages of its own, as far as no running request needs them.

        The first of them becomes a copy of the request's page there, in the step being scheduled. Return False if
        there are too few pages, or if the page to copy is itself a copy of this step.
        """
        size, pages = self.pages.size, self.pages
        first = (len(req.tokens) + branch.fork) // size
        source = req.pages[first] if first < len(req.pages) else None
        count = (len(req.tokens) + branch.fork + len(branch.tokens) - 1) // size - first + 1
        if source in pages.copies or pages.available < count + len(self.running):
            return False
        own = [pages.allocate() for _ in range(count)]
        if source is not None:
            pages.copies[own[0]] = source
        req.branch_pages.append((first, own))
        return True

    def end_branches(self, req: Req, accepted: int = 0) -> None:
        """Free the pages of a request's branches; those of the ``accepted`` one, if any, become the request's."""
        branches, req.branch_pages = req.branch_pages, []
        if accepted:
            first, own = branches[accepted - 1]
            branches[accepted - 1] = (first, req.pages[first:])
            self.slots.replace_pages(req, first, own, self.pages.size)
        for _, pages in branches:
            self.pages.release(pages)

    # -- leaving ----------------------------------------------------------------------------

    def release(self, req: Req) -> list[Req]:
        """Free the pages and slot of a request; return its followers, which must be queued again."""
        del self.running[bisect_left(self.running, req.sort_key, key=get_sort_key)]
        self._slots_R = None
        self.membership += 1
        self.needing_last_token.discard(req)
        self._save_records(req)
        if not req.has_no_output:
            self.save_state(req)
        self.end_branches(req)
        self.pages.release(req.pages)
        self.slots.release(req)
        req.pages, req.prefix_nodes = [], []
        if self._leaders.get(req.prompt_key) is req:
            del self._leaders[req.prompt_key]
        followers, req.followers = req.followers, []
        for follower in followers:
            self.slots.release(follower)
        return followers

    def remove_follower(self, follower: Req) -> None:
        leader = next(req for req in self.running if follower in req.followers)
        leader.followers.remove(follower)
        self.slots.release(follower)

    def _save_records(self, req: Req) -> None:
        """Keep the records of each token from when it was first computed: the next token was sampled from that."""
        if req.has_no_output and not req.finish_kind:
            return
        for name, store in self.records.items():
            saved_TLx = req.records.get(name, store.empty_TLx)
            known = min(int(self.slots.num_computed_S[req.slot]), len(req.tokens) - 1)
            end = max(known, len(saved_TLx))
            new_TLx = store.read(req.pages, len(saved_TLx), end, self.pages.copies)
            req.records[name] = np.concatenate((saved_TLx, new_TLx))

    def check(self) -> None:
        """Assert that slots, pages and requests agree."""
        slots, running = self.slots, self.running
        reqs = list(self.iter_reqs())
        branches = [page for req in running for _, pages in req.branch_pages for page in pages]
        self.pages.check([*(page for req in running for page in req.pages), *branches])
        assert slots.free + len(reqs) == slots.count
        assert all(slots.reqs[req.slot] is req for req in reqs)
        assert sum(req is not None for req in slots.reqs) == len(reqs)
        assert int(slots.stop_counts_V.sum()) == sum(len(req.stop_token_ids) for req in reqs)
        assert [req.sort_key for req in running] == sorted(req.sort_key for req in running)
        for req in running:
            assert slots.capacity_S[req.slot] == len(req.pages) * self.pages.size >= slots.num_computed_S[req.slot]
            assert slots.block_table_SP[req.slot, : len(req.pages)].tolist() == req.pages
            assert len(req.tokens) <= slots.length_S[req.slot] <= req.max_length
        assert set(self._leaders.values()) <= set(running)
        if slots.lora is not None:
            slots.lora.check([req.lora for req in reqs if req.lora is not None])
        assert self.needing_last_token == {req for req in running if req.needs_last_token}

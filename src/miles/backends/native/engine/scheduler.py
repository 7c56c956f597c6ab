"""Continuous-batching scheduler: running requests first, then waiting ones in order, as pages and slots allow.

A request computes its tokens that have no keys and values yet; when none is left, one is sampled. So prefill, decode
and recompute after preemption are the same operation with different token counts.

Overlap scheduling: a step is scheduled, launched and marked launched before its output is known, and processed when
the output arrives. In between, all state counts the step as done, since the device runs steps in order.

Shapes: as in ``forward_batch``; C token locations of the KV cache, S request slots.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from miles.backends.native.engine.forward_batch import (
    BatchRows,
    Fork,
    ForwardBatch,
    PrefillChunk,
    ScheduledStep,
    ScoredSpan,
    StaticSamplingInfo,
    StepOutput,
    build_batch_rows,
    build_decode_rows,
    build_logit_edits,
    build_logprob_queries,
    build_prompt_scoring,
    compute_cache_locs,
    compute_positions,
    copies_as_arrays,
    find_failed_reqs,
    find_scored_spans,
    gather_image_rows,
    gather_sampling_info,
    gather_tokens,
    store_logprob_results,
    store_prompt_logprobs,
)
from miles.backends.native.engine.prefix_cache import ROOT, PageAllocator
from miles.backends.native.engine.req import DecodeFn, Req
from miles.backends.native.engine.req_slots import ReqSlots
from miles.backends.native.engine.request import Ints
from miles.core.errors import EngineError
from miles.core.types import Array, Version

NON_FINITE_MODEL = "the model's logits are not finite: its weights are broken, or too large for their dtype"
NON_FINITE_EDITS = "the request's penalties, biases and masks leave no logits that are finite numbers"

# With fewer running requests few other prompts would arrive during the delay, and the delayed one is much of the work.
MIN_RUNNING_FOR_DELAY = 32


@dataclass(slots=True)
class Counters:
    """Totals since the engine was created."""

    prefilled_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


class PrefillDelay:
    """Delays prefills by at most ``max_steps`` (0: never), and only next to ``min_running`` or more requests.

    A step with prefills does not run as a CUDA graph, and launching it may take the host several times as long as a
    graph replay takes the device. With many running requests that come and go, nearly every step would contain a
    prefill; so prompts wait for a few decode steps and are prefilled several at once.
    """

    def __init__(self, max_steps: int, min_running: int = MIN_RUNNING_FOR_DELAY) -> None:
        self._max_steps = max_steps
        self._min_running = min_running
        self._delayed = 0

    def should_admit(self, waiting: Sequence[Req], num_running: int, chunk: int, *, graph: bool) -> bool:
        """Return whether the ``waiting`` requests that have slots join now.

        ``chunk`` is the prompt tokens of a step; ``graph`` says whether the step runs as a CUDA graph without them.
        """
        worthwhile = graph and self._min_running <= num_running and len(waiting) < num_running
        delay = worthwhile and self._delayed < self._max_steps and 2 * sum(len(req.tokens) for req in waiting) < chunk
        self._delayed = self._delayed + 1 if delay and waiting else 0
        return not delay


class RoutedExpertsStore:
    """Routed experts of every token in the KV cache, in host memory; a prefix hit finds its experts too.

    ``inflight_copies`` (target -> source) are page copies of steps whose output has not arrived: the experts they copy
    are still at the source.
    """

    def __init__(self, no_expert: Array, pages: int, page_size: int) -> None:
        # Zero pages are mapped by the operating system on first write: unused locations take no memory.
        self._experts_CLx = np.zeros((pages * page_size, *no_expert.shape), no_expert.dtype)
        self._page_size = page_size
        self.inflight_copies: dict[int, int] = {}
        self.empty_TLx = self._experts_CLx[:0]

    def write(self, batch: ForwardBatch, experts_TLx: Array) -> None:
        """Store the experts of a step, after its page copies."""
        sources, targets = batch.page_copies
        if len(targets):
            pages = self._experts_CLx.reshape(-1, self._page_size, *self._experts_CLx.shape[1:])
            pages[targets] = pages[sources]
            for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                if self.inflight_copies.get(target) == source:
                    del self.inflight_copies[target]
        self._experts_CLx[compute_cache_locs(batch, compute_positions(batch), self._page_size)] = experts_TLx

    def read(self, pages: Sequence[int], first: int, end: int, due_copies: Mapping[int, int]) -> Array:
        """Return the experts of tokens ``first`` to ``end`` of a sequence in these pages.

        Some pages may be copies still due: a request that ends with its first token never gets its own.
        """
        copies = self.inflight_copies | dict(due_copies)
        pages = [copies.get(page, page) for page in pages]
        positions: Ints = np.arange(first, end)
        size = self._page_size
        return self._experts_CLx[np.array(pages, np.int64)[positions // size] * size + positions % size]


def _sort_key(req: Req) -> tuple[int, int]:
    return req.sort_key


class RunningBatch:
    """Running requests: slot and page allocation, prefix sharing, n-sample forking.

    ``running`` requests have pages and are sorted; ``followers`` have only a slot. ``membership`` counts joins and
    leaves. With ``share_prefill``, requests with the same prompt have it computed by the first of them (the leader).
    """

    def __init__(
        self,
        pages: PageAllocator,
        slots: ReqSlots,
        *,
        share_prefill: bool,
        routed_experts: RoutedExpertsStore | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.pages = pages
        self.slots = slots
        self.routed_experts = routed_experts
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
        match = pages.match_prefix(req.prefix_keys(0, num_tokens))
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
            num_computed = num_tokens - 1
        self.slots.allocate(req)
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
            node = leader.prefix_nodes[full_pages - 1] if full_pages else ROOT
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
        insort(self.running, req, key=_sort_key)
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
            nodes.append(pages.insert(nodes[-1] if nodes else ROOT, keys, req.pages[i]))

    # -- leaving ----------------------------------------------------------------------------

    def release(self, req: Req) -> list[Req]:
        """Free the pages and slot of a request; return its followers, which must be queued again."""
        del self.running[bisect_left(self.running, req.sort_key, key=_sort_key)]
        self._slots_R = None
        self.membership += 1
        self.needing_last_token.discard(req)
        self._save_routed_experts(req)
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

    def _save_routed_experts(self, req: Req) -> None:
        """Keep the experts of each token from when it was first computed: the next token was sampled from that."""
        if self.routed_experts is None or (req.has_no_output and not req.finish_kind):
            return
        saved_TLx = self.routed_experts.empty_TLx if req.routed_experts_TLx is None else req.routed_experts_TLx
        known = min(int(self.slots.num_computed_S[req.slot]), len(req.tokens) - 1)
        end = max(known, len(saved_TLx))
        new_TLx = self.routed_experts.read(req.pages, len(saved_TLx), end, self.pages.copies)
        req.routed_experts_TLx = np.concatenate((saved_TLx, new_TLx))

    def check(self) -> None:
        """Assert that slots, pages and requests agree."""
        slots, running = self.slots, self.running
        reqs = list(self.iter_reqs())
        self.pages.check([page for req in running for page in req.pages])
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
        assert self.needing_last_token == {req for req in running if req.needs_last_token}


class Scheduler:
    """The waiting queue and the running batch. ``waiting`` is always sorted.

    ``must_clear_cache``: the KV cache may hold numbers that are not finite, which spoil whoever gets their pages next.
    """

    def __init__(
        self, running_batch: RunningBatch, *, prefill_chunk: int, decode: DecodeFn | None, prefill_delay: int = 0
    ) -> None:
        self.running_batch = running_batch
        self.waiting: list[Req] = []
        self.must_clear_cache = False
        self.prefill_delay = PrefillDelay(prefill_delay)
        self._prefill_chunk = prefill_chunk
        self._decode = decode
        self._decode_rows = build_decode_rows(
            np.zeros(0, np.int64), running_batch.membership, running_batch.reqs_at, running_batch.slots
        )

    @property
    def counters(self) -> Counters:
        return self.running_batch.counters

    @property
    def running(self) -> list[Req]:
        """Requests with pages, in order."""
        return self.running_batch.running

    def submit(self, req: Req) -> None:
        insort(self.waiting, req, key=_sort_key)

    def iter_reqs(self) -> Iterator[Req]:
        """Yield all requests that have not ended."""
        yield from self.running_batch.iter_reqs()
        yield from self.waiting

    # -- a step: schedule it, mark it launched, process its output ----------------------------

    def must_wait_for_inflight(self) -> bool:
        """Return whether in-flight steps must be processed before the next one can be scheduled."""
        running, length_S = self.running_batch, self.running_batch.slots.length_S
        if any(length_S[req.slot] > len(req.tokens) for req in running.needing_last_token):
            return True
        needed = len(running.find_slots_needing_page())
        return needed > 0 and needed > running.pages.available

    def schedule_step(self) -> ScheduledStep | None:
        """Return the next step; None when there is nothing to do before in-flight output is processed.

        At least one running request makes progress, so every request ends. While steps are in flight, call
        ``must_wait_for_inflight`` first: requests may be preempted here only when none is.
        """
        running, slots = self.running_batch, self.running_batch.slots
        for slot in running.find_slots_needing_page().tolist():
            req = slots.reqs[slot]
            if req is not None:  # else it was just preempted for another
                self._add_page(req)
        slots_R = running.slots_R
        todo_R = np.minimum(slots.length_S[slots_R], slots.target_S[slots_R]) - slots.num_computed_S[slots_R]
        decodes_B = slots_R[todo_R == 1]
        self.counters.prefilled_tokens += int((slots.length_S[decodes_B] == slots.prompt_S[decodes_B]).sum())
        chunks, budget = list[PrefillChunk](), self._prefill_chunk
        for slot, todo in zip(slots_R[todo_R > 1].tolist(), todo_R[todo_R > 1].tolist(), strict=True):
            if budget > 0:
                chunks.append(self._start_chunk(running.req_at(slot), min(todo, budget)))
                budget -= chunks[-1].length
        if self.waiting and self.prefill_delay.should_admit(
            self.waiting[: slots.free],
            len(decodes_B),
            self._prefill_chunk,
            graph=not chunks and self._decode_rows.can_use_graph,
        ):
            decodes_B = np.concatenate((decodes_B, self._admit_waiting(chunks, budget)))
        if not len(decodes_B) and not chunks:
            return None
        cached = self._decode_rows
        if cached.membership != running.membership or not np.array_equal(cached.slots_B, decodes_B):
            self._decode_rows = build_decode_rows(decodes_B, running.membership, running.reqs_at, slots)
        # Chunks of similar length share attention tiles.
        chunks.sort(key=lambda chunk: (chunk.length, chunk.start))
        return self._build_step(build_batch_rows(self._decode_rows, chunks, slots), chunks)

    def mark_launched(self, step: ScheduledStep) -> None:
        """Update all state of a launched step that does not depend on the sampled tokens."""
        running, batch = self.running_batch, step.batch
        slots = running.slots
        own_slots_D = batch.req_slots_D[: len(step.sampled_reqs) - len(step.forks)]
        slots.num_computed_S[batch.req_slots_B] += batch.counts_B
        slots.length_S[own_slots_D] += 1
        slots.token_S[own_slots_D] = -1
        for leader in step.prefilled:
            running.finish_prefill(leader)
        for fork in step.forks:
            running.apply_fork(fork)
        for span in step.scored:
            span.req.next_scored = span.first + span.length
        running.pages.unwritten.clear()
        self.counters.steps += 1

    def process_output(self, step: ScheduledStep, output: StepOutput, version: Version) -> list[Req]:
        """Process the output of a step launched under ``version``; return the requests that ended.

        Requests that ended after the step was scheduled ignore it. One whose log-probs are not finite fails alone.
        """
        running = self.running_batch
        failed = self._fail_reqs(step, output)
        if running.routed_experts is not None and output.routed_experts_TLx is not None:
            running.routed_experts.write(step.batch, output.routed_experts_TLx)
        if step.scored:
            store_prompt_logprobs(step.scored, output, version)
        if output.logprob_results is not None:
            store_logprob_results(step.sampled_reqs, output.logprob_results)
        count = 0
        tokens, logprobs = output.tokens_D.tolist(), output.logprobs_D.tolist()
        for req, token, logprob in zip(step.sampled_reqs, tokens, logprobs, strict=True):
            if req.finish_kind:
                continue
            if req.version is not version:
                req.record_version(version)
            req.tokens.append(token)
            req.logprobs.append(logprob)
            count += 1
        self.counters.generated_tokens += count
        ended = failed + self._find_ended(step, output.tokens_D, version)
        for req, num_tokens in step.filled_pages:
            if req.pages:
                running.insert_prefix(req, num_tokens)
        running.pages.unwritten.clear()
        for req in ended:
            self._release(req)
        return ended

    # -- leaving early ----------------------------------------------------------------------

    def remove(self, req: Req, message: str = "") -> None:
        """Abort a request; its in-flight output is ignored."""
        req.finish_kind, req.finish_message = "abort", message
        if req.slot < 0:
            self.waiting.remove(req)
        elif req.pages:
            self._release(req)
        else:
            self.running_batch.remove_follower(req)

    def preempt(self, req: Req) -> None:
        """Release a request's pages and queue it again; its tokens are recomputed. Nothing may be in flight."""
        self._release(req)
        req.preemptions += 1
        self.submit(req)
        self.counters.preemptions += 1

    def preempt_all(self) -> None:
        """Queue every running request again and forget all prefixes. Nothing may be in flight."""
        for req in list(self.running):
            self.preempt(req)
        self.running_batch.pages.flush()

    def restart_prompts(self) -> None:
        """Recompute prompts without sampled tokens from the start. Nothing may be in flight."""
        num_computed_S = self.running_batch.slots.num_computed_S
        for req in [req for req in self.iter_reqs() if req.has_no_output]:
            req.reset_prompt_logprobs()
            if req.pages and num_computed_S[req.slot]:
                self.preempt(req)

    def check(self) -> None:
        """Assert that queue, slots and pages agree."""
        self.running_batch.check()
        assert [req.sort_key for req in self.waiting] == sorted(req.sort_key for req in self.waiting)
        assert all(not req.pages and req.slot < 0 and not req.finish_kind for req in self.waiting)

    # -- internals ----------------------------------------------------------------------------

    def _add_page(self, req: Req) -> None:
        """Allocate one more page, preempting the last running requests if needed, possibly this one."""
        while not self.running_batch.pages.available:
            victim = self.running_batch.running[-1]
            self.preempt(victim)
            if victim is req:
                return
        self.running_batch.add_page(req)

    def _start_chunk(self, req: Req, count: int) -> PrefillChunk:
        """Compute ``count`` tokens of a prompt (or of a recompute) in this step, if that cuts no bidirectional span."""
        start = int(self.running_batch.slots.num_computed_S[req.slot])
        if req.images is not None:
            count = req.images.limit_chunk(start, start + count) - start
        # Keys are written before attention reads them, so requests of this very step may share these pages.
        self.running_batch.insert_prefix(req, start + count)
        self.counters.prefilled_tokens += count
        return PrefillChunk(req, start, count)

    def _admit_waiting(self, chunks: list[PrefillChunk], budget: int) -> Ints:
        """Admit waiting requests into ``chunks``; return the slots of those with one token left to compute."""
        running = self.running_batch
        decodes, admitted = list[int](), 0
        for req in self.waiting:
            if not running.slots.free:
                break
            if not running.follow_leader(req):
                if budget <= 0 or not running.admit(req):
                    break
                todo = len(req.tokens) - int(running.slots.num_computed_S[req.slot])
                chunk = self._start_chunk(req, min(todo, budget))
                budget -= chunk.length
                if todo == 1:
                    decodes.append(req.slot)
                else:
                    chunks.append(chunk)
            admitted += 1
        del self.waiting[:admitted]
        return np.array(decodes, np.int64)

    def _build_step(self, rows: BatchRows, chunks: list[PrefillChunk]) -> ScheduledStep:
        running, reqs = self.running_batch, rows.reqs
        slots = running.slots
        length_B, ends_B = slots.length_S[rows.req_slots_B], rows.starts_B + rows.counts_B
        ready_B = ends_B == length_B
        samples_B = ready_B & (length_B < slots.max_length_S[rows.req_slots_B])
        sampled, rows_D = reqs, rows.last_rows_B
        info, length_D = self._decode_rows.sampling_info, length_B
        if chunks or not samples_B.all():
            picked = samples_B.nonzero()[0]
            sampled, rows_D = [reqs[i] for i in picked.tolist()], rows_D[picked]
            info, length_D = gather_sampling_info(rows.req_slots_B[picked], slots), length_B[picked]
        prefilled_D = (length_D == info.prompt_D).nonzero()[0].tolist()
        forks, rejected = running.plan_forks([sampled[i] for i in prefilled_D])
        if forks:
            row_by_leader = {sampled[i]: int(rows_D[i]) for i in prefilled_D}
            rows_D = np.concatenate((rows_D, [row_by_leader[fork.leader] for fork in forks]))
            info = gather_sampling_info(np.concatenate((info.req_slots_D, [f.follower.slot for f in forks])), slots)
            length_D = slots.length_S[info.req_slots_D]
        for follower in rejected:
            self.submit(follower)
        full_page_B = ends_B[: len(ends_B) - len(chunks)] % running.pages.size == 0
        filled = full_page_B.nonzero()[0].tolist() if running.pages.share else ()
        scored = find_scored_spans(rows, chunks)
        all_sampled = [*sampled, *(fork.follower for fork in forks)]
        return ScheduledStep(
            batch=self._build_forward_batch(rows, chunks, all_sampled, rows_D, info, length_D, scored),
            sampled_reqs=all_sampled,
            forks=forks,
            prefilled=[sampled[i] for i in prefilled_D],
            filled_pages=[(reqs[i], int(ends_B[i])) for i in filled],
            scored=scored,
            done_reqs=[reqs[i] for i in (ready_B & ~samples_B).nonzero()[0].tolist()],
            last_token_rows_D=(length_D + 1 == info.max_length_D).nonzero()[0],
            needs_check_D=info.needs_check_D,
        )

    def _build_forward_batch(
        self,
        rows: BatchRows,
        chunks: list[PrefillChunk],
        sampled_reqs: list[Req],
        rows_D: Ints,
        info: StaticSamplingInfo,
        length_D: Ints,
        scored: list[ScoredSpan],
    ) -> ForwardBatch:
        running = self.running_batch
        pages, slots = running.pages, running.slots
        max_pages = -(-int((rows.starts_B + rows.counts_B).max()) // pages.size)
        edits = build_logit_edits(sampled_reqs, slots) if info.has_edits else None
        queries = build_logprob_queries(list(enumerate(sampled_reqs))) if info.has_queries else None
        images = gather_image_rows(rows, slots)
        one_sample_per_row = not chunks and len(rows_D) == len(rows.req_slots_B)
        plain = edits is None and queries is None and images.vision is None and images.rope_positions_3T is None
        page_copies = pages.take_copies() if pages.copies else {}
        if running.routed_experts is not None:
            running.routed_experts.inflight_copies |= page_copies
        return ForwardBatch(
            tokens_T=gather_tokens(rows, chunks, slots),
            starts_B=rows.starts_B,
            counts_B=rows.counts_B,
            req_slots_B=rows.req_slots_B,
            num_decodes=rows.num_decodes,
            block_table_BM=slots.block_table_SP[:, :max_pages][rows.req_slots_B],
            shared_B=rows.shared_B,
            group_B=rows.group_B,
            rows_D=rows_D,
            req_slots_D=info.req_slots_D,
            sampling=info.build_sampling_batch(length_D),
            page_copies=copies_as_arrays(page_copies),
            state_copies=copies_as_arrays(slots.take_copies() if slots.copies else {}),
            logit_edits=edits,
            logprob_queries=queries,
            prompt_scoring=build_prompt_scoring(scored),
            vision=images.vision,
            rope_offsets_B=images.rope_offsets_B,
            rope_positions_3T=images.rope_positions_3T,
            visible_ends_T=images.visible_ends_T,
            decode_only=one_sample_per_row and plain,
        )

    def _fail_reqs(self, step: ScheduledStep, output: StepOutput) -> list[Req]:
        """Fail the requests whose log-probs are not finite, and return them."""
        found, model_failed = find_failed_reqs(step, output)
        failed = [req for req in found if not req.finish_kind]
        for req in failed:
            req.finish_kind, req.error = "abort", EngineError(NON_FINITE_MODEL if model_failed else NON_FINITE_EDITS)
        self.must_clear_cache |= model_failed
        return failed

    def _find_ended(self, step: ScheduledStep, tokens_D: Ints, version: Version) -> list[Req]:
        """Return the requests whose last token was sampled, checking only rows that may have ended."""
        maybe_D = self.running_batch.slots.stop_counts_V[tokens_D] > 0
        maybe_D[step.last_token_rows_D] = True
        if step.needs_check_D is not None:
            maybe_D |= step.needs_check_D
        candidates = (step.sampled_reqs[row] for row in maybe_D.nonzero()[0].tolist())
        ended = [req for req in candidates if not req.finish_kind and req.check_finished(self._decode)]
        for req in step.done_reqs:
            if not req.finish_kind:
                req.finish_kind, req.prompt_version = "length", version
                ended.append(req)
        return ended

    def _release(self, req: Req) -> None:
        for follower in self.running_batch.release(req):
            self.submit(follower)

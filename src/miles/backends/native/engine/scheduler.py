"""Continuous-batching scheduler: running requests first, then waiting ones in order, as pages and slots allow.

A request computes its tokens that have no keys and values yet; when none is left, one is sampled. So prefill, decode
and recompute after preemption are the same operation with different token counts.

Overlap scheduling: a step is scheduled, launched and marked launched before its output is known, and processed when
the output arrives. In between, all state counts the step as done, since the device runs steps in order.

Shapes: as in ``forward_batch``; C token locations of the KV cache, S request slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from miles.backends.native.engine.draft_tree import (
    NO_DRAFTS,
    DraftRows,
    DraftStates,
    DraftTree,
    build_draft_states,
    find_accepted_drafts,
)
from miles.backends.native.engine.forward_batch import (
    BatchRows,
    DecodeRows,
    ForwardBatch,
    PrefillChunk,
    ScheduledStep,
    ScoredSpan,
    StaticSamplingInfo,
    StepOutput,
    build_batch_rows,
    build_block_table,
    build_decode_rows,
    build_draft_rows,
    build_logprob_queries,
    build_prompt_scoring,
    copies_as_arrays,
    find_failed_reqs,
    find_scored_spans,
    gather_image_rows,
    gather_sampling_info,
    gather_tokens,
    store_logprob_results,
    store_prompt_logprobs,
)
from miles.backends.native.engine.logit_edits import build_logit_edits, cut_to_grammar
from miles.backends.native.engine.lora import ServedAdapter
from miles.backends.native.engine.req import DecodeFn, Req
from miles.backends.native.engine.request import Bools, Ints
from miles.backends.native.engine.running_batch import Counters, RunningBatch, insert_sorted
from miles.backends.native.engine.speculation import Speculation
from miles.core.errors import EngineError
from miles.core.types import Version

NON_FINITE_MODEL = "the model's logits are not finite: its weights are broken, or too large for their dtype"
NON_FINITE_EDITS = "the request's penalties, biases and masks leave no logits that are finite numbers"

# With fewer running requests few other prompts would arrive during the delay, and the delayed one is much of the work.
MIN_RUNNING_FOR_DELAY = 32

# Requests that may overtake one whose adapter has no free slot, before all wait for a slot; and such requests at once.
MAX_OVERTAKEN = 256


class PrefillDelay:
    """Delays prefills by at most ``max_steps`` (0: never), and only next to ``min_running`` or more requests.

    Where a step with prefills does not run as a CUDA graph, launching it may take the host several times as long as a
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


class Scheduler:
    """The waiting queue and the running batch. ``waiting`` is always sorted.

    ``must_clear_cache``: the KV cache may hold numbers that are not finite, which spoil whoever gets their pages next.
    A model with recurrent layers has room for the states after ``num_draft_states`` drafted tokens; others need none.
    Chunks that do not finish a long prompt end at multiples of ``chunk_unit`` tokens, which attention may need.
    """

    def __init__(
        self,
        running_batch: RunningBatch,
        *,
        prefill_chunk: int,
        decode: DecodeFn | None,
        chunk_unit: int = 1,
        prefill_delay: int = 0,
        speculation: Speculation | None = None,
        num_draft_states: int | None = None,
    ) -> None:
        self.running_batch = running_batch
        self.waiting: list[Req] = []
        self.must_clear_cache = False
        self.prefill_delay = PrefillDelay(prefill_delay)
        self._prefill_chunk = prefill_chunk
        self._chunk_unit = chunk_unit
        self._decode = decode
        self._speculation = speculation
        self._num_draft_states = num_draft_states
        self._num_unverified = 0
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
        insert_sorted(self.waiting, req)

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
        # Drafts follow known tokens, and how many were accepted is known only after verification.
        if self._num_unverified:
            return True
        if self._speculation is not None and self._speculation.choose_length(len(running.running)):
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
                chunks.append(self._start_chunk(running.req_at(slot), todo, budget))
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
        # Chunks of similar length share attention tiles.
        chunks.sort(key=lambda chunk: (chunk.length, chunk.start))
        drafts = {} if self._speculation is None else self._propose_drafts(decodes_B, self._speculation)
        if drafts:
            rows = build_draft_rows(decodes_B, drafts, running.reqs_at, slots, running.pages.size)
            return self._build_step(rows, chunks)
        cached = self._decode_rows
        if cached.membership != running.membership or not np.array_equal(cached.slots_B, decodes_B):
            self._decode_rows = build_decode_rows(decodes_B, running.membership, running.reqs_at, slots)
        return self._build_step(self._decode_rows, chunks)

    def prepare_drafts(self, step: ScheduledStep) -> None:
        """Compute what drafts behind the tokens of a step need, before it is launched."""
        if self._speculation is not None:
            self._speculation.prepare(step.batch, drafted=step.drafts_D is not None)

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
        for req in step.saved_states:
            running.save_state(req)
        for fork in step.forks:
            running.apply_fork(fork)
        if self._speculation is not None:
            for req in (*step.prefilled, *(fork.follower for fork in step.forks)):
                self._speculation.observe(req)
        for span in step.scored:
            span.req.next_scored = span.first + span.length
        running.pages.unwritten.clear()
        self.counters.steps += 1
        self._num_unverified += step.drafts_D is not None

    def process_output(self, step: ScheduledStep, output: StepOutput, version: Version) -> list[Req]:
        """Process the output of a step launched under ``version``; return the requests that ended.

        Requests that ended after the step was scheduled ignore it. One whose log-probs are not finite fails alone.
        """
        running = self.running_batch
        failed = self._fail_reqs(step, output)
        for name, store in running.records.items():
            store.write(step.batch, output.get_records(name))
        if step.scored:
            store_prompt_logprobs(step.scored, output, version)
        if step.drafts_D is None:
            self._append_tokens(step, output, version)
            if self._speculation is not None:
                self._speculation.measure(step.sampled_reqs)
            ended = failed + self._find_ended(step, output.tokens_D)
        else:
            ended = failed + self._verify_drafts(step, step.drafts_D, output, version)
        ended += self._end_done_reqs(step, version)
        num_computed_S = running.slots.num_computed_S
        for req, num_tokens in step.filled_pages:
            if req.pages and num_tokens <= num_computed_S[req.slot]:
                running.insert_prefix(req, num_tokens)
        running.pages.unwritten.clear()
        for req in ended:
            self._release(req)
        return ended

    def _append_tokens(self, step: ScheduledStep, output: StepOutput, version: Version) -> None:
        """Append the sampled token of each row to its request."""
        if output.logprob_results is not None:
            store_logprob_results(step.sampled_reqs, output.logprob_results)
        count = 0
        tokens, logprobs = output.tokens_D.tolist(), output.logprobs_D.tolist()
        for req, token, logprob in zip(step.sampled_reqs, tokens, logprobs, strict=True):
            if req.finish_kind:
                continue
            own = version if req.lora is None else req.policy_version or version
            if req.version is not own:
                req.record_version(own)
            req.tokens.append(token)
            req.logprobs.append(logprob)
            count += 1
        self.counters.generated_tokens += count

    def _verify_drafts(
        self, step: ScheduledStep, drafts_D: DraftRows, output: StepOutput, version: Version
    ) -> list[Req]:
        """Append to each request the tokens of its accepted rows; return the requests that ended."""
        self._num_unverified -= 1
        accepted_D = find_accepted_drafts(drafts_D, output.tokens_D)
        if output.logprob_results is not None:
            store_logprob_results(step.sampled_reqs, output.logprob_results, accepted_D)
        before = {req: len(req.tokens) for req in step.sampled_reqs}
        branches: dict[Req, int] = {}
        # Requests whose last token was drafted, and the branch that has it. Nothing behind it is verified.
        drafted_ends: dict[Req, int] = {}
        ended: list[Req] = []
        if step.state_rows_D is not None:
            self._keep_accepted_states(step, step.state_rows_D, accepted_D)
        rows = zip(step.sampled_reqs, drafts_D.branches.tolist(), accepted_D.tolist(), strict=True)
        samples = zip(output.tokens_D.tolist(), output.logprobs_D.tolist(), strict=True)
        for (req, branch, accepted), (token, logprob) in zip(rows, samples, strict=True):
            if req.finish_kind or not accepted:
                if accepted:
                    drafted_ends.setdefault(req, branch)
                continue
            branches[req] = branch
            own = req.policy_version or version
            if req.version is not own:
                req.record_version(own)
            req.tokens.append(token)
            req.logprobs.append(logprob)
            if req.check_finished(self._decode):
                ended.append(req)
        for req, length in before.items():
            appended = len(req.tokens) - length
            self.counters.generated_tokens += appended
            if req.slot >= 0 and req.draft.tokens:
                self._end_verification(req, appended, branches.get(req, 0), drafted_ends.get(req))
        return ended

    def _end_verification(self, req: Req, appended: int, branch: int, drafted_end: int | None) -> None:
        """Count the ``appended`` tokens of a request, the last by a row of ``branch``, and drop its drafts.

        ``drafted_end`` is the branch that has the token that ended it, if one has.
        """
        slots = self.running_batch.slots
        # The first of them was counted when the step was launched.
        slots.num_computed_S[req.slot] += max(0, appended - 1)
        slots.length_S[req.slot] = len(req.tokens)
        slots.token_S[req.slot] = req.tokens[-1]
        req.drop_unsampled_logprobs()
        if drafted_end is not None:
            # Its recurrent state is that after the last accepted row, behind the token that ended it.
            req.cache_epoch = -1
        if self._speculation is not None and appended:
            if drafted_end is None:
                self._speculation.record(req, appended - 1, branch)
            else:
                self._speculation.record(req, appended, drafted_end, drafted_end=True)
        self.running_batch.end_branches(req, branch)
        req.draft = NO_DRAFTS

    def _keep_accepted_states(self, step: ScheduledStep, state_rows_D: Ints, accepted_D: Bools) -> None:
        """Copy to each request's slot, before the next step, the recurrent state after its last accepted row."""
        copies = self.running_batch.slots.copies
        for row in accepted_D.nonzero()[0].tolist():
            slot, state = step.sampled_reqs[row].slot, int(state_rows_D[row])
            if slot >= 0 and state not in (-1, slot):
                copies[slot] = state

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

    def restart_prompts(self, lora: ServedAdapter | None = None) -> None:
        """Recompute prompts without sampled tokens from the start, of one adapter or all. Nothing may be in flight."""
        num_computed_S = self.running_batch.slots.num_computed_S
        for req in [req for req in self.iter_reqs() if req.has_no_output and lora in (None, req.lora)]:
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

    def _start_chunk(self, req: Req, todo: int, budget: int) -> PrefillChunk:
        """Compute up to ``budget`` of the ``todo`` tokens of a prompt (or of a recompute) in this step, if that cuts no
        bidirectional span.
        """
        start = int(self.running_batch.slots.num_computed_S[req.slot])
        count = end_at_unit(start, todo, budget, self._chunk_unit)
        count = self.running_batch.align_chunk(req, start, count)
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
        skipped: list[Req] = []
        for req in self.waiting:
            if not running.slots.free:
                break
            if not running.slots.has_lora_room(req):
                if req.lora_overtaken >= MAX_OVERTAKEN or len(skipped) == MAX_OVERTAKEN:
                    break
                skipped.append(req)
                continue
            if not running.follow_leader(req):
                if budget <= 0 or not running.admit(req):
                    break
                todo = len(req.tokens) - int(running.slots.num_computed_S[req.slot])
                chunk = self._start_chunk(req, todo, budget)
                budget -= chunk.length
                if todo == 1:
                    decodes.append(req.slot)
                else:
                    chunks.append(chunk)
            admitted += 1
            for other in skipped:
                other.lora_overtaken += 1
        self.waiting[: admitted + len(skipped)] = skipped
        return np.array(decodes, np.int64)

    def _propose_drafts(self, decodes_B: Ints, speculation: Speculation) -> dict[int, DraftTree]:
        """Return the drafts (slot -> tree) that this step verifies, and give their requests pages for them."""
        running, slots = self.running_batch, self.running_batch.slots
        length = speculation.choose_length(len(decodes_B))
        if not length:
            return speculation.propose((), (), num_rows=len(decodes_B), max_rows=slots.count)
        reqs = [
            req
            for req in running.reqs_at(decodes_B)
            if req.can_speculate and slots.length_S[req.slot] == len(req.tokens)
        ]
        length = length if len(decodes_B) < slots.count else 0
        room = [self._make_room(req, length) if length else 0 for req in reqs]
        max_rows = slots.count
        if self._num_draft_states is not None:
            max_rows = min(max_rows, len(decodes_B) + self._num_draft_states)
        drafts = speculation.propose(reqs, room, num_rows=len(decodes_B), max_rows=max_rows)
        for slot, tree in drafts.items():
            req = running.req_at(slot)
            tree = cut_to_grammar(req, tree) if req.grammar_mask_Z is not None else tree
            req.draft = tree
            if tree.branches:
                # Masks of a grammar count branches: of those without pages, none may have one behind it.
                count = next((i for i, each in enumerate(tree.branches) if not running.add_branch(req, each)), None)
                req.draft = DraftTree(tree.tokens, tree.branches[:count])
        return {slot: tree for slot in drafts if (tree := running.req_at(slot).draft).tokens}

    def _make_room(self, req: Req, length: int) -> int:
        """Allocate pages for ``length`` drafted tokens, as far as no running request needs them; return the room."""
        running, slots = self.running_batch, self.running_batch.slots
        # The row of the last draft samples one token more.
        length = min(length, req.max_length - len(req.tokens) - 1)
        while (room := int(slots.capacity_S[req.slot]) - len(req.tokens)) < length:
            if running.pages.available <= len(running.running):
                break
            running.add_page(req)
        return max(0, min(length, room))

    def _build_step(self, decode_rows: DecodeRows, chunks: list[PrefillChunk]) -> ScheduledStep:
        running = self.running_batch
        slots = running.slots
        rows = build_batch_rows(decode_rows, chunks, slots)
        reqs, drafts_D = rows.reqs, rows.drafts_B
        states, state_rows_D = None, None
        if drafts_D is not None and self._num_draft_states is not None:
            states = build_draft_states(drafts_D, rows.req_slots_B, slots.count)
            state_rows_D = states.writes_B
        length_B, ends_B = slots.length_S[rows.req_slots_B], rows.starts_B + rows.counts_B
        if drafts_D is not None:
            length_B = length_B + drafts_D.offsets
        ready_B = ends_B == length_B
        samples_B = ready_B & (length_B < slots.max_length_S[rows.req_slots_B])
        sampled, rows_D = reqs, rows.last_rows_B
        info, length_D = decode_rows.sampling_info, length_B
        if chunks or not samples_B.all():
            picked = samples_B.nonzero()[0]
            sampled, rows_D = [reqs[i] for i in picked.tolist()], rows_D[picked]
            info, length_D = gather_sampling_info(rows.req_slots_B[picked], slots), length_B[picked]
            drafts_D = None if drafts_D is None else drafts_D.take(picked)
            state_rows_D = None if state_rows_D is None else state_rows_D[picked]
        prefilled_D = (length_D == info.prompt_D).nonzero()[0].tolist()
        forks, rejected = running.plan_forks([sampled[i] for i in prefilled_D])
        if forks:
            row_by_leader = {sampled[i]: int(rows_D[i]) for i in prefilled_D}
            rows_D = np.concatenate((rows_D, [row_by_leader[fork.leader] for fork in forks]))
            info = gather_sampling_info(np.concatenate((info.req_slots_D, [f.follower.slot for f in forks])), slots)
            length_D = np.concatenate((length_D, [slots.length_S[f.follower.slot] for f in forks]))
            drafts_D = None if drafts_D is None else drafts_D.pad(len(forks))
            if state_rows_D is not None:
                state_rows_D = np.pad(state_rows_D, (0, len(forks)), constant_values=-1)
        for follower in rejected:
            self.submit(follower)
        full_page_B = ends_B[: len(ends_B) - len(chunks)] % running.pages.size == 0
        filled = full_page_B.nonzero()[0].tolist() if running.pages.share else ()
        scored = find_scored_spans(rows, chunks)
        all_sampled = [*sampled, *(fork.follower for fork in forks)]
        return ScheduledStep(
            batch=self._build_forward_batch(
                rows, chunks, all_sampled, rows_D, info, length_D, scored, drafts_D, states
            ),
            sampled_reqs=all_sampled,
            forks=forks,
            prefilled=[sampled[i] for i in prefilled_D],
            filled_pages=[(reqs[i], int(ends_B[i])) for i in filled],
            scored=scored,
            done_reqs=[reqs[i] for i in (ready_B & ~samples_B).nonzero()[0].tolist()],
            saved_states=[
                chunk.req for chunk in chunks if running.can_save_state(chunk.req, chunk.start + chunk.length)
            ],
            last_token_rows_D=(length_D + 1 == info.max_length_D).nonzero()[0],
            needs_check_D=info.needs_check_D,
            drafts_D=drafts_D,
            state_rows_D=state_rows_D,
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
        drafts_D: DraftRows | None,
        states: DraftStates | None,
    ) -> ForwardBatch:
        running = self.running_batch
        pages, slots = running.pages, running.slots
        edits = build_logit_edits(sampled_reqs, slots, drafts_D) if info.has_edits else None
        queries = build_logprob_queries(list(enumerate(sampled_reqs))) if info.has_queries else None
        images = gather_image_rows(rows, slots)
        one_sample_per_row = not chunks and len(rows_D) == len(rows.req_slots_B)
        plain = edits is None and queries is None and images.vision is None and images.rope_positions_3T is None
        page_copies = pages.take_copies() if pages.copies else {}
        for store in running.records.values():
            store.inflight_copies |= page_copies
        return ForwardBatch(
            tokens_T=gather_tokens(rows, chunks, slots),
            starts_B=rows.starts_B,
            counts_B=rows.counts_B,
            req_slots_B=rows.req_slots_B,
            num_decodes=rows.num_decodes,
            block_table_BM=build_block_table(rows, slots, pages.size),
            shared_B=rows.shared_B,
            group_B=rows.group_B,
            rows_D=rows_D,
            req_slots_D=info.req_slots_D,
            sampling=info.build_sampling_batch(length_D),
            page_copies=copies_as_arrays(page_copies),
            state_copies=copies_as_arrays(slots.take_copies() if slots.copies else {}),
            draft_states=states,
            logit_edits=edits,
            logprob_queries=queries,
            prompt_scoring=build_prompt_scoring(scored),
            vision=images.vision,
            rope_offsets_B=images.rope_offsets_B,
            rope_positions_3T=images.rope_positions_3T,
            visible_ends_T=images.visible_ends_T,
            lora=slots.build_lora_batch(rows.req_slots_B),
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

    def _find_ended(self, step: ScheduledStep, tokens_D: Ints) -> list[Req]:
        """Return the requests whose last token was sampled, checking only rows that may have ended."""
        maybe_D = self.running_batch.slots.stop_counts_V[tokens_D] > 0
        maybe_D[step.last_token_rows_D] = True
        if step.needs_check_D is not None:
            maybe_D |= step.needs_check_D
        candidates = (step.sampled_reqs[row] for row in maybe_D.nonzero()[0].tolist())
        return [req for req in candidates if not req.finish_kind and req.check_finished(self._decode)]

    def _end_done_reqs(self, step: ScheduledStep, version: Version) -> list[Req]:
        """End the requests that have nothing left to compute or sample, and return them."""
        ended: list[Req] = []
        for req in step.done_reqs:
            if not req.finish_kind:
                req.finish_kind, req.prompt_version = "length", req.policy_version or version
                ended.append(req)
        return ended

    def _release(self, req: Req) -> None:
        if self._speculation is not None:
            self._speculation.observe(req)
        for follower in self.running_batch.release(req):
            self.submit(follower)


def end_at_unit(start: int, todo: int, budget: int, unit: int) -> int:
    """Return how many of ``todo`` prompt tokens behind ``start`` a step computes that has room for ``budget``.

    A chunk that does not finish its prompt ends at a multiple of ``unit``, if there is room for two units.

    >>> end_at_unit(0, 20_000, 16_384, 4096), end_at_unit(16_384, 3_616, 16_384, 4096)
    (16384, 3616)
    >>> end_at_unit(0, 9_000, 8_500, 4096), end_at_unit(1_040, 30_000, 16_384, 4096)
    (8192, 15344)
    """
    count = min(todo, budget)
    return count - (start + count) % unit if 2 * unit <= count < todo else count

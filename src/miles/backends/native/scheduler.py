"""Who runs in the next step: running requests first, then those that wait, in their order, as pages and seats allow.

A request runs its tokens that have no keys and values yet; when none is left, one is drawn. So a prompt,
a decode step and a recompute after preemption are the same thing with different counts.

A step is planned, launched and promised before what it draws is known, and absorbed when it has landed. Between the
two, everything is counted as if it had been done: the device does things in order.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

import numpy as np

from miles.backends.native.hall import Counters, Hall, rank_of
from miles.backends.native.order import Drawn, Ints, Order
from miles.backends.native.patience import Patience
from miles.backends.native.plan import (
    Chunk,
    Plan,
    Rows,
    Scored,
    Still,
    copies_of,
    edits_of,
    looks_of,
    rows_of,
    scored_of,
    scoring_of,
    singles_of,
    still_of,
    take_looks,
    take_scores,
    tokens_of,
)
from miles.backends.native.sequence import Decode, Sequence
from miles.core.types import Version


class Scheduler:
    """The queue before the hall. ``waiting`` is always in order of rank."""

    def __init__(self, hall: Hall, *, prefill_chunk: int, decode: Decode | None, patience: int = 0) -> None:
        self.hall = hall
        self.waiting: list[Sequence] = []
        self.patience = Patience(patience)
        self._chunk = prefill_chunk
        self._decode = decode
        self._singles = singles_of(np.zeros(0, np.int64), hall.changes, hall.all_at, hall.seats)

    @property
    def counters(self) -> Counters:
        """What was done since the engine was made."""
        return self.hall.counters

    @property
    def running(self) -> list[Sequence]:
        """Those with pages, in order of rank."""
        return self.hall.running

    def submit(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=rank_of)

    def everyone(self) -> Iterator[Sequence]:
        """All requests that have not ended."""
        yield from self.hall.seated()
        yield from self.waiting

    # -- a step: plan it, count on it, take in what came of it ------------------------------

    def stuck(self) -> bool:
        """Must what is in flight land before the next step can be planned?"""
        hall, length_S = self.hall, self.hall.seats.length_S
        if any(length_S[one.seat] > len(one.tokens) for one in hall.dependents):
            return True
        return len(hall.short()) > hall.pages.available

    def plan(self) -> Plan | None:
        """Decide the next step; None when there is nothing to do before what is in flight has landed.

        Someone who runs always gets on, so every request ends. When anything is in flight, ``stuck`` is to be asked
        first: only then may pages be taken from those who run.
        """
        hall, seats = self.hall, self.hall.seats
        for seat in hall.short().tolist():
            sequence = seats.holders[seat]
            if sequence is not None:  # else it has just been preempted for another
                self._grow(sequence)
        seats_R = hall.seats_R
        todo_R = np.minimum(seats.length_S[seats_R], seats.target_S[seats_R]) - seats.computed_S[seats_R]
        singles_B = seats_R[todo_R == 1]
        self.counters.prefilled_tokens += int((seats.length_S[singles_B] == seats.prompt_S[singles_B]).sum())
        chunks, budget = list[Chunk](), self._chunk
        for seat, todo in zip(seats_R[todo_R > 1].tolist(), todo_R[todo_R > 1].tolist(), strict=True):
            if budget > 0:
                chunks.append(self._chunk_of(hall.at(seat), min(todo, budget)))
                budget -= chunks[-1].length
        if self.waiting and self.patience.over(
            self.waiting[: seats.free], len(singles_B), self._chunk, recorded=not chunks and self._singles.still.plain
        ):
            singles_B = np.concatenate((singles_B, self._admit(chunks, budget)))
        if not len(singles_B) and not chunks:
            return None
        if self._singles.changes != hall.changes or not np.array_equal(self._singles.found_B, singles_B):
            self._singles = singles_of(singles_B, hall.changes, hall.all_at, seats)
        # Chunks of like length are attended to together.
        chunks.sort(key=lambda chunk: (chunk.length, chunk.start))
        return self._compose(rows_of(self._singles, chunks, seats), chunks)

    def promise(self, plan: Plan) -> None:
        """Count on a step that was launched: all that needs no token."""
        hall, seats, order = self.hall, self.hall.seats, plan.order
        own_D = order.seats_D[: len(plan.draws) - len(plan.forks)]
        seats.computed_S[order.seats_B] += order.counts_B
        seats.length_S[own_D] += 1
        seats.token_S[own_D] = -1
        for leader in plan.led:
            hall.led(leader)
        for fork in plan.forks:
            hall.fork(fork)
        for one in plan.scored:
            one.sequence.scoring = one.first + one.length
        hall.pages.written()
        self.counters.steps += 1

    def absorb(self, plan: Plan, drawn: Drawn, version: Version) -> list[Sequence]:
        """Take in what came of a step launched under ``version``; returns the requests that ended.

        Whoever ended since it was planned has no part in it any more.
        """
        hall = self.hall
        if hall.routes is not None and drawn.routed_TLx is not None:
            hall.routes.write(plan.order, drawn.routed_TLx)
        if plan.scored:
            take_scores(plan.scored, drawn, version)
        if drawn.looked is not None:
            take_looks(plan.draws, drawn.looked)
        count = 0
        tokens, logprobs = drawn.tokens_D.tolist(), drawn.logprobs_D.tolist()
        for sequence, token, logprob in zip(plan.draws, tokens, logprobs, strict=True):
            if sequence.reason:
                continue
            if sequence.version is not version:
                sequence.stamp(version)
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            count += 1
        self.counters.generated_tokens += count
        ended = self._conclude(plan, drawn.tokens_D, version)
        for sequence, upto in plan.filled:
            if sequence.pages:
                hall.enter(sequence, upto)
        hall.pages.written()
        for sequence in ended:
            self._release(sequence)
        return ended

    # -- leaving early ----------------------------------------------------------------------

    def remove(self, sequence: Sequence, message: str = "") -> None:
        """Forget a request that is not to go on; what is in flight of it is lost."""
        sequence.reason, sequence.message = "abort", message
        if sequence.seat < 0:
            self.waiting.remove(sequence)
        elif sequence.pages:
            self._release(sequence)
        else:
            self.hall.desert(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a request's pages away; it waits again, and what it had is computed anew. Nothing may be in flight."""
        self._release(sequence)
        sequence.preemptions += 1
        self.submit(sequence)
        self.counters.preemptions += 1

    def restart_prompts(self) -> None:
        """Forget what was computed of prompts nothing was drawn after yet. Nothing may be in flight."""
        computed_S = self.hall.seats.computed_S
        fresh = [one for one in self.everyone() if one.fresh]
        for sequence in fresh:
            sequence.unscore()
            if sequence.pages and computed_S[sequence.seat]:
                self.preempt(sequence)

    def check(self) -> None:
        """Assert that the books balance."""
        self.hall.check()
        assert [one.rank for one in self.waiting] == sorted(one.rank for one in self.waiting)
        assert all(not one.pages and one.seat < 0 and not one.reason for one in self.waiting)

    # -- inside -----------------------------------------------------------------------------

    def _grow(self, sequence: Sequence) -> None:
        """One more page, if need be from the last in rank, be it the one who asks."""
        while not self.hall.pages.available:
            victim = self.hall.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return
        self.hall.grow(sequence)

    def _chunk_of(self, sequence: Sequence, count: int) -> Chunk:
        """Run ``count`` tokens of a prompt (or of a recompute) in this step."""
        start = int(self.hall.seats.computed_S[sequence.seat])
        # Keys are written before anyone looks, so even this very step's requests may share these pages.
        self.hall.enter(sequence, start + count)
        self.counters.prefilled_tokens += count
        return Chunk(sequence, start, count)

    def _admit(self, chunks: list[Chunk], budget: int) -> Ints:
        """Let in who waits; returns the seats of those with but one token left to compute."""
        hall, singles, taken = self.hall, list[int](), 0
        for sequence in self.waiting:
            if not hall.seats.free:
                break
            if not hall.follow(sequence):
                if budget <= 0 or not hall.seat(sequence):
                    break
                todo = len(sequence.tokens) - int(hall.seats.computed_S[sequence.seat])
                chunk = self._chunk_of(sequence, min(todo, budget))
                budget -= chunk.length
                if todo == 1:
                    singles.append(sequence.seat)
                else:
                    chunks.append(chunk)
            taken += 1
        del self.waiting[:taken]
        return np.array(singles, np.int64)

    def _compose(self, rows: Rows, chunks: list[Chunk]) -> Plan:
        """The plan of a step of these rows."""
        hall, seats, sequences = self.hall, self.hall.seats, rows.sequences
        length_B, ends_B = seats.length_S[rows.seats_B], rows.starts_B + rows.counts_B
        ready_B = ends_B == length_B
        drawing_B = ready_B & (length_B < seats.limit_S[rows.seats_B])
        draws, rows_D, still, length_D = sequences, rows.lasts_B, self._singles.still, length_B
        if chunks or not drawing_B.all():
            picked = drawing_B.nonzero()[0]
            draws, rows_D = [sequences[i] for i in picked.tolist()], rows_D[picked]
            still, length_D = still_of(rows.seats_B[picked], seats), length_B[picked]
        led_D = (length_D == still.prompt_D).nonzero()[0].tolist()
        forks, left = hall.tie([draws[i] for i in led_D])
        if forks:
            row_of = {draws[i]: int(rows_D[i]) for i in led_D}
            rows_D = np.concatenate((rows_D, [row_of[fork.leader] for fork in forks]))
            still = still_of(np.concatenate((still.seats_D, [fork.follower.seat for fork in forks])), seats)
            length_D = seats.length_S[still.seats_D]
        for follower in left:
            self.submit(follower)
        filled_B = ends_B[: len(ends_B) - len(chunks)] % hall.pages.size == 0
        full_B = filled_B.nonzero()[0].tolist() if hall.pages.share else ()
        scored = scored_of(rows, chunks)
        draws_of_all = [*draws, *(fork.follower for fork in forks)]
        return Plan(
            order=self._order(rows, chunks, draws_of_all, rows_D, still, length_D, scored),
            draws=draws_of_all,
            forks=forks,
            led=[draws[i] for i in led_D],
            filled=[(sequences[i], int(ends_B[i])) for i in full_B],
            scored=scored,
            done=[sequences[i] for i in (ready_B & ~drawing_B).nonzero()[0].tolist()],
            lasts_D=(length_D + 1 == still.limit_D).nonzero()[0],
            odd_D=still.odd_D,
        )

    def _order(
        self,
        rows: Rows,
        chunks: list[Chunk],
        draws: list[Sequence],
        rows_D: Ints,
        still: Still,
        length_D: Ints,
        scored: list[Scored],
    ) -> Order:
        pages, seats = self.hall.pages, self.hall.seats
        most = -(-int((rows.starts_B + rows.counts_B).max()) // pages.size)
        edits = edits_of(draws, seats) if still.edited else None
        looks = looks_of(list(enumerate(draws))) if still.looking else None
        alike = not chunks and len(rows_D) == len(rows.seats_B)
        due = pages.take_copies()
        if self.hall.routes is not None:
            self.hall.routes.flying |= due
        return Order(
            tokens_T=tokens_of(rows, chunks, seats),
            starts_B=rows.starts_B,
            counts_B=rows.counts_B,
            seats_B=rows.seats_B,
            singles=rows.singles,
            pages_BM=seats.pages_SP[:, :most][rows.seats_B],
            shared_B=rows.shared_B,
            group_B=rows.group_B,
            rows_D=rows_D,
            seats_D=still.seats_D,
            manner=still.manner(length_D),
            copies=copies_of(due),
            seat_copies=copies_of(seats.take_copies()),
            edits=edits,
            looks=looks,
            scoring=scoring_of(scored),
            plain=alike and edits is None and looks is None,
        )

    def _conclude(self, plan: Plan, tokens_D: Ints, version: Version) -> list[Sequence]:
        """Who has drawn its last token, of those it can be of."""
        maybe_D = self.hall.seats.ends_V[tokens_D] > 0
        maybe_D[plan.lasts_D] = True
        if plan.odd_D is not None:
            maybe_D |= plan.odd_D
        rows = (plan.draws[row] for row in maybe_D.nonzero()[0].tolist())
        ended = [one for one in rows if not one.reason and one.concluded(self._decode)]
        for sequence in plan.done:
            if not sequence.reason:
                sequence.reason, sequence.scored_under = "length", version
                ended.append(sequence)
        return ended

    def _release(self, sequence: Sequence) -> None:
        for follower in self.hall.leave(sequence):
            self.submit(follower)

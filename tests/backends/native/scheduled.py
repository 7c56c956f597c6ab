"""A world for the scheduler alone: a device that remembers for which prefix each slot and each state was written."""

from collections import Counter
from itertools import count

import numpy as np

from miles.backends.native.cache import Pages
from miles.backends.native.hall import Hall
from miles.backends.native.order import Drawn, Order, positions_of, slots_of
from miles.backends.native.patience import Patience
from miles.backends.native.plan import Plan
from miles.backends.native.request import Ask
from miles.backends.native.scheduler import Scheduler
from miles.backends.native.seats import Seats
from miles.backends.native.sequence import Sequence
from miles.core.protocols import Sampling
from miles.core.types import Version


def drawn_after(prefix):
    """A function of what came before, as of a model, and nearly always 0, so that prefixes coincide."""
    return int(hash(prefix) % 11 == 0)


def scored_after(prefix, token):
    return float(hash((prefix, token)) % 1000)


class Device:
    """Does what it is ordered to, in order, with prefixes instead of keys, values and states."""

    def __init__(self, pages, size, seats, recurrent):
        self.size, self.recurrent = size, recurrent
        self.slots = [None] * (pages * size)
        self.states = [None] * seats
        self.drawn = [None] * seats

    def launch(self, order: Order, version: int, born: list[int]) -> Drawn:
        self.copy(order)
        tokens, slots = order.tokens_T.tolist(), slots_of(order, positions_of(order), self.size).tolist()
        rows, row = [], 0
        columns = (column.tolist() for column in (order.seats_B, order.starts_B, order.counts_B))
        for seat, start, length in zip(*columns, strict=True):
            new = [self.drawn[seat] if token < 0 else token for token in tokens[row : row + length]]
            rows.append((seat, start, new, slots[row : row + length]))
            row += length
        # A step writes before it looks: rows may go on from what others of the same step write.
        prefixes = {b: self.write(order, b, *rows[b], version) for b in np.argsort(order.starts_B).tolist()}
        self.look(order, rows, born)
        everything = [prefix for b in range(len(rows)) for prefix in prefixes[b]]
        told = [drawn_after(everything[row]) for row in order.rows_D]
        for seat, token in zip(order.seats_D.tolist(), told, strict=True):
            self.drawn[seat] = token
        scores = None
        if order.scoring is not None:
            pairs = zip(order.scoring.rows_N.tolist(), order.scoring.tokens_N.tolist(), strict=True)
            scores = np.array([scored_after(everything[row], token) for row, token in pairs], np.float32)
        return Drawn(tokens_D=np.array(told, np.int64), logprobs_D=np.zeros(len(told), np.float32), scores_N=scores)

    def copy(self, order: Order):
        slots, states, size = list(self.slots), list(self.states), self.size
        for source, target in zip(*(side.tolist() for side in order.copies), strict=True):
            self.slots[target * size : (target + 1) * size] = slots[source * size : (source + 1) * size]
        for source, target in zip(*(side.tolist() for side in order.seat_copies), strict=True):
            self.states[target] = states[source]

    def write(self, order, b, seat, start, new, slots, version):
        """Every new token goes on from what the slot before it was written for."""
        before = order.pages_BM[b, (start - 1) // self.size] * self.size + (start - 1) % self.size
        prefix = self.slots[before][0] if start else ()
        assert len(prefix) == start
        if self.recurrent:
            assert (self.states[seat] if start else ()) == prefix
            self.states[seat] = (*prefix, *new)
        prefixes = [(*prefix, *new[: i + 1]) for i in range(len(new))]
        for slot, written in zip(slots, prefixes, strict=True):
            self.slots[slot] = (written, version)
        return prefixes

    def look(self, order, rows, born):
        """Every slot a query sees was written for its prefix, and not under weights older than the request."""
        for b, (_, start, new, slots) in enumerate(rows):
            whole = self.slots[slots[-1]][0]
            for position in range(start + len(new)):
                slot = order.pages_BM[b, position // self.size] * self.size + position % self.size
                prefix, version = self.slots[slot]
                assert prefix == whole[: position + 1]
                assert version >= born[b]
        for b in range(1, order.singles):
            if order.group_B[b] == order.group_B[b - 1] >= 0:
                shared = int(order.shared_B[b])
                assert shared == order.shared_B[b - 1] > 0
                assert self.slots[rows[b][3][0]][0][:shared] == self.slots[rows[b - 1][3][0]][0][:shared]
                assert shared <= rows[b][1]


class World:
    """A scheduler, a device, and ``depth`` steps in flight between them.

    A model with states (``recurrent``) shares no page, only what a leader has just computed.
    """

    def __init__(self, *, pages=8, size=4, seats=6, chunk=7, share=True, recurrent=False, depth=0, patience=0, few=1):
        self.hall = Hall(Pages(pages, size, share=share and not recurrent), Seats(seats, pages, 1000), lead=share)
        self.scheduler = Scheduler(self.hall, prefill_chunk=chunk, decode=None)
        self.scheduler.patience = Patience(patience, few)
        self.device = Device(pages, size, seats, recurrent)
        self.depth = depth
        self.aloft = []
        self.numbers = count()
        self.version = Version()
        self.born = {}
        self.ended = []

    # -- what may happen --------------------------------------------------------------------

    def submit(self, prompt, new, *, priority=0, score_from=None, dependent=False):
        ask = Ask(
            tokens=np.array(prompt, np.int32),
            sampling=Sampling(max_new_tokens=new),
            priority=priority,
            score_from=score_from,
            repetition_penalty=1.5 if dependent else 1.0,
        )
        number = next(self.numbers)
        sequence = Sequence(
            number=number,
            ask=ask,
            prompt_length=len(prompt),
            prompt_T=np.array(prompt, np.int64),
            key=np.array(prompt).tobytes(),
            ends=frozenset(),
            tail=0,
            tokens=list(prompt),
            limit=len(prompt) + new,
            rank=(-priority, number),
            counts=Counter() if dependent else None,
        )
        sequence.unscore()
        self.scheduler.submit(sequence)
        self.born[sequence] = self.version.number
        return sequence

    def submit_many(self, prompt, new, copies, priority, score_from, dependent):
        score_from = None if score_from is None else min(score_from, len(prompt))
        for _ in range(copies):
            self.submit(prompt, new, priority=priority, score_from=score_from, dependent=dependent)

    def publish(self):
        self.land()
        self.scheduler.restart_prompts()
        self.version = self.version.next()
        self.hall.pages.flush()

    def remove(self, which):
        """Somebody leaves, whatever is in flight."""
        alive = list(self.scheduler.everyone())
        if alive:
            self.scheduler.remove(alive[which % len(alive)])

    def retract(self):
        self.land()
        for sequence in list(self.scheduler.running):
            self.scheduler.preempt(sequence)

    def sleep(self):
        self.retract()
        self.hall.pages.flush()
        self.device.slots = [None] * len(self.device.slots)
        self.device.states = [None] * len(self.device.states)

    def steps(self, most):
        for _ in range(most):
            if self.scheduler.running or self.scheduler.waiting or self.aloft:
                self.step()

    # -- a step -----------------------------------------------------------------------------

    def step(self) -> Plan | None:
        if self.aloft and self.scheduler.stuck():
            self.land()
        plan = self.scheduler.plan()
        if plan is None:
            self.land()
            return None
        for sequence in plan.draws:
            if sequence.counts is not None:
                assert len(sequence.tokens) == self.hall.seats.length_S[sequence.seat]
                assert sequence.counts == Counter(sequence.tokens[sequence.prompt_length :])
        born = [self.born[self.hall.at(seat)] for seat in plan.order.seats_B.tolist()]
        drawn = self.device.launch(plan.order, self.version.number, born)
        self.scheduler.promise(plan)
        self.aloft.append((plan, drawn, self.version))
        self.land(keep=self.depth)
        self.scheduler.check()
        return plan

    def land(self, keep=0):
        while len(self.aloft) > keep:
            self.ended += self.scheduler.absorb(*self.aloft.pop(0))

    def drain(self):
        self.steps(5000)
        assert not list(self.scheduler.everyone())
        assert all(one.reason for one in self.born)
        assert self.hall.pages.available == self.hall.pages.total
        for one in self.ended:
            tokens = tuple(one.tokens)
            assert len(tokens) == one.limit
            for i in range(one.prompt_length, len(tokens)):
                assert tokens[i] == drawn_after(tokens[:i])
            if one.ask.score_from is not None:
                places = range(one.ask.score_from, one.prompt_length)
                assert one.scores == [scored_after(tokens[:i], tokens[i]) if i else None for i in places]

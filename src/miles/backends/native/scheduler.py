"""Who runs in the next step: running requests first, then those that wait, oldest first, as pages and seats allow.

A request runs its tokens that have no keys and values yet; when none is left, one is drawn. So a prompt,
a decode step and a recompute after preemption are the same thing with different counts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from miles.backends.native.cache import ROOT, Pages
from miles.backends.native.request import Decode, Seats, Sequence
from miles.core.types import Array, Version


@dataclass(slots=True)
class Plan:
    """One step: ``singles`` run one token each, ``chunks`` several, in this order.

    ``leaders`` are the chunks (by index) that end here and draw. A fork (row of the leader among those
    that draw, leader, follower) draws from its leader's logits. ``copies`` of pages and ``seat_copies`` of
    states (to -> from) come first.
    """

    singles: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    leaders: list[int] = field(default_factory=list)
    forks: list[tuple[int, Sequence, Sequence]] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    seat_copies: dict[int, int] = field(default_factory=dict)

    @property
    def work(self) -> list[tuple[Sequence, int]]:
        """Everyone who runs, and how many tokens."""
        return [*((sequence, 1) for sequence in self.singles), *self.chunks]

    @property
    def draws(self) -> list[Sequence]:
        """Everyone a token is drawn for."""
        return [*self.singles, *(self.chunks[i][0] for i in self.leaders), *(fork[2] for fork in self.forks)]


@dataclass(slots=True)
class Counters:
    """What was done since the engine was made."""

    prefilled_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


def _arrival(sequence: Sequence) -> int:
    return sequence.number


class Scheduler:
    """The queue, the seats and the pages. ``running`` and ``waiting`` are always in order of arrival.

    With ``lead``, requests of one prompt have it computed by the first of them.
    """

    def __init__(self, pages: Pages, seats: Seats, *, prefill_chunk: int, lead: bool, decode: Decode | None) -> None:
        self.pages = pages
        self.seats = seats
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.counters = Counters()
        self._chunk = prefill_chunk
        self._lead = lead
        self._decode = decode
        self._leaders: dict[bytes, Sequence] = {}

    def submit(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_arrival)

    def everyone(self) -> Iterator[Sequence]:
        """All requests that have not ended."""
        for sequence in self.running:
            yield sequence
            yield from sequence.followers
        yield from self.waiting

    # -- a step: plan it, take in what came of it ------------------------------------------

    def plan(self) -> Plan:
        """Decide the next step. Someone who runs always gets on, so every request ends."""
        plan, budget, size = Plan(), self._chunk, self.pages.size
        index = 0
        while index < len(self.running):  # it shrinks at its end when someone is preempted
            sequence = self.running[index]
            index += 1
            todo = len(sequence.tokens) - sequence.computed
            if todo > 1:
                budget -= self._chunk_of(plan, sequence, min(todo, budget))
            elif sequence.computed < len(sequence.pages) * size or self._grow(sequence):
                plan.singles.append(sequence)
                self.counters.prefilled_tokens += sequence.fresh  # the last token of a prompt cut into chunks
                if (sequence.computed + 1) % size == 0:
                    self._enter(sequence, sequence.computed + 1)
        self._admit(plan, budget)
        # Those who share a prompt, and chunks of like length, are attended to together.
        plan.singles.sort(key=self._prompt_page)
        plan.chunks.sort(key=lambda chunk: (chunk[1], chunk[0].computed))
        self._tie(plan)
        plan.copies, plan.seat_copies = self.pages.take_copies(), self.seats.take_copies()
        return plan

    def absorb(
        self, plan: Plan, tokens: list[int], logprobs: list[float], version: Version, routed_TLk: Array | None
    ) -> list[Sequence]:
        """Take in what was computed and drawn; returns the requests that ended."""
        if routed_TLk is not None:
            _record(plan, routed_TLk)
        for sequence, length in plan.work:
            sequence.computed += length
        drawn = list(zip(plan.draws, tokens, logprobs, strict=True))
        own = len(drawn) - len(plan.forks)
        ended: list[Sequence] = []
        for sequence, token, logprob in drawn[:own]:
            if sequence.fresh:
                self._led(sequence)
            if sequence.remember(token, logprob, version, self._decode):
                ended.append(sequence)
        self.counters.generated_tokens += own
        for (_, leader, follower), (_, token, logprob) in zip(plan.forks, drawn[own:], strict=True):
            if self._fork(leader, follower):
                self.counters.generated_tokens += 1
                if follower.remember(token, logprob, version, self._decode):
                    ended.append(follower)
        self.pages.written()
        for sequence in ended:
            self._release(sequence)
        self.counters.steps += 1
        return ended

    # -- leaving early ----------------------------------------------------------------------

    def remove(self, sequence: Sequence) -> None:
        """Forget a request that is not to go on."""
        if sequence.seat < 0:
            self.waiting.remove(sequence)
        elif sequence.pages:
            self._release(sequence)
        else:
            leader = next(one for one in self.running if sequence in one.followers)
            leader.followers.remove(sequence)
            self.seats.leave(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a request's pages away; it waits again, and what it had is computed anew."""
        self._release(sequence)
        self.submit(sequence)
        self.counters.preemptions += 1

    def restart_prompts(self) -> None:
        """Forget what was computed of prompts nothing was drawn after yet."""
        for sequence in [one for one in self.running if one.fresh and one.computed]:
            self.preempt(sequence)

    # -- inside -----------------------------------------------------------------------------

    def _chunk_of(self, plan: Plan, sequence: Sequence, length: int) -> int:
        """Run ``length`` tokens of a prompt (or of a recompute) in this step."""
        if length > 0:
            if length == 1 and len(sequence.tokens) - sequence.computed == 1:
                plan.singles.append(sequence)
            else:
                plan.chunks.append((sequence, length))
            # Keys are written before anyone looks, so even this very step's requests may share these pages.
            self._enter(sequence, sequence.computed + length)
            self.counters.prefilled_tokens += length
        return length

    def _admit(self, plan: Plan, budget: int) -> None:
        pages, taken = self.pages, 0
        for sequence in self.waiting:
            if not self.seats.free:
                break
            leader = self._leaders.get(sequence.key) if sequence.fresh else None
            if leader is not None and leader.epoch == pages.epoch:
                self.seats.take(sequence)
                leader.followers.append(sequence)
            elif budget > 0 and self._seat(sequence):
                budget -= self._chunk_of(plan, sequence, min(len(sequence.tokens) - sequence.computed, budget))
            else:
                break
            taken += 1
        del self.waiting[:taken]

    def _seat(self, sequence: Sequence) -> bool:
        """Give a request pages for all its tokens, if that leaves one for each that runs already."""
        pages = self.pages
        found = pages.find(sequence.tokens)
        pages.hold(found.pages)
        fresh = -(-len(sequence.tokens) // pages.size) - len(found.pages)
        if pages.available < fresh + len(self.running):
            pages.drop(found.pages)
            return False
        sequence.pages = found.pages + [pages.take() for _ in range(fresh)]
        sequence.nodes = found.nodes
        sequence.epoch = pages.epoch
        sequence.computed = len(found.pages) * pages.size
        if found.tail is not None:
            pages.copies[sequence.pages[len(found.pages)]] = found.tail
            sequence.computed = len(sequence.tokens) - 1
        self._sit(sequence, sequence.computed)
        if sequence.fresh and self._lead:
            self._leaders[sequence.key] = sequence
        return True

    def _sit(self, sequence: Sequence, cached: int) -> None:
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = cached
        self.counters.cached_tokens += cached
        if sequence.seat < 0:
            self.seats.take(sequence)
        self.seats.show(sequence)
        insort(self.running, sequence, key=_arrival)

    def _grow(self, sequence: Sequence) -> bool:
        """One more page, if need be from the latest arrival; false when that was the one who asked."""
        while not self.pages.available:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        sequence.pages.append(self.pages.take())
        self.seats.show(sequence, len(sequence.pages) - 1)
        return True

    def _enter(self, sequence: Sequence, upto: int) -> None:
        """Let the full pages among the first ``upto`` tokens be found."""
        pages, size, nodes = self.pages, self.pages.size, sequence.nodes
        if not pages.share or sequence.epoch != pages.epoch:
            return
        for i in range(len(nodes), upto // size):
            tokens = sequence.tokens[i * size : (i + 1) * size]
            nodes.append(pages.enter(nodes[-1] if nodes else ROOT, tokens, sequence.pages[i]))

    def _prompt_page(self, sequence: Sequence) -> int:
        """The last page that holds nothing but prompt: samples of one prompt have it in common."""
        whole = sequence.prompt_length // self.pages.size
        return sequence.pages[whole - 1] if whole else -1

    def _tie(self, plan: Plan) -> None:
        """Who draws besides the singles, and who draws along with whom."""
        plan.leaders = [i for i, (one, length) in enumerate(plan.chunks) if one.computed + length == len(one.tokens)]
        if not self._leaders:
            return
        own = [*plan.singles, *(plan.chunks[i][0] for i in plan.leaders)]
        for row, leader in enumerate(own):
            for follower in leader.followers:
                plan.forks.append((row, leader, follower))

    def _led(self, leader: Sequence) -> None:
        """A prompt is computed: its last page can be found from now on."""
        pages, size = self.pages, self.pages.size
        if self._leaders.get(leader.key) is leader:
            del self._leaders[leader.key]
        whole = (leader.prompt_length - 1) // size
        if pages.share and leader.epoch == pages.epoch:
            node = leader.nodes[whole - 1] if whole else ROOT
            pages.enter(node, leader.tokens[whole * size :], leader.pages[whole])

    def _fork(self, leader: Sequence, follower: Sequence) -> bool:
        """Share the leader's prompt: full pages as they are, the last one copied. Without a page, wait again."""
        pages = self.pages
        leader.followers.remove(follower)
        whole, rest = divmod(leader.prompt_length, pages.size)
        if rest and pages.available < 1 + len(self.running):
            self.seats.leave(follower)
            self.submit(follower)
            return False
        follower.pages = leader.pages[:whole]
        pages.hold(follower.pages)
        if rest:
            follower.pages.append(pages.take())
            pages.copies[follower.pages[-1]] = leader.pages[whole]
        follower.nodes = leader.nodes[:whole]
        follower.epoch = leader.epoch
        follower.computed = leader.prompt_length
        self.seats.copies[follower.seat] = leader.seat
        self._sit(follower, leader.prompt_length)
        return True

    def _release(self, sequence: Sequence) -> None:
        """Give back pages and seat; followers find another way."""
        del self.running[bisect_left(self.running, sequence.number, key=_arrival)]
        self.pages.drop(sequence.pages)
        self.seats.leave(sequence)
        sequence.pages, sequence.nodes, sequence.computed = [], [], 0
        if self._leaders.get(sequence.key) is sequence:
            del self._leaders[sequence.key]
        for follower in sequence.followers:
            self.seats.leave(follower)
            self.submit(follower)
        sequence.followers = []


def _record(plan: Plan, routed_TLk: Array) -> None:
    """Keep the experts of each drawn token the first time it is computed: the next one was drawn from that."""
    row = 0
    for sequence, length in plan.work:
        known = sequence.prompt_length + len(sequence.routed)
        for position in range(max(known, sequence.computed), sequence.computed + length):
            sequence.routed.append(routed_TLk[row + position - sequence.computed].copy())
        row += length

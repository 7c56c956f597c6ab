"""Those who run: their seats, their pages, and what they share."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from miles.backends.native.cache import ROOT, Pages
from miles.backends.native.order import Ints
from miles.backends.native.plan import Fork
from miles.backends.native.routes import Routes
from miles.backends.native.seats import Seats
from miles.backends.native.sequence import Sequence


@dataclass(slots=True)
class Counters:
    """What was done since the engine was made."""

    prefilled_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


def rank_of(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


class Hall:
    """Requests in their seats. ``running`` have pages and are in order of rank; ``followers`` have a seat only.

    ``changes`` counts how often anyone has come or gone. With ``lead``, requests of one prompt have it computed by
    the first of them. ``routes`` keeps the experts of every token in the pages.
    """

    def __init__(
        self,
        pages: Pages,
        seats: Seats,
        *,
        lead: bool,
        routes: Routes | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.pages = pages
        self.seats = seats
        self.routes = routes
        self.running: list[Sequence] = []
        self.dependents: set[Sequence] = set()
        self.counters = Counters()
        self._lead = lead
        self._clock = clock
        self.changes = 0
        self._leaders: dict[bytes, Sequence] = {}
        self._seats_R: Ints | None = None

    @property
    def seats_R(self) -> Ints:
        """The seats of those who run, in order of rank."""
        if self._seats_R is None:
            self._seats_R = np.array([sequence.seat for sequence in self.running], np.int64)
        return self._seats_R

    def seated(self) -> Iterator[Sequence]:
        """Everyone who has a seat."""
        for sequence in self.running:
            yield sequence
            yield from sequence.followers

    def at(self, seat: int) -> Sequence:
        """Who sits there."""
        sequence = self.seats.holders[seat]
        assert sequence is not None
        return sequence

    def all_at(self, seats_B: Ints) -> list[Sequence]:
        """Who sits in these seats."""
        holders = self.seats.holders
        return [one for seat in seats_B.tolist() if (one := holders[seat]) is not None]

    def short(self) -> Ints:
        """The seats of those whose next token needs another page."""
        seats, seats_R = self.seats, self.seats_R
        computed_R = seats.computed_S[seats_R]
        return seats_R[(computed_R == seats.room_S[seats_R]) & (computed_R < seats.target_S[seats_R])]

    # -- coming -----------------------------------------------------------------------------

    def follow(self, sequence: Sequence) -> bool:
        """Wait, in a seat, for one who computes the same prompt; false when there is none."""
        if not sequence.alike:
            return False
        leader = self._leaders.get(sequence.key)
        if leader is None or leader.epoch != self.pages.epoch:
            return False
        self.seats.take(sequence)
        leader.followers.append(sequence)
        return True

    def seat(self, sequence: Sequence) -> bool:
        """Give a request a seat and pages for all its tokens, if that leaves one for each that runs already."""
        pages = self.pages
        # What is to be scored must be computed, found or not.
        tokens = sequence.tokens[: sequence.scoring] if sequence.scoring < sequence.prompt_length else sequence.tokens
        found = pages.find(tokens)
        pages.hold(found.pages)
        fresh = -(-len(sequence.tokens) // pages.size) - len(found.pages)
        if pages.available < fresh + len(self.running):
            pages.drop(found.pages)
            return False
        sequence.pages = found.pages + [pages.take() for _ in range(fresh)]
        sequence.nodes = found.nodes
        sequence.epoch = pages.epoch
        computed = len(found.pages) * pages.size
        if found.tail is not None:
            pages.copies[sequence.pages[len(found.pages)]] = found.tail
            computed = len(tokens) - 1
        self.seats.take(sequence)
        self._sit(sequence, computed)
        if sequence.alike and self._lead:
            self._leaders[sequence.key] = sequence
        return True

    def tie(self, leaders: list[Sequence]) -> tuple[list[Fork], list[Sequence]]:
        """The followers who draw along with these leaders, and those for whom there is no page: they leave."""
        forks, left = list[Fork](), list[Sequence]()
        for leader in leaders:
            for follower in leader.followers:
                page = -1
                if leader.prompt_length % self.pages.size:
                    if self.pages.available <= len(self.running) + len(forks):
                        self.seats.leave(follower)
                        left.append(follower)
                        continue
                    page = self.pages.take()
                forks.append(Fork(leader, follower, page))
            leader.followers = []
        return forks, left

    def led(self, leader: Sequence) -> None:
        """A prompt is computed: its last page can be found from now on."""
        pages, size = self.pages, self.pages.size
        if self._leaders.get(leader.key) is leader:
            del self._leaders[leader.key]
        whole = (leader.prompt_length - 1) // size
        if pages.share and leader.epoch == pages.epoch:
            node = leader.nodes[whole - 1] if whole else ROOT
            pages.enter(node, leader.tokens[whole * size : leader.prompt_length], leader.pages[whole])

    def fork(self, fork: Fork) -> None:
        """Share the leader's prompt: full pages as they are, the last one copied."""
        leader, follower, page = fork
        whole = leader.prompt_length // self.pages.size
        follower.pages = leader.pages[:whole]
        self.pages.hold(follower.pages)
        if page >= 0:
            follower.pages.append(page)
            self.pages.copies[page] = leader.pages[whole]
        follower.nodes = leader.nodes[:whole]
        follower.epoch = leader.epoch
        self.seats.copies[follower.seat] = leader.seat
        self._sit(follower, leader.prompt_length)
        # Its first token has been drawn along with its leader's.
        self.seats.length_S[follower.seat] += 1
        self.seats.token_S[follower.seat] = -1

    def _sit(self, sequence: Sequence, computed: int) -> None:
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = computed
            sequence.seated = self._clock()
        self.counters.cached_tokens += computed
        self.seats.begin(sequence, computed, self.pages.size)
        insort(self.running, sequence, key=rank_of)
        self._seats_R = None
        self.changes += 1
        if sequence.dependent:
            self.dependents.add(sequence)

    # -- staying ----------------------------------------------------------------------------

    def grow(self, sequence: Sequence) -> None:
        """One more page; there must be one."""
        self.seats.grow(sequence, self.pages.take(), self.pages.size)

    def enter(self, sequence: Sequence, upto: int) -> None:
        """Let the full pages among the first ``upto`` tokens be found."""
        pages, size, nodes = self.pages, self.pages.size, sequence.nodes
        if not pages.share or sequence.epoch != pages.epoch:
            return
        for i in range(len(nodes), upto // size):
            tokens = sequence.tokens[i * size : (i + 1) * size]
            nodes.append(pages.enter(nodes[-1] if nodes else ROOT, tokens, sequence.pages[i]))

    # -- going ------------------------------------------------------------------------------

    def leave(self, sequence: Sequence) -> list[Sequence]:
        """Give back pages and seat; returns its followers, who must find another way."""
        del self.running[bisect_left(self.running, sequence.rank, key=rank_of)]
        self._seats_R = None
        self.changes += 1
        self.dependents.discard(sequence)
        self._save_routes(sequence)
        self.pages.drop(sequence.pages)
        self.seats.leave(sequence)
        sequence.pages, sequence.nodes = [], []
        if self._leaders.get(sequence.key) is sequence:
            del self._leaders[sequence.key]
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            self.seats.leave(follower)
        return followers

    def desert(self, follower: Sequence) -> None:
        """Stop waiting for a leader."""
        leader = next(one for one in self.running if follower in one.followers)
        leader.followers.remove(follower)
        self.seats.leave(follower)

    def _save_routes(self, sequence: Sequence) -> None:
        """Keep the experts of each token as they were when it was first computed: the next was drawn from that."""
        if self.routes is None or (sequence.fresh and not sequence.reason):
            return
        saved_TLx = self.routes.none_TLx if sequence.routed_TLx is None else sequence.routed_TLx
        known = min(int(self.seats.computed_S[sequence.seat]), len(sequence.tokens) - 1)
        end = max(known, len(saved_TLx))
        more_TLx = self.routes.read(sequence.pages, len(saved_TLx), end, self.pages.copies)
        sequence.routed_TLx = np.concatenate((saved_TLx, more_TLx))

    def check(self) -> None:
        """Assert that the books balance."""
        seats, running, seated = self.seats, self.running, list(self.seated())
        self.pages.check([page for sequence in running for page in sequence.pages])
        assert seats.free + len(seated) == seats.count
        assert all(seats.holders[one.seat] is one for one in seated)
        assert sum(one is not None for one in seats.holders) == len(seated)
        assert int(seats.ends_V.sum()) == sum(len(one.ends) for one in seated)
        assert [one.rank for one in running] == sorted(one.rank for one in running)
        for one in running:
            assert seats.room_S[one.seat] == len(one.pages) * self.pages.size >= seats.computed_S[one.seat]
            assert seats.pages_SP[one.seat, : len(one.pages)].tolist() == one.pages
            assert len(one.tokens) <= seats.length_S[one.seat] <= one.limit
        assert set(self._leaders.values()) <= set(running)
        assert self.dependents == {one for one in running if one.dependent}

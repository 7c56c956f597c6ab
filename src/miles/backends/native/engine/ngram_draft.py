"""N-gram drafts without a model: tokens that followed the same context in the prompt or in its other samples.

An RL loop samples each prompt several times at once and again in later epochs. All sequences of a prompt form one
history; the n-gram a request ends with is looked up in it, the longest match wins, and what followed there is drafted.
What else followed other matches are branches. Lookup is by hash chains, as compressors have them: the last two tokens
give the latest places, newest first, and each is compared backwards. Most pairs of tokens have one place only, so a
pair and a place are one integer each.

Indexing a token takes the host as long as anything else it does for the token in a step. So sequences are only held
until drafts are looked up, and what would have been drafted is measured by a linear search, which takes a fiftieth.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from miles.backends.native.engine.draft_tree import DraftBranch
from miles.backends.native.engine.forward_batch import ForwardBatch
from miles.backends.native.engine.req import Req

# Tokens that must match before a draft is made, and beyond which a longer match says nothing more.
MIN_MATCH, MAX_MATCH = 2, 24
# Latest places of a pair of tokens that are compared.
_MAX_PLACES = 16
# Earlier responses kept for each prompt.
_MAX_SEQUENCES = 64
# Time of a lookup and of choosing and counting its tokens; of a linear search, by its tokens, and the most of them.
_LOOKUP_SECONDS = 2e-5
_SEARCH_SECONDS, _SEARCH_TOKEN_SECONDS = 5e-6, 2e-8
_MAX_SEARCHED = 4096
# The most tokens that are indexed in a step; a request whose history is not indexed yet has no draft in it.
_MAX_INDEXED = 4096
# Bits of a token, and of a position in a sequence.
_BITS = 32
_END_MASK = (1 << _BITS) - 1


class DraftedTokens(NamedTuple):
    """Drafted tokens, how many tokens of context matched, and branches, the most likely first."""

    tokens: Sequence[int]
    match: int
    branches: Sequence[DraftBranch] = ()

    @property
    def bucket(self) -> int:
        """The class of matches whose acceptance is measured together: lengths 2, 3, 4-7, 8-15, 16 and more.

        >>> [DraftedTokens((), match).bucket for match in (2, 3, 4, 7, 8, 24)]
        [0, 1, 2, 2, 3, 4]
        """
        return self.match - 2 if self.match < 4 else self.match.bit_length() - 1


NOT_INDEXED = DraftedTokens((), MIN_MATCH)
"""No draft yet: it says nothing about whether the request repeats something."""


@dataclass(slots=True)
class HistorySequence:
    """The tokens of a request, from ``first`` on, of which those before ``indexed`` are indexed.

    The list is the request's own: it grows while the request is ``running``. ``counted`` is its length when it was
    added last.
    """

    tokens: list[int]
    first: int
    indexed: int
    counted: int = 0
    running: bool = True


class PromptHistory:
    """The token sequences of one prompt, with the places of every pair of tokens in them.

    A sequence is held, not copied, and indexed at the next ``find``. ``_added`` are the requests to be indexed then.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, HistorySequence] = {}
        self._places: dict[int, int | list[int]] = {}
        self._added: set[int] = set()
        self.num_tokens = 0
        self.num_ended = 0

    def add(self, number: int, tokens: list[int], prompt_length: int, first: int = 0, *, running: bool = False) -> None:
        """Hold the tokens of request ``number`` from ``first`` on; those of the prompt for its first request only."""
        sequence = self._sequences.get(number)
        if sequence is None:
            first = max(0, prompt_length - 1) if self._sequences else first
            sequence = self._sequences[number] = HistorySequence(tokens, first, first)
        self.num_tokens += len(tokens) - sequence.counted
        self.num_ended += sequence.running and not running
        sequence.counted, sequence.running = len(tokens), running
        self._added.add(number)
        if len(self._sequences) > _MAX_SEQUENCES:
            # The first stays: it is the one that has the prompt. A running one would come again at once.
            others = islice(self._sequences.items(), 1, None)
            ended = next((other for other, each in others if not each.running), None)
            if ended is not None:
                self.num_tokens -= self._sequences.pop(ended).counted
                self._added.discard(ended)

    def holds(self, number: int) -> bool:
        return number in self._sequences

    def find(self, number: int, most: int, num_branches: int = 1) -> DraftedTokens | None:
        """Return what followed the longest earlier match of the end of a sequence, at most ``most`` tokens.

        With several ``num_branches``, what else followed other matches leaves it in branches: those of the longest
        match first, then the newest.
        """
        self.index(number)
        tokens = self._sequences[number].tokens
        last = len(tokens) - 1
        found: list[tuple[int, list[int]]] = []
        places = self._places.get(tokens[last - 1] << _BITS | tokens[last], ())
        for place in (places,) if isinstance(places, int) else reversed(places):
            other, end = place >> _BITS, place & _END_MASK
            sequence = self._sequences.get(other)
            if sequence is None or end + 1 >= len(sequence.tokens) or (other == number and end >= last):
                continue
            match = _count_equal(tokens, last, sequence.tokens, end)
            found.append((match, sequence.tokens[end + 1 : end + 1 + most]))
            if match >= MAX_MATCH and num_branches == 1:
                break
        return _choose_longest(found, num_branches)

    def index(self, number: int, most: int = sys.maxsize) -> int:
        """Index a request's tokens, those of requests added since, and at most ``most``; return how many were."""
        self._added.add(number)
        count = 0
        for added in sorted(self._added):
            count += self._index(added, most - count)
            if self._sequences[added].indexed < len(self._sequences[added].tokens):
                break
            self._added.discard(added)
        return count

    def is_indexed(self) -> bool:
        """Return whether ``index`` has indexed all tokens that it was to."""
        return not self._added

    def search(self, number: int, length: int, most: int) -> DraftedTokens | None:
        """Return what ``find`` would have returned when a sequence had ``length`` tokens, by linear search.

        Of other sequences the newest are read.
        """
        own = self._sequences[number].tokens
        last = length - 1
        found = [
            (_count_equal(own, last, tokens, end), tokens[end + 1 : min(end + 1 + most, stop + 1)])
            for tokens, first, stop in self._iter_searched(number, last)
            for end in _find_pair(tokens, first, stop, own[last - 1], own[last])
        ]
        return _choose_longest(found, 1)

    def count_searched(self) -> int:
        """Return about how many tokens a search reads."""
        return min(self.num_tokens, _MAX_SEARCHED)

    def _iter_searched(self, number: int, last: int) -> Iterator[tuple[list[int], int, int]]:
        """Yield the sequences to search, and from where to where: the own one up to its ``last`` token, then others."""
        left = _MAX_SEARCHED
        for other in (number, *reversed(self._sequences)):
            if left <= 0:
                return
            sequence = self._sequences[other]
            stop = last if other == number else len(sequence.tokens) - 1
            first = max(sequence.first, stop - left)
            left -= max(0, stop - first)
            yield sequence.tokens, first, stop

    def _index(self, number: int, most: int) -> int:
        """Index at most ``most`` tokens of a sequence that are not indexed yet; return how many were."""
        sequence = self._sequences[number]
        tokens, known_places = sequence.tokens, self._places
        start = sequence.indexed
        sequence.indexed = min(len(tokens), start + most)
        for end in range(max(start, 1), sequence.indexed):
            pair, place = tokens[end - 1] << _BITS | tokens[end], number << _BITS | end
            places = known_places.setdefault(pair, place)
            if isinstance(places, list):
                places.append(place)
                if len(places) > _MAX_PLACES:
                    del places[0]
            elif places != place:
                known_places[pair] = [places, place]
        return sequence.indexed - start


def _find_pair(tokens: list[int], first: int, stop: int, before: int, token: int) -> Iterable[int]:
    """Return the last places before ``stop`` where ``token`` follows ``before``, newest first."""
    places: deque[int] = deque(maxlen=_MAX_PLACES)
    try:
        while True:
            first = tokens.index(token, first + 1, stop)
            if tokens[first - 1] == before:
                places.append(first)
    except ValueError:
        return reversed(places)


def _choose_longest(found: list[tuple[int, list[int]]], num_branches: int) -> DraftedTokens | None:
    """Return what followed the longest match, and in branches what followed others."""
    if not found:
        return None
    found.sort(key=lambda place: -place[0])
    best, *others = (tokens for _, tokens in found)
    return DraftedTokens(best, found[0][0], find_branches(best, others, num_branches - 1))


def find_branches(chain: Sequence[int], others: Iterable[Sequence[int]], count: int) -> list[DraftBranch]:
    """Return at most ``count`` branches by which other drafts leave a chain, each with a first token of its own.

    >>> find_branches([5, 6, 7], [[5, 6], [5, 8, 9], [5, 8, 4], [3]], 2)
    [DraftBranch(fork=1, tokens=[8, 9]), DraftBranch(fork=0, tokens=[3])]
    """
    branches: dict[tuple[int, int], DraftBranch] = {}
    for other in others if count else ():
        fork = next((i for i, pair in enumerate(zip(chain, other, strict=False)) if pair[0] != pair[1]), -1)
        if fork >= 0:
            branches.setdefault((fork, other[fork]), DraftBranch(fork, other[fork:]))
        if len(branches) == count:
            break
    return list(branches.values())


def _count_equal(left: Sequence[int], i: int, right: Sequence[int], j: int) -> int:
    """Return how many tokens are equal, backwards from two places, at most MAX_MATCH; the last two are."""
    count, most = 2, min(i + 1, j + 1, MAX_MATCH)
    while count < most and left[i - count] == right[j - count]:
        count += 1
    return count


class NgramDrafter:
    """Histories of prompts, the least recently used of which are forgotten beyond ``max_tokens`` tokens.

    A draft has at most ``num_branches`` branches, one of which is its chain.
    """

    num_buckets = DraftedTokens((), MAX_MATCH).bucket + 1
    can_replay = True

    def __init__(self, max_tokens: int, num_branches: int = 1) -> None:
        self._max_tokens = max_tokens
        self._num_branches = num_branches
        self._num_tokens = 0
        self._histories: OrderedDict[bytes, PromptHistory] = OrderedDict()

    @property
    def num_prompts(self) -> int:
        return len(self._histories)

    def observe(self, req: Req) -> bool:
        """Hold the tokens of a request that starts or ends; return whether it repeats a prompt with ended samples."""
        history = self._histories.get(req.prompt_key)
        if history is None:
            history = self._histories[req.prompt_key] = PromptHistory()
        else:
            self._histories.move_to_end(req.prompt_key)
        repeats = history.num_ended > 0 and not history.holds(req.number)
        before = history.num_tokens
        # Tokens of images stand for other content than they name.
        first = 0 if req.images is None else req.images.end
        history.add(req.number, req.tokens, req.prompt_length, first, running=not req.finish_kind)
        self._num_tokens += history.num_tokens - before
        while self._num_tokens > self._max_tokens and len(self._histories) > 1:
            _, oldest = self._histories.popitem(last=False)
            self._num_tokens -= oldest.num_tokens
        return repeats

    def draft(self, reqs: Sequence[Req], lengths: Sequence[int]) -> list[DraftedTokens | None]:
        """Return a draft of each request's next tokens, at most so many; None without a match.

        It is ``NOT_INDEXED`` for a request whose history is not indexed yet.
        """
        drafts: list[DraftedTokens | None] = []
        left = _MAX_INDEXED
        for req, length in zip(reqs, lengths, strict=True):
            if not length or len(req.tokens) < MIN_MATCH:
                drafts.append(None)
                continue
            history = self._get_history(req)
            left -= history.index(req.number, left)
            found = history.find(req.number, length, self._num_branches) if history.is_indexed() else NOT_INDEXED
            drafts.append(found)
        return drafts

    def prepare(self, batch: ForwardBatch, *, drafted: bool, needed: bool) -> None:
        """Do nothing: tokens are all there is to know."""

    def estimate_seconds(self, num_reqs: int, length: int) -> float:
        """Return the time of so many lookups."""
        return num_reqs * _LOOKUP_SECONDS

    def replay(self, req: Req, count: int) -> DraftedTokens | None:
        """Return what would have been drafted before the last ``count`` tokens of a request."""
        length = len(req.tokens) - count
        if length < MIN_MATCH:
            return None
        return self._get_history(req).search(req.number, length, count)

    def estimate_replay_seconds(self, req: Req) -> float:
        """Return the time of a replay of a request."""
        return _SEARCH_SECONDS + _SEARCH_TOKEN_SECONDS * self._get_history(req).count_searched()

    def _get_history(self, req: Req) -> PromptHistory:
        """Return the history of a request's prompt, which holds the request."""
        history = self._histories.get(req.prompt_key)
        if history is None or not history.holds(req.number):
            self.observe(req)
        return self._histories[req.prompt_key]

"""N-gram drafts without a model: tokens that followed the same context in the prompt or in its other samples.

An RL loop samples each prompt several times at once and again in later epochs. All sequences of a prompt form one
history; the n-gram a request ends with is looked up in it, the longest match wins, and what followed there is drafted.
What else followed other matches are branches. Lookup is by hash chains, as compressors have them: the last two tokens
give the latest places, newest first, and each is compared backwards. Most pairs of tokens have one place only, so a
pair and a place are one integer each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
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
_LOOKUP_SECONDS = 1e-5
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


class PromptHistory:
    """The token sequences of one prompt, with the places of every pair of tokens in them.

    A running request's own token list is held, not copied; its new tokens are indexed at the next ``add``.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, tuple[list[int], int]] = {}
        self._places: dict[int, int | list[int]] = {}
        self.num_tokens = 0

    def add(self, number: int, tokens: list[int], prompt_length: int, first: int = 0) -> None:
        """Index the tokens of request ``number`` from ``first`` on that are not indexed yet.

        The prompt is indexed for its first request only.
        """
        known = self._sequences.get(number)
        indexed = known[1] if known is not None else first if not self._sequences else max(0, prompt_length - 1)
        known_places = self._places
        for end in range(max(indexed, 1), len(tokens)):
            pair, place = tokens[end - 1] << _BITS | tokens[end], number << _BITS | end
            places = known_places.setdefault(pair, place)
            if isinstance(places, list):
                places.append(place)
                if len(places) > _MAX_PLACES:
                    del places[0]
            elif places != place:
                known_places[pair] = [places, place]
        self._sequences[number] = (tokens, len(tokens))
        self.num_tokens += len(tokens) - (0 if known is None else indexed)
        if len(self._sequences) > _MAX_SEQUENCES:
            # The first stays: it is the one whose prompt was indexed.
            number = next(islice(self._sequences, 1, None))
            self.num_tokens -= self._sequences.pop(number)[1]

    def find(
        self, tokens: Sequence[int], number: int, most: int, num_branches: int = 1, length: int | None = None
    ) -> DraftedTokens | None:
        """Return what followed the longest earlier match of the sequence's end, at most ``most`` tokens.

        With a ``length`` the sequence ends there, and nothing of it behind that is used. With several
        ``num_branches``, what else followed other matches leaves it in branches: those of the longest match first, then
        the newest.
        """
        last = (len(tokens) if length is None else length) - 1
        found: list[tuple[int, list[int], int]] = []
        places = self._places.get(tokens[last - 1] << _BITS | tokens[last], ())
        for place in (places,) if isinstance(places, int) else reversed(places):
            other, end = place >> _BITS, place & _END_MASK
            entry = self._sequences.get(other)
            if entry is None or end + 1 >= len(entry[0]) or (other == number and end >= last):
                continue
            match = _count_equal(tokens, last, entry[0], end)
            found.append((match, entry[0], end + 1))
            if match >= MAX_MATCH and num_branches == 1:
                break
        if not found:
            return None
        found.sort(key=lambda place: -place[0])
        best, *others = (sequence[first : first + most] for _, sequence, first in found)
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

    def observe(self, req: Req) -> None:
        """Index the new tokens of a request."""
        history = self._histories.get(req.prompt_key)
        if history is None:
            history = self._histories[req.prompt_key] = PromptHistory()
        else:
            self._histories.move_to_end(req.prompt_key)
        before = history.num_tokens
        # Tokens of images stand for other content than they name.
        history.add(req.number, req.tokens, req.prompt_length, 0 if req.images is None else req.images.end)
        self._num_tokens += history.num_tokens - before
        while self._num_tokens > self._max_tokens and len(self._histories) > 1:
            _, oldest = self._histories.popitem(last=False)
            self._num_tokens -= oldest.num_tokens

    def draft(self, reqs: Sequence[Req], lengths: Sequence[int]) -> list[DraftedTokens | None]:
        """Return a draft of each request's next tokens, at most so many; None without a match."""
        return [self._draft_one(req, length) if length else None for req, length in zip(reqs, lengths, strict=True)]

    def prepare(self, batch: ForwardBatch, *, drafted: bool, needed: bool) -> None:
        """Do nothing: tokens are all there is to know."""

    def estimate_seconds(self, num_reqs: int, length: int) -> float:
        """Return the time of so many lookups."""
        return num_reqs * _LOOKUP_SECONDS

    def replay(self, req: Req, count: int) -> DraftedTokens | None:
        """Return what would have been drafted before the last ``count`` tokens of a request."""
        self.observe(req)
        length = len(req.tokens) - count
        if length < MIN_MATCH:
            return None
        return self._histories[req.prompt_key].find(req.tokens, req.number, count, length=length)

    def _draft_one(self, req: Req, length: int) -> DraftedTokens | None:
        self.observe(req)
        if len(req.tokens) < MIN_MATCH:
            return None
        return self._histories[req.prompt_key].find(req.tokens, req.number, length, self._num_branches)

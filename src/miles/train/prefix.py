"""Samples that begin alike, laid out as a tree: what they share is read once, and each goes on from there.

``_T`` tokens of the tree, ``_P`` tokens of all samples, each for itself, one sample after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import torch
from numpy.typing import NDArray

from miles.core.errors import UsageError
from miles.kernels.arithmetic import exact
from miles.kernels.exact.packed import ExactPackedAttend, ExactSegmentAttend
from miles.kernels.segments import Runs, Segment, SegmentAttend
from miles.kernels.varlen import PackedAttend
from miles.models.sharing import misfit
from miles.models.spec import DecoderSpec

LEAST = 8
"""Fewer tokens than this are read again by each sample: every fork costs attention a call or a row of its table."""
# So many prompts for every part can be dealt out evenly as they are.
_MANY = 4


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of tokens that goes on where stretch ``after`` ends; one that begins a sequence has None."""

    length: int
    after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """What a model reads of one sample. Only those of one ``prompt`` share; experts to replay must be alike too."""

    prompt: int
    tokens: NDArray[np.int32]
    routed: NDArray[np.integer] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """``ends`` says in which stretch each sample ends; its tokens are those of the stretches up to there.

    ``kept_T`` are the tokens of the tree among those of all samples, and ``slot_P`` says where in the tree each lies.
    """

    stretches: tuple[Stretch, ...]
    ends: tuple[int, ...]
    kept_T: NDArray[np.int64]
    slot_P: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Samples that go into one micro-batch together, and how many tokens they are there."""

    members: tuple[int, ...]
    tokens: int


# -- growing --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Node:
    """The tokens ``start`` to ``end`` of sample ``of``, after node ``after``."""

    of: int
    start: int
    end: int
    after: int | None


class _Growth:
    """Nodes as they are found, parents before children, and the node in which each sample ends."""

    def __init__(self, paths: Sequence[Path], least: int) -> None:
        self.paths, self.least = paths, least
        self.nodes: list[_Node] = []
        self.ends: dict[int, int] = {}

    def grow(self, members: Sequence[int], start: int, after: int | None) -> None:
        """Samples that are alike up to ``start`` and go on after node ``after``."""
        first = members[0]
        common = min(self._parting(first, i, start) for i in members)
        if len(members) > 1 and common - start < self.least:
            # Too few to be shared: whoever goes on together tries again, and what ends here is each for itself.
            for part in self._parts(members, common):
                for some in [part] if len(self.paths[part[0]]) > common else [[i] for i in part]:
                    self.grow(some, start, after)
            return
        ending = [i for i in members if len(self.paths[i]) == common]
        node = len(self.nodes)
        self.nodes.append(_Node(first, start, common, after))
        self.ends |= dict.fromkeys(ending, node)
        for part in self._parts([i for i in members if i not in ending], common):
            self.grow(part, common, node)

    def _parting(self, a: int, b: int, start: int) -> int:
        """Where two samples that are alike up to ``start`` part."""
        one, other = self.paths[a], self.paths[b]
        end = min(len(one), len(other))
        differ = one.tokens[start:end] != other.tokens[start:end]
        if one.routed is not None or other.routed is not None:
            if one.routed is None or other.routed is None:
                return start
            differ |= (one.routed[start:end] != other.routed[start:end]).reshape(end - start, -1).any(1)
        return start + int(differ.argmax()) if differ.any() else end

    def _parts(self, members: Sequence[int], at: int) -> list[list[int]]:
        """By what comes at ``at``, in the order of each part's first; those that end there are one part."""
        parts: dict[object, list[int]] = {}
        for i in members:
            path = self.paths[i]
            key: object = None
            if len(path) > at:
                key = int(path.tokens[at]), None if path.routed is None else path.routed[at].tobytes()
            parts.setdefault(key, []).append(i)
        return list(parts.values())


def _grown(paths: Sequence[Path], least: int) -> _Growth:
    assert least > 0
    growth = _Growth(paths, least)
    prompts: dict[int, list[int]] = {}
    for number, path in enumerate(paths):
        prompts.setdefault(path.prompt, []).append(number)
    for members in prompts.values():
        growth.grow(members, 0, None)
    return growth


def tree_of(paths: Sequence[Path], *, least: int = LEAST) -> Tree:
    """The samples with everything read once that at least two of a prompt begin with, token for token.

    They fork wherever ``least`` tokens or more were alike since the last fork.
    """
    growth = _grown(paths, least)
    offsets = [0, *accumulate(map(len, paths))]
    stretches = tuple(Stretch(node.end - node.start, node.after) for node in growth.nodes)
    ends = tuple(growth.ends[i] for i in range(len(paths)))
    kept = [np.arange(offsets[n.of] + n.start, offsets[n.of] + n.end) for n in growth.nodes]
    return Tree(
        stretches=stretches,
        ends=ends,
        kept_T=np.concatenate(kept) if kept else np.empty(0, np.int64),
        slot_P=slots_of(stretches, ends),
    )


def slots_of(stretches: Sequence[Stretch], ends: Sequence[int]) -> NDArray[np.int64]:
    """Where in a tree each token of each sample lies, one sample after the other."""
    runs = runs_of(stretches)
    found = [np.arange(first, first + n) for end in ends for first, n in runs[end]]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def branches_of(stretches: Sequence[Stretch], ends: Sequence[int]) -> list[int]:
    """The stretches on the way to any of ``ends``, ascending."""
    kept: set[int] = set()
    for end in ends:
        at: int | None = end
        while at is not None and at not in kept:
            kept.add(at)
            at = stretches[at].after
    return sorted(kept)


# -- packing --------------------------------------------------------------------------------


def cost(paths: Sequence[Path], *, least: int = LEAST) -> int:
    """How many tokens the samples are in one micro-batch, what they share counted once."""
    return sum(node.end - node.start for node in _grown(paths, least).nodes)


def bundles(
    paths: Sequence[Path], *, limit: int, parts: int = 1, together: int = 1, least: int = LEAST
) -> list[Bundle]:
    """Samples in units that are worth packing as one: those of a prompt, ``limit`` tokens at most.

    Where few prompts are to be dealt out in ``parts``, units are smaller: what is read twice costs less than a rank
    that waits. Neighbours of one prompt stay neighbours, and ``together`` at a time they are not parted: those that are
    longer than ``limit`` nevertheless are a unit of their own.

    >>> same = np.arange(10, dtype=np.int32)
    >>> bundles([Path(prompt=0, tokens=same), Path(prompt=0, tokens=same[:9])], limit=10)
    [Bundle(members=(0, 1), tokens=10)]
    """
    order = sorted(range(len(paths)), key=lambda i: paths[i].prompt)
    whole = [list(members) for _, members in groupby(order, key=lambda i: paths[i].prompt)]

    def priced(members: list[int]) -> Bundle:
        return Bundle(members=tuple(members), tokens=cost([paths[i] for i in members], least=least))

    waiting = [priced(members) for members in reversed(whole)]
    if parts > 1 and len(whole) < _MANY * parts:
        limit = min(limit, -(-sum(b.tokens for b in waiting) // (2 * parts)))
    out: list[Bundle] = []
    while waiting:
        bundle = waiting.pop()
        members = list(bundle.members)
        if bundle.tokens <= limit or len(members) <= together:
            out.append(bundle)
        else:
            half = -(-len(members) // (2 * together)) * together
            waiting += [priced(members[half:]), priced(members[:half])]
    return out


# -- reading --------------------------------------------------------------------------------


def runs_of(stretches: Sequence[Stretch]) -> list[Runs]:
    """Where the tokens up to the end of each stretch lie."""
    starts = [0, *accumulate(s.length for s in stretches)]
    runs: list[Runs] = []
    for stretch, start in zip(stretches, starts, strict=False):
        assert stretch.after is None or stretch.after < len(runs), "a stretch continues one before it"
        past = () if stretch.after is None else runs[stretch.after]
        runs.append((*past, (start, stretch.length)))
    return runs


def attend_of(
    lengths: Sequence[int], stretches: Sequence[Stretch], device: torch.device
) -> PackedAttend | SegmentAttend | ExactPackedAttend | ExactSegmentAttend:
    """Attention over a micro-batch: over its tree where it has one, else over sequences of ``lengths``."""
    if not stretches:
        return ExactPackedAttend(lengths, device) if exact() else PackedAttend(lengths, device)
    segments = [Segment(s.length, each) for s, each in zip(stretches, runs_of(stretches), strict=True)]
    return ExactSegmentAttend(segments, device) if exact() else SegmentAttend(segments, device)


def refuse(spec: DecoderSpec, stretches: Sequence[Stretch]) -> None:
    """Complain about a tree that a model of ``spec`` cannot read."""
    problem = misfit(spec) if stretches else None
    if problem is not None:
        raise UsageError(f"--share-prefix does not go with this model: {problem}; leave it out.")

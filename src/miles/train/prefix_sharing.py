"""Prefix sharing in training: samples of one prompt as a prefix tree, whose common prefixes are computed once.

``_T`` tokens of the tree, ``_P`` tokens of all samples concatenated, without sharing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import numpy as np
import torch
from numpy.typing import NDArray

from miles.core.errors import MilesError, UsageError
from miles.kernels.attention.bidirectional_spans import BidirectionalSpansBackend
from miles.kernels.attention.indexer_replay import IndexerSelections
from miles.kernels.attention.tree import KeyRuns, Segment, TreeAttentionBackend, concatenate_ranges
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.batch_invariant.packed_attention import BatchInvariantTreeBackend, BatchInvariantVarlenBackend
from miles.kernels.numerics import Numerics
from miles.models.capabilities import check_prefix_sharing
from miles.models.spec import DecoderSpec

MIN_SHARED_TOKENS = 8
"""Shorter common prefixes are not shared: every fork costs an attention call or a row of its table."""
MIN_SHARED_NEAR_START = 4
"""The same for forks among the first ``_NEAR_START`` tokens, where a fork has few keys to gather."""
_NEAR_START = 32
# So many tokens are compared faster in Python than by numpy.
_SHORT_PATH = 64
# With so many prompts per data-parallel rank, whole prompts balance well enough.
_PROMPTS_PER_RANK = 4


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A run of tokens that continues node ``parent``; None for the start of a sequence."""

    length: int
    parent: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPath:
    """The input tokens of one sample. Only samples of one ``prompt`` share; replayed experts must be equal too.

    Where an image is, ``tokens`` are its keys (``core.media.prefix_keys``), so that other images are not shared.
    """

    prompt: int
    tokens: NDArray[np.int32 | np.int64]
    routed: NDArray[np.integer] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """``ends`` is the last node of each sample, whose tokens are those of the nodes on the path to it.

    ``kept_T`` are the tree's tokens among those of all samples, and ``slot_P`` is the position in the tree of each.
    """

    nodes: tuple[TreeNode, ...]
    ends: tuple[int, ...]
    kept_T: NDArray[np.int64]
    slot_P: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixBundle:
    """Samples of one prompt that are packed into one micro-batch together, and their number of tokens there."""

    members: tuple[int, ...]
    tokens: int
    tree: TreeBuilder = field(repr=False, compare=False)


# -- building the tree ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _BuildNode:
    """The tokens ``start`` to ``end`` of ``sample``, which continue node ``parent``."""

    sample: int
    start: int
    end: int
    parent: int | None


class TreeBuilder:
    """Nodes in order of discovery, parents before children, and the last node of each sample."""

    def __init__(self, paths: Sequence[TokenPath], min_shared: int | None) -> None:
        self.paths = paths
        self._min_shared = min_shared
        self.sizes = [len(path.tokens) for path in paths]
        self._lists = [
            path.tokens.tolist() if size <= _SHORT_PATH and path.routed is None else None
            for path, size in zip(paths, self.sizes, strict=True)
        ]
        self.nodes: list[_BuildNode] = []
        self.ends: dict[int, int] = {}

    def add(self, members: Sequence[int], start: int, parent: int | None) -> None:
        """Add samples that are equal up to ``start`` and continue node ``parent``."""
        first, sizes = members[0], self.sizes
        common = min([self._common_end(first, i, start) for i in members[1:]], default=sizes[first])
        if len(members) > 1 and common - start < self._get_min_shared(common):
            # Too few tokens to share: samples that continue together try again, and those that end here stay alone.
            for part in self._group_by_token(members, common):
                for subset in [part] if sizes[part[0]] > common else [[i] for i in part]:
                    self.add(subset, start, parent)
            return
        node = len(self.nodes)
        self.nodes.append(_BuildNode(first, start, common, parent))
        if len(members) == 1:
            self.ends[first] = node
            return
        self.ends |= dict.fromkeys((i for i in members if sizes[i] == common), node)
        for part in self._group_by_token([i for i in members if sizes[i] > common], common):
            self.add(part, common, node)

    def count_tokens(self) -> int:
        """Return the number of tokens in the tree."""
        return sum(node.end - node.start for node in self.nodes)

    def list_segments(self) -> list[tuple[int, int]]:
        """Return the positions of the first and behind the last token of each node."""
        return [(node.start, node.end) for node in self.nodes]

    def _get_min_shared(self, fork: int) -> int:
        """Return how many tokens must be shared before a fork at this position."""
        if self._min_shared is not None:
            return self._min_shared
        return MIN_SHARED_NEAR_START if fork <= _NEAR_START else MIN_SHARED_TOKENS

    def _common_end(self, a: int, b: int, start: int) -> int:
        """Return the end of the common prefix of two samples that are equal up to ``start``."""
        end = min(self.sizes[a], self.sizes[b])
        left_list, right_list = self._lists[a], self._lists[b]
        if left_list is not None and right_list is not None:
            while start < end and left_list[start] == right_list[start]:
                start += 1
            return start
        left, right = self.paths[a], self.paths[b]
        differ = left.tokens[start:end] != right.tokens[start:end]
        if left.routed is not None or right.routed is not None:
            if left.routed is None or right.routed is None:
                return start
            differ |= (left.routed[start:end] != right.routed[start:end]).reshape(end - start, -1).any(1)
        return start + int(differ.argmax()) if differ.any() else end

    def _group_by_token(self, members: Sequence[int], position: int) -> list[list[int]]:
        """Group samples by their token at ``position``, in order of appearance; those that end there are one group."""
        parts: dict[object, list[int]] = {}
        for i in members:
            path, tokens = self.paths[i], self._lists[i]
            key: object = None
            if self.sizes[i] > position:
                token = int(path.tokens[position]) if tokens is None else tokens[position]
                key = token, None if path.routed is None else path.routed[position].tobytes()
            parts.setdefault(key, []).append(i)
        return list(parts.values())


def _build(paths: Sequence[TokenPath], min_shared: int | None) -> TreeBuilder:
    assert min_shared is None or min_shared > 0
    builder = TreeBuilder(paths, min_shared)
    prompts: dict[int, list[int]] = {}
    for number, path in enumerate(paths):
        prompts.setdefault(path.prompt, []).append(number)
    for members in prompts.values():
        builder.add(members, 0, None)
    return builder


def build_prefix_tree(paths: Sequence[TokenPath], *, min_shared: int | None = None) -> PrefixTree:
    """Build the tree in which common prefixes of samples of one prompt occur once.

    Samples fork where at least ``min_shared`` tokens were equal since the last fork (MIN_SHARED_TOKENS if not given,
    MIN_SHARED_NEAR_START near the start).
    """
    return join_trees([_build(paths, min_shared)])


def join_trees(builders: Sequence[TreeBuilder]) -> PrefixTree:
    """Return the tree of the samples of several builders, one after the other, which share nothing."""
    nodes: list[TreeNode] = []
    ends: list[int] = []
    kept: list[tuple[int, int]] = []
    first_token = 0
    for builder in builders:
        first, offsets = len(nodes), [*accumulate(builder.sizes, initial=first_token)]
        nodes += [TreeNode(n.end - n.start, None if n.parent is None else n.parent + first) for n in builder.nodes]
        ends += [builder.ends[i] + first for i in range(len(builder.sizes))]
        kept += [(offsets[n.sample] + n.start, n.end - n.start) for n in builder.nodes]
        first_token = offsets[-1]
    return PrefixTree(
        nodes=tuple(nodes), ends=tuple(ends), kept_T=concatenate_ranges(kept), slot_P=compute_slots(nodes, ends)
    )


def compute_slots(nodes: Sequence[TreeNode], ends: Sequence[int]) -> NDArray[np.int64]:
    """Return the position in the tree of each token of each sample, concatenated."""
    runs = compute_runs(nodes)
    return concatenate_ranges([run for end in ends for run in runs[end]])


def collect_ancestors(nodes: Sequence[TreeNode], ends: Sequence[int]) -> list[int]:
    """Return the nodes on the paths to any of ``ends``, ascending."""
    ancestors: set[int] = set()
    for end in ends:
        node: int | None = end
        while node is not None and node not in ancestors:
            ancestors.add(node)
            node = nodes[node].parent
    return sorted(ancestors)


# -- packing --------------------------------------------------------------------------------


def count_tree_tokens(paths: Sequence[TokenPath], *, min_shared: int | None = None) -> int:
    """Return the number of tokens of the samples in one micro-batch, with common prefixes counted once."""
    return _build(paths, min_shared).count_tokens()


def bundle_by_prefix(
    paths: Sequence[TokenPath],
    *,
    limit: int,
    dp_size: int = 1,
    unit_size: int = 1,
    min_shared: int | None = None,
    fits: Callable[[Sequence[int]], bool] | None = None,
) -> list[PrefixBundle]:
    """Bundle the samples of a prompt for packing into one micro-batch, up to ``limit`` tokens.

    With few prompts for ``dp_size`` ranks bundles are smaller: computing a prefix twice costs less than a waiting
    rank. The order of a prompt's samples is kept, and every ``unit_size`` samples stay together, even if they are
    longer than ``limit``. ``fits`` says whether some samples may be one bundle for other reasons than their tokens.

    >>> same = np.arange(10, dtype=np.int32)
    >>> bundle_by_prefix([TokenPath(prompt=0, tokens=same), TokenPath(prompt=0, tokens=same[:9])], limit=10)
    [PrefixBundle(members=(0, 1), tokens=10)]
    """
    order = sorted(range(len(paths)), key=lambda i: paths[i].prompt)
    prompts = [list(members) for _, members in groupby(order, key=lambda i: paths[i].prompt)]

    def make_bundle(members: list[int]) -> PrefixBundle:
        tree = _build([paths[i] for i in members], min_shared)
        return PrefixBundle(members=tuple(members), tokens=tree.count_tokens(), tree=tree)

    waiting = [make_bundle(members) for members in reversed(prompts)]
    if dp_size > 1 and len(prompts) < _PROMPTS_PER_RANK * dp_size:
        limit = min(limit, -(-sum(b.tokens for b in waiting) // (2 * dp_size)))
    out: list[PrefixBundle] = []
    while waiting:
        bundle = waiting.pop()
        members = list(bundle.members)
        whole = bundle.tokens <= limit and (fits is None or fits(members))
        if whole or len(members) <= unit_size:
            out.append(bundle)
        else:
            half = -(-len(members) // (2 * unit_size)) * unit_size
            waiting += [make_bundle(members[half:]), make_bundle(members[:half])]
    return out


# -- attention over the tree ------------------------------------------------------------------


def compute_runs(nodes: Sequence[TreeNode]) -> list[KeyRuns]:
    """Return the positions of the tokens up to the end of each node, as runs."""
    starts = [0, *accumulate(node.length for node in nodes)]
    runs: list[KeyRuns] = []
    for node, start in zip(nodes, starts, strict=False):
        assert node.parent is None or node.parent < len(runs), "parents come before children"
        prefix = () if node.parent is None else runs[node.parent]
        runs.append((*prefix, (start, node.length)))
    return runs


def build_attention(
    lengths: Sequence[int],
    nodes: Sequence[TreeNode],
    device: torch.device,
    *,
    numerics: Numerics,
    visible_ends_T: NDArray[np.int64] | None = None,
    selections: IndexerSelections | None = None,
) -> (
    VarlenAttentionBackend
    | TreeAttentionBackend
    | BidirectionalSpansBackend
    | BatchInvariantVarlenBackend
    | BatchInvariantTreeBackend
):
    """Build the attention of a micro-batch: over its prefix tree if it has one, else over sequences of ``lengths``.

    ``visible_ends_T`` is one past the last position that each token attends to; None: attention is causal.
    ``selections`` replace what indexers of sparse attention select.
    """
    tree = nodes or tuple(TreeNode(length) for length in lengths)
    if visible_ends_T is not None:
        _check_uncut(tree, visible_ends_T)
    if not nodes and numerics.batch_invariant:
        return BatchInvariantVarlenBackend(lengths, device, visible_ends_T, selections)
    segments = [Segment(s.length, each) for s, each in zip(tree, compute_runs(tree), strict=True)]
    if numerics.batch_invariant:
        return BatchInvariantTreeBackend(segments, device, visible_ends_T=visible_ends_T, selections=selections)
    if nodes:
        causal = TreeAttentionBackend(segments, device, selections=selections)
    else:
        causal = VarlenAttentionBackend(lengths, device, selections)
    return causal if visible_ends_T is None else BidirectionalSpansBackend(causal, segments, visible_ends_T, device)


def _check_uncut(nodes: Sequence[TreeNode], visible_ends_T: NDArray[np.int64]) -> None:
    """MilesError if samples fork within an image whose tokens attend to each other in both directions."""
    lengths = np.array([node.length for node in nodes])
    keys = np.array([sum(n for _, n in runs) for runs in compute_runs(nodes)])
    if (visible_ends_T[lengths.cumsum()[lengths > 0] - 1] != keys[lengths > 0]).any():
        raise MilesError(
            "samples of a prompt have other routed experts within an image, whose tokens attend to each other; leave "
            "out --share-prefix."
        )


def check_supported(spec: DecoderSpec, nodes: Sequence[TreeNode]) -> None:
    """UsageError if a model of ``spec`` does not support prefix sharing."""
    problem = check_prefix_sharing(spec) if nodes else None
    if problem is not None:
        raise UsageError(f"--share-prefix does not support this model: {problem}; leave it out.")

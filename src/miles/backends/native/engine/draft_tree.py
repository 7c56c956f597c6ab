"""Draft trees: a chain of drafted tokens and branches that leave it, as one-token rows of a step.

Each drafted token is a row that starts one token later than the row before it. A branch has a block table of its own:
pages before the one it writes first are those of its request, that one is a copy, further ones are new. So no row needs
an attention mask. The copy is made before the step computes anything; tokens of the step that lie before the branch on
that page are computed once more for it (repeated rows).

Shapes: as in ``forward_batch``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from miles.backends.native.engine.request import Bools, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStates:
    """Where the sequences of a step read and write recurrent states: rows of the pool, request slots first.

    A drafted token continues the state after another row of the step, so those of less depth are computed first.
    """

    reads_B: Ints
    writes_B: Ints
    depths_B: Ints


class DraftBranch(NamedTuple):
    """Tokens in place of those of a chain behind its first ``fork`` tokens."""

    fork: int
    tokens: Sequence[int]


class DraftTree(NamedTuple):
    """Drafted tokens of one request: a chain, and branches. No two branches begin with the same token at one fork.

    The chain has a token behind each fork, with which no branch begins.
    """

    tokens: Sequence[int]
    branches: Sequence[DraftBranch] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + sum(len(branch.tokens) for branch in self.branches)

    @property
    def depth(self) -> int:
        """The most tokens that can be accepted at once."""
        return max(len(self.tokens), *(branch.fork + len(branch.tokens) for branch in self.branches), 0)


NO_DRAFTS = DraftTree(())


class DraftRows(NamedTuple):
    """Drafted tokens of rows: row i computes ``tokens[i]``, the ``offsets[i]``-th draft behind the request's tokens.

    Its draft is what the row ``back[i]`` rows before it must sample. ``branches`` are 0 for rows of the chain, and
    count from 1. Offset 0 of the chain is the request's last token, as without speculation; there the token is not
    used. ``back`` is 0 there, and in repeated rows of a branch, whose samples are not used.
    """

    offsets: Ints
    tokens: Ints
    back: Ints
    branches: Ints

    def take(self, rows: Ints) -> DraftRows:
        """Return some of the rows; all those of a request, or none."""
        return DraftRows(*(column[rows] for column in self))

    def pad(self, count: int) -> DraftRows:
        """Return these rows and ``count`` more without drafts."""
        return DraftRows(*(np.pad(column, (0, count)) for column in self))

    def trace(self, row: int) -> list[int]:
        """Return the drafted tokens up to a row, in order."""
        tokens: list[int] = []
        while step := int(self.back[row]):
            tokens.append(int(self.tokens[row]))
            row -= step
        return tokens[::-1]


def first_own_offset(computed: int, fork: int, page_size: int) -> int:
    """Return the offset of the first row that a branch computes itself, with ``computed`` tokens before the step."""
    return max(0, (computed + fork + 1) // page_size * page_size - computed)


def count_repeated_rows(computed: int, fork: int, page_size: int) -> int:
    """Return how many tokens before a branch are computed once more for it.

    >>> [count_repeated_rows(computed, 0, 16) for computed in (13, 14, 15)]
    [1, 1, 0]
    """
    return fork + 1 - first_own_offset(computed, fork, page_size)


def build_tree_rows(trees: Sequence[DraftTree], computed: Sequence[int], page_size: int) -> DraftRows:
    """Return the rows of requests that have computed so many tokens: each one's last token, chain, then branches."""
    rows = [row for tree, count in zip(trees, computed, strict=True) for row in _iter_tree_rows(tree, count, page_size)]
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return DraftRows(columns[0], columns[1], columns[2], columns[3])


def _iter_tree_rows(tree: DraftTree, computed: int, page_size: int) -> Iterator[tuple[int, int, int, int]]:
    yield 0, -1, 0, 0
    for offset, token in enumerate(tree.tokens, 1):
        yield offset, token, 1, 0
    row = 1 + len(tree.tokens)
    for number, (fork, tokens) in enumerate(tree.branches, 1):
        for offset in range(first_own_offset(computed, fork, page_size), fork + 1):
            yield offset, tree.tokens[offset - 1] if offset else -1, 0, number
            row += 1
        for i, token in enumerate(tokens):
            yield fork + 1 + i, token, 1 if i else row - fork, number
            row += 1


def build_draft_states(drafts_B: DraftRows, req_slots_B: Ints, num_slots: int) -> DraftStates:
    """Return the states of a step's rows: each request's first row has that of its slot, all others one of their own.

    Those are behind the ``num_slots`` of requests, in the order of rows.
    """
    rows_B = np.arange(len(req_slots_B))
    first_B = (drafts_B.offsets == 0) & (drafts_B.branches == 0)
    writes_B = np.where(first_B, req_slots_B, num_slots + np.cumsum(~first_B) - 1)
    reads_B = np.where(drafts_B.back > 0, writes_B[rows_B - drafts_B.back], req_slots_B)
    # A token that is computed once more for a branch reads what the chain's row of it reads.
    repeated = ((drafts_B.back == 0) & (drafts_B.offsets > 0)).nonzero()[0]
    owner_first_B = np.maximum.accumulate(np.where(first_B, rows_B, 0))
    reads_B[repeated] = reads_B[owner_first_B[repeated] + drafts_B.offsets[repeated]]
    return DraftStates(reads_B=reads_B, writes_B=writes_B, depths_B=drafts_B.offsets)


def find_accepted_drafts(drafts_D: DraftRows, tokens_D: Ints) -> Bools:
    """Return which rows' tokens follow their request's tokens: all drafts up to the row are what was sampled."""
    accepted_D = (drafts_D.back == 0) & (drafts_D.branches == 0)
    parents_D = np.arange(len(tokens_D)) - drafts_D.back
    correct_D = (drafts_D.back > 0) & (drafts_D.tokens == tokens_D[parents_D])
    for depth in range(1, int(drafts_D.offsets.max(initial=0)) + 1):
        rows = (correct_D & (drafts_D.offsets == depth)).nonzero()[0]
        accepted_D[rows] = accepted_D[parents_D[rows]]
    return accepted_D

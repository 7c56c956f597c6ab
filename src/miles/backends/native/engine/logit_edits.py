"""Logit edits of a step: penalties, grammar masks and biases of each sampled row, as if its drafts were sampled.

Shapes: as in ``forward_batch``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from miles.backends.native.engine.draft_tree import DraftBranch, DraftRows, DraftTree
from miles.backends.native.engine.forward_batch import LogitEdits
from miles.backends.native.engine.req import Req, pack_token_mask
from miles.backends.native.engine.req_slots import ReqSlots
from miles.backends.native.engine.request import BitWords, Constraint, Floats, Ints


def build_logit_edits(
    sampled_reqs: Sequence[Req], slots: ReqSlots, drafts_D: DraftRows | None = None
) -> LogitEdits | None:
    rows = [(row, req) for row, req in enumerate(sampled_reqs) if slots.has_edits_S[req.slot]]
    if not rows:
        return None
    offsets = [0] * len(sampled_reqs) if drafts_D is None else drafts_D.offsets.tolist()
    counts = {row: _count_tokens(row, req, drafts_D) for row, req in rows}
    lengths = {row: int(slots.length_S[req.slot]) + offsets[row] for row, req in rows}
    added = [edit for row, req in rows for edit in _iter_penalties(row, req, lengths[row], counts[row])]
    scaled = [
        (row, token, req.request.repetition_penalty)
        for row, req in rows
        if req.request.repetition_penalty != 1
        for token in counts[row]
    ]
    biased = [(row, token, bias) for row, req in rows for token, bias in req.request.logit_bias.items()]
    masks = [(row, mask_Z) for row, req in rows if (mask_Z := _get_mask(row, req, drafts_D)) is not None]
    add_rows_E, add_tokens_E, add_E = _to_columns(added)
    scale_rows_E, scale_tokens_E, scale_E = _to_columns(scaled)
    bias_rows_E, bias_tokens_E, bias_E = _to_columns(biased)
    return LogitEdits(
        add_rows_E=add_rows_E,
        add_tokens_E=add_tokens_E,
        add_E=add_E,
        scale_rows_E=scale_rows_E,
        scale_tokens_E=scale_tokens_E,
        scale_E=scale_E,
        mask_rows_K=np.array([row for row, _ in masks], np.int64),
        masks_KZ=np.array([mask for _, mask in masks], np.int32),
        bias_rows_E=bias_rows_E,
        bias_tokens_E=bias_tokens_E,
        bias_E=bias_E,
    )


def _count_tokens(row: int, req: Req, drafts_D: DraftRows | None) -> Mapping[int, int]:
    """Return how often each token was sampled before a row, as if its drafts were."""
    if drafts_D is None or req.token_counts is None or not drafts_D.back[row]:
        return req.token_counts or {}
    return req.token_counts + Counter(drafts_D.trace(row))


def _get_mask(row: int, req: Req, drafts_D: DraftRows | None) -> BitWords | None:
    """Return the grammar's mask of a row; None without a grammar, and for repeated rows."""
    if drafts_D is None or req.grammar_mask_Z is None:
        return req.grammar_mask_Z
    branch, offset = int(drafts_D.branches[row]), int(drafts_D.offsets[row])
    return req.draft_masks.get((branch, offset)) if branch or offset else req.grammar_mask_Z


def _iter_penalties(row: int, req: Req, length: int, counts: Mapping[int, int]) -> Iterator[tuple[int, int, float]]:
    request = req.request
    if request.frequency_penalty or request.presence_penalty:
        for token, count in counts.items():
            yield row, token, -(request.frequency_penalty * count + request.presence_penalty)
    if length - req.prompt_length < request.min_new_tokens:
        for token in req.banned_tokens:
            yield row, token, -np.inf


def _to_columns(triples: Sequence[tuple[int, int, float]]) -> tuple[Ints, Ints, Floats]:
    rows, tokens, values = zip(*triples, strict=True) if triples else ((), (), ())
    return np.array(rows, np.int64), np.array(tokens, np.int64), np.array(values, np.float32)


# -- grammars ---------------------------------------------------------------------------------


def cut_to_grammar(req: Req, tree: DraftTree) -> DraftTree:
    """Return the drafts that a request's grammar allows, and store the masks of their rows.

    A copy of the grammar's state is advanced along the chain and each branch. Drafts from the first on that the mask
    of its position forbids, or that would end the grammar, are dropped: no row could accept or follow them.
    """
    constraint, mask_Z = req.request.constraint, req.grammar_mask_Z
    req.draft_masks = {}
    if constraint is None or mask_Z is None:
        return tree
    states = [(constraint, mask_Z)]
    count = _walk(req, 0, 0, tree.tokens, states)
    branches: list[DraftBranch] = []
    for fork, tokens in tree.branches:
        if fork >= count:
            continue
        length = _walk(req, len(branches) + 1, fork, tokens, [states[fork]])
        if length:
            branches.append(DraftBranch(fork, tokens[:length]))
    return DraftTree(tree.tokens[:count], branches)


def _walk(req: Req, branch: int, fork: int, tokens: Sequence[int], states: list[tuple[Constraint, BitWords]]) -> int:
    """Advance from the last of ``states``, appending one for each token; return how many tokens are allowed."""
    for i, token in enumerate(tokens):
        constraint, mask_Z = states[-1]
        if not mask_Z[token >> 5] >> (token & 31) & 1:
            return i
        try:
            constraint = constraint.copy()
            constraint.advance(token)
            if constraint.is_finished():
                return i
            mask_Z = pack_token_mask(constraint.get_allowed_tokens(), req.vocab_size)
        except Exception:
            return i  # if the token is sampled, the request ends with this error
        states.append((constraint, mask_Z))
        req.draft_masks[branch, fork + i + 1] = mask_Z
    return len(tokens)

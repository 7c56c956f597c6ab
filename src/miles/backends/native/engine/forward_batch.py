"""ForwardBatch: one scheduled step as plain arrays, how it is built from request slots, and the step's output.

Shapes: T new tokens, B sequences, M pages of the longest one (block table), D sampled tokens, N scored
prompt tokens, V vocabulary, R rows with top-k log-probs, k of them, W (row, token) log-prob queries, E (row, token)
logit edits, K rows under a grammar mask, Z = V / 32 words of a mask, L MoE layers, x experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from miles.backends.native.engine.draft_tree import NO_DRAFTS, DraftRows, DraftStates, DraftTree, build_tree_rows
from miles.backends.native.engine.lora import LoraBatch
from miles.backends.native.engine.req import Req
from miles.backends.native.engine.req_slots import ReqSlots
from miles.backends.native.engine.request import BitWords, Bools, Floats, Ints, TokenLogprob, Uints
from miles.backends.native.engine.vision import VisionBatch, build_vision_batch
from miles.core.token_fields import INDEXER_TOPK, ROUTED_EXPERTS
from miles.core.types import Array, Version

_EMPTY = np.zeros(0, np.int64)
NO_COPIES: tuple[Ints, Ints] = (_EMPTY, _EMPTY)


# -- what a runner gets ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Sampling parameters per row: ``uniform_D`` goes through the inverse CDF; temperature 0 is greedy.

    ``has_filter_D`` marks the rows with a top-k, top-p or min-p.
    """

    temperature_D: Floats
    top_k_D: Ints
    top_p_D: Floats
    min_p_D: Floats
    has_filter_D: Bools
    uniform_D: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """Changes to the logits of sampled rows, applied in this order before the temperature.

    ``add_E`` is added (penalties); logits of ``scale_rows_E`` are divided by ``scale_E`` if positive, else multiplied;
    tokens whose bit in ``masks_KZ`` (lowest first) is 0 become impossible; ``bias_E`` is added.
    """

    add_rows_E: Ints
    add_tokens_E: Ints
    add_E: Floats
    scale_rows_E: Ints
    scale_tokens_E: Ints
    scale_E: Floats
    mask_rows_K: Ints
    masks_KZ: BitWords
    bias_rows_E: Ints
    bias_tokens_E: Ints
    bias_E: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobQueries:
    """Log-probs to return besides the sampled ones: the ``top_k`` of ``rows_R``, and the (row, token) pairs W.

    Rows are in ascending order.
    """

    top_k: int
    rows_R: Ints
    token_rows_W: Ints
    tokens_W: Ints

    def slice_rows(self, first: int, end: int) -> LogprobQueries:
        """Return the queries of rows ``first`` to ``end``, with row indices relative to ``first``."""
        lo, hi = np.searchsorted(self.rows_R, (first, end))
        left, right = np.searchsorted(self.token_rows_W, (first, end))
        return LogprobQueries(
            top_k=self.top_k,
            rows_R=self.rows_R[lo:hi] - first,
            token_rows_W=self.token_rows_W[left:right] - first,
            tokens_W=self.tokens_W[left:right],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScoring:
    """Log-probs (at temperature 1) of known tokens: ``tokens_N`` after the rows ``rows_N`` of the step."""

    rows_N: Ints
    tokens_N: Ints
    logprob_queries: LogprobQueries | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step: arrays and numbers only, so that it can be sent to other ranks as bytes.

    Sequence b has ``starts_B[b]`` tokens in the KV cache and computes ``counts_B[b]`` more; the first ``num_decodes``
    sequences compute one token each. Neighbours with the same ``group_B`` (-1 is none) start with the same
    ``shared_B`` tokens (whole pages); a sequence alone in its group shares 0. Token -1 means the token last sampled in
    the row's request slot. A token is sampled from each of ``rows_D`` for ``req_slots_D``; one row may serve several.
    ``page_copies`` and ``state_copies`` are (sources, targets), all done before anything is written.

    The features of ``vision`` replace the embeddings of some tokens. Rope positions are positions in the sequence,
    plus ``rope_offsets_B`` if there are any; ``rope_positions_3T`` (time, height, width) in place of these if some
    sequence has not computed all its images yet, and the model has M-RoPE. ``visible_ends_T`` is one past the last
    position that each new token attends to; None if all attend up to themselves.

    A drafted token is verified by a sequence of its own: it has the pages of its request or of a branch of its drafts,
    and starts one token later than the sequence before it. Keys are written before attention reads them, so it sees
    the drafts before it.

    ``draft_states`` are the recurrent states of a step with drafts, of a model that has some.

    A ``decode_only`` step has one token per sequence, each sampled in order, with nothing scored, queried or edited,
    and none of an image; it may have copies. Only such steps run as CUDA graphs.
    """

    tokens_T: Ints
    starts_B: Ints
    counts_B: Ints
    req_slots_B: Ints
    num_decodes: int
    block_table_BM: Ints
    shared_B: Ints
    group_B: Ints
    rows_D: Ints
    req_slots_D: Ints
    sampling: SamplingBatch
    page_copies: tuple[Ints, Ints] = NO_COPIES
    state_copies: tuple[Ints, Ints] = NO_COPIES
    draft_states: DraftStates | None = None
    logit_edits: LogitEdits | None = None
    logprob_queries: LogprobQueries | None = None
    prompt_scoring: PromptScoring | None = None
    vision: VisionBatch | None = None
    rope_offsets_B: Ints | None = None
    rope_positions_3T: Ints | None = None
    visible_ends_T: Ints | None = None
    lora: LoraBatch | None = None
    decode_only: bool = False


def compute_positions(batch: ForwardBatch | BatchRows) -> Ints:
    """Return the positions [T] of the new tokens in their sequences."""
    if batch.num_decodes == len(batch.starts_B):
        return batch.starts_B
    ends_B = np.cumsum(batch.counts_B)
    return np.arange(int(ends_B[-1])) + np.repeat(batch.starts_B - ends_B + batch.counts_B, batch.counts_B)


def compute_rope_positions(batch: ForwardBatch, positions_T: Ints) -> Ints:
    """Return the rope positions [T] or [3, T] of new tokens that have ``positions_T`` in their sequences."""
    if batch.rope_positions_3T is not None:
        return batch.rope_positions_3T
    if batch.rope_offsets_B is None:
        return positions_T
    return positions_T + np.repeat(batch.rope_offsets_B, batch.counts_B)


def compute_cache_locs(batch: ForwardBatch, positions_T: Ints, page_size: int) -> Ints:
    """Return the KV cache locations [T] the new tokens are written to."""
    rows = np.arange(len(batch.starts_B))
    owner_T = rows if batch.num_decodes == len(rows) else np.repeat(rows, batch.counts_B)
    return batch.block_table_BM[owner_T, positions_T // page_size] * page_size + positions_T % page_size


# -- what comes back ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobResults:
    """Answer to ``LogprobQueries``: tokens [R, k], most likely first, their log-probs, and those of the pairs."""

    tokens_Rk: Ints
    logprobs_Rk: Floats
    logprobs_W: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Output of a step: sampled tokens and log-probs, experts of every token, queried and prompt log-probs.

    ``finite_logits_D``: whether the model's own logits were finite, of a step that edits logits. ``indexer_topk_TLk``
    are the selections of indexers, -1 for a token that saw all tokens before it; None if all did.
    """

    tokens_D: Ints
    logprobs_D: Floats
    finite_logits_D: Bools | None = None
    routed_experts_TLx: Array | None = None
    indexer_topk_TLk: Array | None = None
    logprob_results: LogprobResults | None = None
    prompt_logprobs_N: Floats | None = None
    prompt_logprob_results: LogprobResults | None = None

    def get_records(self, name: str) -> Array | None:
        """Return what was recorded of every token under a name of ``core.token_fields``; None if nothing was."""
        return {ROUTED_EXPERTS: self.routed_experts_TLx, INDEXER_TOPK: self.indexer_topk_TLk}[name]


class InflightStep(Protocol):
    """A step launched on the device whose output has not been read."""

    def result(self) -> StepOutput:
        """Wait for the device. Call once."""
        ...


# -- random numbers: a counter-based generator, one stream per seed ---------------------------

_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GOLDEN, _FIRST, _SECOND = np.array(_FACTORS, np.uint64)
_WORD = (1 << 64) - 1
_30, _27, _31, _LOW = np.array([30, 27, 31, 40], np.uint64)
_UNIT = np.float32(2**-24)


def derive_rng_streams(seed_D: Uints) -> Uints:
    """Return the start of each seed's random stream."""
    return _mix(seed_D + _GOLDEN)


def derive_rng_stream(seed: int) -> int:
    """Return the start of the random stream of one seed: a 64-bit mix of it.

    >>> derive_rng_stream(7) == int(derive_rng_streams(np.array([7], np.uint64))[0])
    True
    """
    golden, first, second = _FACTORS
    z = (seed + golden) & _WORD
    z = ((z ^ (z >> 30)) * first) & _WORD
    z = ((z ^ (z >> 27)) * second) & _WORD
    return z ^ (z >> 31)


def compute_uniforms(stream_D: Uints, index_D: Uints) -> Floats:
    """Return the number in [0, 1) at each index of each stream: the top 24 bits of a 64-bit mix of both."""
    return (_mix(stream_D + index_D * _GOLDEN) >> _LOW).astype(np.float32) * _UNIT


def _mix(z: Uints) -> Uints:
    z = (z ^ (z >> _30)) * _FIRST
    z = (z ^ (z >> _27)) * _SECOND
    return z ^ (z >> _31)


# -- a step as the scheduler tracks it --------------------------------------------------------


class PrefillChunk(NamedTuple):
    """The next ``length`` tokens of a request that has computed ``start`` of them."""

    req: Req
    start: int
    length: int


class Fork(NamedTuple):
    """A follower that samples from its leader's logits; ``page`` receives a copy of the prompt's last partial page."""

    leader: Req
    follower: Req
    page: int


class ScoredSpan(NamedTuple):
    """Prompt positions to score, from ``first`` on; the token before ``first`` is in ``row`` of the step."""

    req: Req
    first: int
    length: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """One scheduled step, kept until its output is processed.

    ``sampled_reqs`` get one token each, row by row, the last of them through ``forks``. ``last_token_rows_D`` are the
    rows that reach their maximum length; ``needs_check_D`` those whose every token is checked. ``prefilled`` requests
    have computed their whole prompt; ``filled_pages`` lists requests that fill a page with sampled tokens, and up to
    which token; ``done_reqs`` have nothing left to compute or sample. ``saved_states`` are requests whose recurrent
    state after this step is kept. With ``drafts_D``, a request may have several
    rows, one after the other, and gets a token from each whose draft is the token sampled before it; ``state_rows_D``
    is where the recurrent state after each row is.
    """

    batch: ForwardBatch
    sampled_reqs: list[Req]
    forks: list[Fork]
    prefilled: list[Req]
    filled_pages: list[tuple[Req, int]]
    scored: list[ScoredSpan]
    done_reqs: list[Req]
    saved_states: list[Req]
    last_token_rows_D: Ints
    needs_check_D: Bools | None
    drafts_D: DraftRows | None = None
    state_rows_D: Ints | None = None


class StaticSamplingInfo(NamedTuple):
    """Per-slot sampling state that does not change from step to step."""

    req_slots_D: Ints
    rng_stream_D: Uints
    rng_start_D: Ints
    prompt_D: Ints
    max_length_D: Ints
    temperature_D: Floats
    top_k_D: Ints
    top_p_D: Floats
    min_p_D: Floats
    has_filter_D: Bools
    has_edits: bool
    has_queries: bool
    needs_check_D: Bools | None

    def build_sampling_batch(self, length_D: Ints) -> SamplingBatch:
        """Return the sampling parameters of the next token of each row."""
        return SamplingBatch(
            temperature_D=self.temperature_D,
            top_k_D=self.top_k_D,
            top_p_D=self.top_p_D,
            min_p_D=self.min_p_D,
            has_filter_D=self.has_filter_D,
            uniform_D=compute_uniforms(self.rng_stream_D, (length_D - self.rng_start_D).astype(np.uint64)),
        )


def gather_sampling_info(req_slots_D: Ints, slots: ReqSlots) -> StaticSamplingInfo:
    needs_check_D = slots.needs_check_S[req_slots_D]
    return StaticSamplingInfo(
        req_slots_D=req_slots_D,
        rng_stream_D=slots.rng_stream_S[req_slots_D],
        rng_start_D=slots.rng_start_S[req_slots_D],
        prompt_D=slots.prompt_S[req_slots_D],
        max_length_D=slots.max_length_S[req_slots_D],
        temperature_D=slots.temperature_S[req_slots_D],
        top_k_D=slots.top_k_S[req_slots_D],
        top_p_D=slots.top_p_S[req_slots_D],
        min_p_D=slots.min_p_S[req_slots_D],
        has_filter_D=slots.has_filter_S[req_slots_D],
        has_edits=bool(slots.has_edits_S[req_slots_D].any()),
        has_queries=bool(slots.has_queries_S[req_slots_D].any()),
        needs_check_D=needs_check_D if needs_check_D.any() else None,
    )


class DecodeRows(NamedTuple):
    """The one-token rows of a step, cached while the same requests decode.

    ``slots_B`` are their slots in scheduling order; ``sampling_info`` has requests with a common prompt as neighbours.
    ``membership`` is ``RunningBatch.membership`` at the time this was built; rows with ``drafts_B`` are not cached.
    """

    slots_B: Ints
    membership: int
    reqs: list[Req]
    sampling_info: StaticSamplingInfo
    group_B: Ints
    shared_B: Ints
    ones_B: Ints
    rows_B: Ints
    drafts_B: DraftRows | None = None

    @property
    def can_use_graph(self) -> bool:
        """Whether a step of these rows alone can run as a CUDA graph."""
        return not (self.sampling_info.has_edits or self.sampling_info.has_queries)


def build_decode_rows(
    slots_B: Ints, membership: int, reqs_at: Callable[[Ints], list[Req]], slots: ReqSlots
) -> DecodeRows:
    """Reorder one-token rows so that requests with a common prompt are neighbours."""
    ordered_B = slots_B[np.argsort(slots.prefix_page_S[slots_B], kind="stable")]
    group_B, shared_B = group_by_prefix(ordered_B, slots)
    return DecodeRows(
        slots_B=slots_B,
        membership=membership,
        reqs=reqs_at(ordered_B),
        sampling_info=gather_sampling_info(ordered_B, slots),
        group_B=group_B,
        shared_B=shared_B,
        ones_B=np.ones(len(ordered_B), np.int64),
        rows_B=np.arange(len(ordered_B)),
    )


def build_draft_rows(
    slots_B: Ints, drafts: Mapping[int, DraftTree], reqs_at: Callable[[Ints], list[Req]], slots: ReqSlots, size: int
) -> DecodeRows:
    """Return one-token rows of these requests, and behind each one's row those of its drafts (slot -> tree).

    The rows of a request that shares no prompt with others share all its full pages of ``size`` tokens.
    """
    ordered_B = slots_B[np.argsort(slots.prefix_page_S[slots_B], kind="stable")]
    trees = [drafts.get(slot, NO_DRAFTS) for slot in ordered_B.tolist()]
    drafts_B = build_tree_rows(trees, slots.num_computed_S[ordered_B].tolist(), size)
    owner_B = ((drafts_B.back == 0) & (drafts_B.branches == 0)).cumsum() - 1
    counts_B = np.bincount(owner_B, minlength=len(ordered_B))
    rows_B = ordered_B[owner_B]
    group_B, shared_B = group_by_prefix(rows_B, slots)
    last_B = np.append(group_B[1:] != group_B[:-1], True).nonzero()[0]
    alone_B = (owner_B[last_B] == owner_B[np.append(0, last_B[:-1] + 1)])[group_B] & (counts_B[owner_B] > 1)
    shared_B = np.where(alone_B, slots.num_computed_S[rows_B] // size * size, shared_B)
    return DecodeRows(
        slots_B=slots_B,
        membership=-1,
        reqs=reqs_at(rows_B),
        sampling_info=gather_sampling_info(rows_B, slots),
        group_B=group_B,
        shared_B=shared_B,
        ones_B=np.ones(len(rows_B), np.int64),
        rows_B=np.arange(len(rows_B)),
        drafts_B=drafts_B,
    )


def build_block_table(rows: BatchRows, slots: ReqSlots, size: int) -> Ints:
    """Return the pages of each row, as many as the longest has; rows of a branch have those of the branch."""
    max_pages = -(-int((rows.starts_B + rows.counts_B).max()) // size)
    table_BM = slots.block_table_SP[:, :max_pages][rows.req_slots_B]
    if rows.drafts_B is not None:
        for row in rows.drafts_B.branches.nonzero()[0].tolist():
            first, pages = rows.reqs[row].branch_pages[int(rows.drafts_B.branches[row]) - 1]
            count = max(0, min(len(pages), max_pages - first))
            table_BM[row, first : first + count] = pages[:count]
    return table_BM


def group_by_prefix(req_slots_B: Ints, slots: ReqSlots) -> tuple[Ints, Ints]:
    """Return the group of each row (neighbours that share all full prompt pages), and the shared tokens."""
    prefix_page_B, prefix_tokens_B = slots.prefix_page_S[req_slots_B], slots.prefix_tokens_S[req_slots_B]
    same_as_previous_B = prefix_tokens_B > 0
    same_as_previous_B[1:] &= prefix_page_B[1:] == prefix_page_B[:-1]
    same_as_previous_B[:1] = False
    group_B = (~same_as_previous_B).cumsum() - 1
    return group_B, prefix_tokens_B * (np.bincount(group_B) > 1)[group_B]


class BatchRows(NamedTuple):
    """The sequences of a step in order: slots, computed and new tokens, and the row of each one's last token."""

    reqs: list[Req]
    req_slots_B: Ints
    starts_B: Ints
    counts_B: Ints
    last_rows_B: Ints
    group_B: Ints
    shared_B: Ints
    num_decodes: int
    drafts_B: DraftRows | None = None


def build_batch_rows(decode_rows: DecodeRows, chunks: Sequence[PrefillChunk], slots: ReqSlots) -> BatchRows:
    """Put decode rows first, then prefill chunks, which come with one-token chunks first."""
    req_slots_B = decode_rows.sampling_info.req_slots_D
    drafts_B = decode_rows.drafts_B
    starts_B = slots.num_computed_S[req_slots_B]
    if drafts_B is not None:
        starts_B = starts_B + drafts_B.offsets
    if not chunks:
        return BatchRows(
            reqs=decode_rows.reqs,
            req_slots_B=req_slots_B,
            starts_B=starts_B,
            counts_B=decode_rows.ones_B,
            last_rows_B=decode_rows.rows_B,
            group_B=decode_rows.group_B,
            shared_B=decode_rows.shared_B,
            num_decodes=len(decode_rows.reqs),
            drafts_B=drafts_B,
        )
    drafts_B = None if drafts_B is None else drafts_B.pad(len(chunks))
    counts_B = np.concatenate((decode_rows.ones_B, [chunk.length for chunk in chunks]))
    return BatchRows(
        reqs=[*decode_rows.reqs, *(chunk.req for chunk in chunks)],
        req_slots_B=np.concatenate((req_slots_B, [chunk.req.slot for chunk in chunks])),
        starts_B=np.concatenate((starts_B, [chunk.start for chunk in chunks])),
        counts_B=counts_B,
        last_rows_B=np.cumsum(counts_B) - 1,
        group_B=np.pad(decode_rows.group_B, (0, len(chunks)), constant_values=-1),
        shared_B=np.pad(decode_rows.shared_B, (0, len(chunks))),
        num_decodes=int((counts_B == 1).sum()),
        drafts_B=drafts_B,
    )


def gather_tokens(rows: BatchRows, chunks: Sequence[PrefillChunk], slots: ReqSlots) -> Ints:
    """Return the new tokens [T] of a step."""
    count = len(rows.req_slots_B) - len(chunks)
    tokens_B = slots.token_S[rows.req_slots_B[:count]]
    if rows.drafts_B is not None:
        tokens_B = np.where(rows.drafts_B.offsets[:count] > 0, rows.drafts_B.tokens[:count], tokens_B)
    if not chunks:
        return tokens_B
    return np.concatenate(
        (tokens_B, *(chunk.req.slice_tokens(chunk.start, chunk.start + chunk.length) for chunk in chunks))
    )


class ImageRows(NamedTuple):
    """What images add to a step: the fields of its ``ForwardBatch`` with these names."""

    vision: VisionBatch | None = None
    rope_offsets_B: Ints | None = None
    rope_positions_3T: Ints | None = None
    visible_ends_T: Ints | None = None


def gather_image_rows(rows: BatchRows, slots: ReqSlots) -> ImageRows:
    """Return the features, rope positions and visible tokens of a step's rows."""
    if not slots.num_with_images:
        return ImageRows()
    offsets_B = slots.rope_offset_S[rows.req_slots_B]
    ends_B, first_rows_B = rows.starts_B + rows.counts_B, rows.last_rows_B + 1 - rows.counts_B
    touched = [
        (images, int(rows.starts_B[b]), int(ends_B[b]), int(first_rows_B[b]))
        for b in (slots.image_end_S[rows.req_slots_B] > rows.starts_B).nonzero()[0].tolist()
        if (images := rows.reqs[b].images) is not None
    ]
    ends_T = None
    if any(images.visible_ends_T is not None for images, *_ in touched):
        ends_T = compute_positions(rows) + 1
        for images, start, end, row in touched:
            ends_T[row : row + end - start] = images.slice_visible_ends(start, end)
    with_mrope = [each for each in touched if each[0].rope_positions_3T is not None]
    if not with_mrope:
        offsets_B = offsets_B if offsets_B.any() else None
        return ImageRows(build_vision_batch(touched), offsets_B, visible_ends_T=ends_T)
    positions_3T = np.tile(compute_positions(rows) + np.repeat(offsets_B, rows.counts_B), (3, 1))
    for images, start, end, row in with_mrope:
        positions_3T[:, row : row + end - start] = images.slice_rope_positions(start, end)
    return ImageRows(build_vision_batch(touched), rope_positions_3T=positions_3T, visible_ends_T=ends_T)


def build_logprob_queries(rows: Sequence[tuple[int, Req]]) -> LogprobQueries | None:
    """Return the log-probs that these requests want of these rows; None if there are none."""
    top_rows = [
        (row, min(req.request.top_logprobs_num, req.vocab_size)) for row, req in rows if req.request.top_logprobs_num
    ]
    pairs = [(row, token) for row, req in rows for token in req.request.token_ids_logprob]
    if not top_rows and not pairs:
        return None
    return LogprobQueries(
        top_k=max((count for _, count in top_rows), default=0),
        rows_R=np.array([row for row, _ in top_rows], np.int64),
        token_rows_W=np.array([row for row, _ in pairs], np.int64),
        tokens_W=np.array([token for _, token in pairs], np.int64),
    )


def find_scored_spans(rows: BatchRows, chunks: Sequence[PrefillChunk]) -> list[ScoredSpan]:
    """Return the prompt positions that are scored by this step's rows."""
    spans: list[ScoredSpan] = []
    for chunk, last_row in zip(chunks, rows.last_rows_B[len(rows.last_rows_B) - len(chunks) :].tolist(), strict=True):
        req = chunk.req
        # The token at a position is scored by the row before it.
        first = max(chunk.start + 1, req.next_scored)
        count = min(chunk.start + chunk.length + 1, req.prompt_length) - first
        if count > 0:
            spans.append(ScoredSpan(req, first, count, last_row - chunk.length + first - chunk.start))
    return spans


def build_prompt_scoring(scored: Sequence[ScoredSpan]) -> PromptScoring | None:
    if not scored:
        return None
    owners = enumerate(span.req for span in scored for _ in range(span.length))
    has_queries = any(span.req.has_logprob_queries for span in scored)
    return PromptScoring(
        rows_N=np.concatenate([np.arange(span.row, span.row + span.length) for span in scored]),
        tokens_N=np.concatenate([span.req.slice_tokens(span.first, span.first + span.length) for span in scored]),
        logprob_queries=build_logprob_queries(list(owners)) if has_queries else None,
    )


def copies_as_arrays(copies: Mapping[int, int]) -> tuple[Ints, Ints]:
    """Convert copies (target -> source) to (sources, targets)."""
    return (np.array(list(copies.values()), np.int64), np.array(list(copies), np.int64)) if copies else NO_COPIES


# -- distributing a step's output ------------------------------------------------------------


def find_failed_reqs(step: ScheduledStep, output: StepOutput) -> tuple[list[Req], bool]:
    """Return the requests whose log-probs are not finite, and whether the model itself computed such numbers."""
    failed_D = ~np.isfinite(output.logprobs_D)
    prompt_N = output.prompt_logprobs_N
    bad_prompt = prompt_N is not None and bool(np.isnan(prompt_N).any())
    if not bad_prompt and not failed_D.any():
        return [], False
    failed = [step.sampled_reqs[row] for row in failed_D.nonzero()[0].tolist()]
    broken_D = failed_D if output.finite_logits_D is None else failed_D & ~output.finite_logits_D
    if prompt_N is not None and bad_prompt:
        bad_spans = np.split(np.isnan(prompt_N), np.cumsum([span.length for span in step.scored])[:-1])
        failed += [span.req for span, bad in zip(step.scored, bad_spans, strict=True) if bad.any()]
    return list(dict.fromkeys(failed)), bad_prompt or bool(broken_D.any())


def store_prompt_logprobs(scored: Sequence[ScoredSpan], output: StepOutput, version: Version) -> None:
    """Append to each request the log-probs of its prompt positions."""
    assert output.prompt_logprobs_N is not None
    values, offset = output.prompt_logprobs_N.tolist(), 0
    for span in scored:
        span.req.prompt_version = version
        span.req.prompt_logprobs += values[offset : offset + span.length]
        offset += span.length
    if output.prompt_logprob_results is not None:
        owners = ((span.req, span.length) for span in scored)
        for req, top_logprobs, token_ids_logprobs in _split_results(output.prompt_logprob_results, owners):
            req.prompt_top_logprobs += top_logprobs
            req.prompt_token_ids_logprobs += token_ids_logprobs


def store_logprob_results(
    sampled_reqs: Sequence[Req], results: LogprobResults, accepted_D: Bools | None = None
) -> None:
    """Append to each request the log-probs queried at its sampled token, or at those that were accepted."""
    rows = _split_results(results, ((req, 1) for req in sampled_reqs))
    for row, (req, top_logprobs, token_ids_logprobs) in enumerate(rows):
        if not req.finish_kind and (accepted_D is None or accepted_D[row]):
            req.top_logprobs += top_logprobs
            req.token_ids_logprobs += token_ids_logprobs


def _split_results(
    results: LogprobResults, owners: Iterable[tuple[Req, int]]
) -> Iterator[tuple[Req, list[tuple[TokenLogprob, ...]], list[tuple[TokenLogprob, ...]]]]:
    """Yield for each owner the top and per-token log-probs of its rows, in order."""
    top_rows = zip(results.tokens_Rk.tolist(), results.logprobs_Rk.tolist(), strict=True)
    values = iter(results.logprobs_W.tolist())
    for req, count in owners:
        top_k, token_ids = req.request.top_logprobs_num, req.request.token_ids_logprob
        rows = [next(top_rows) for _ in range(count if top_k else 0)]
        top_logprobs = [tuple(zip(tokens[:top_k], logprobs[:top_k], strict=True)) for tokens, logprobs in rows]
        token_logprobs = [tuple((token, next(values)) for token in token_ids) for _ in range(count if token_ids else 0)]
        yield req, top_logprobs, token_logprobs

"""Response stitching: one completion out of partial responses of several servers, with versions and records: routed
experts, and what indexers selected.

Shapes: T tokens, L MoE layers, k experts per token; or L layers with an indexer, k entries per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from miles.backends.remote.response import GenerateResponse
from miles.core.indexer_topk import decode_indexer_topk
from miles.core.protocols import Completion, SamplingParams, SpeculationCounts
from miles.core.routed_experts import decode_from_sglang, expert_dtype, unrecorded_id
from miles.core.token_fields import INDEXER_TOPK, ROUTED_EXPERTS
from miles.core.types import Array, Author, Span, Status, Version
from miles.models.indexer_layout import IndexerLayout

Decode = Callable[[Sequence[int]], str]

# Tokens before and after the boundary of two responses in which a stop string may lie across it.
_STOP_WINDOW = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExpertsShape:
    """Number of MoE layers, experts per token, and experts."""

    num_layers: int
    experts_per_token: int
    num_experts: int


class ResponseStitcher:
    """The parts of one completion. ``eos_token_ids`` are the tokens that end a sequence of this model."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        eos_token_ids: frozenset[int],
        decode: Decode | None,
        experts: RoutedExpertsShape | None,
        indexer: IndexerLayout | None = None,
    ) -> None:
        self._prompt = list(prompt)
        self._sampling = sampling
        self._stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_token_ids)
        self._decode = decode
        self._experts = experts
        self._indexer = indexer
        self._selected_TLk: Array | None = None
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._version_starts: list[tuple[int, Version]] = []
        self._routed_TLk: Array | None = None
        self._cached_tokens: int | None = None
        self._speculation: SpeculationCounts | None = None
        self.finish_reason: str | None = None

    @property
    def input_ids(self) -> list[int]:
        """The prompt and all tokens sampled so far."""
        return [*self._prompt, *self._tokens]

    @property
    def remaining(self) -> SamplingParams:
        """Sampling parameters for the rest of the completion."""
        params, count = self._sampling, len(self._tokens)
        return replace(
            params,
            max_new_tokens=params.max_new_tokens - count,
            num_prior_tokens=params.num_prior_tokens + count,
        )

    def add(self, response: GenerateResponse, runs: Sequence[tuple[Version, int]]) -> None:
        """Add a response, and how many of its tokens each version sampled, in order.

        After it ``finish_reason`` is set if the completion has ended.
        """
        boundary = start = len(self._tokens)
        assert sum(count for _, count in runs) == len(response.tokens), "every token has the version that sampled it"
        if response.experts is not None and self._experts is not None:
            self._add_routed_experts(response.experts, len(self.input_ids) + len(response.tokens) - 1)
        # An aborted or lost response has none: what it sampled is read again by the next one.
        if self._indexer is not None and (response.indexer is not None or response.finish_reason in ("stop", "length")):
            self._add_indexer_topk(self._indexer, response.indexer, len(self.input_ids) + len(response.tokens) - 1)
        self._tokens += response.tokens
        self._logprobs += response.logprobs
        for version, count in runs:
            if count and (not self._version_starts or self._version_starts[-1][1] != version):
                self._version_starts.append((start, version))
            start += count
        if self._cached_tokens is None:
            self._cached_tokens = response.cached_tokens
        if response.speculation is not None:
            self._speculation = response.speculation + (self._speculation or SpeculationCounts())
        if boundary and self._truncate_at_stop(boundary):
            self.finish_reason = "stop"
        elif response.finish_reason in ("stop", "length"):
            self.finish_reason = response.finish_reason
        elif self._tokens:
            self.finish_reason = self._find_finish_reason()

    def _find_finish_reason(self) -> str | None:
        """Why the completion is complete although the server did not finish it; None if it is not."""
        if self._tokens[-1] in self._stop_ids:
            return "stop"
        if self._sampling.stop and self._decode is not None:
            text = self._decode(self._tokens[-_STOP_WINDOW:])
            if any(stop in text for stop in self._sampling.stop):
                return "stop"
        return "length" if len(self._tokens) >= self._sampling.max_new_tokens else None

    def _truncate_at_stop(self, boundary: int) -> bool:
        """If a stop string lies across the boundary of two responses, drop the tokens after it."""
        if not self._sampling.stop or self._decode is None:
            return False
        first = max(0, boundary - _STOP_WINDOW)
        for end in range(boundary + 1, min(len(self._tokens), boundary + _STOP_WINDOW) + 1):
            text = self._decode(self._tokens[first:end])
            if any(stop in text for stop in self._sampling.stop):
                del self._tokens[end:], self._logprobs[end:]
                self._version_starts = [(start, version) for start, version in self._version_starts if start < end]
                return True
        return False

    def _add_routed_experts(self, text: str, num_tokens: int) -> None:
        """Routed experts of the first ``num_tokens`` of prompt and completion; those recorded before stay."""
        shape = self._experts
        assert shape is not None
        new_TLk = decode_from_sglang(
            text,
            tokens=num_tokens,
            layers=shape.num_layers,
            top_k=shape.experts_per_token,
            experts=shape.num_experts,
        )
        recorded_TLk = self._routed_TLk
        self._routed_TLk = (
            new_TLk if recorded_TLk is None else np.concatenate([recorded_TLk, new_TLk[len(recorded_TLk) :]])
        )

    def _add_indexer_topk(self, shape: IndexerLayout, text: str | None, num_tokens: int) -> None:
        """Selections for the first ``num_tokens`` of prompt and completion; those recorded before stay."""
        new_TLk = decode_indexer_topk(
            text,
            tokens=num_tokens,
            layers=len(shape.layers),
            count=shape.groups * shape.count,
            dtype=shape.dtype,
        )
        recorded_TLk = self._selected_TLk
        self._selected_TLk = (
            new_TLk if recorded_TLk is None else np.concatenate([recorded_TLk, new_TLk[len(recorded_TLk) :]])
        )

    def completion(self, finish_reason: str) -> Completion:
        """The whole completion, one span per version."""
        records, prompt = self._gather_records(), len(self._prompt)
        tokens, logprobs = np.array(self._tokens, np.int32), np.array(self._logprobs, np.float32)
        stops = [*(start for start, _ in self._version_starts[1:]), len(self._tokens)]
        spans = tuple(
            Span(
                author=Author.POLICY,
                tokens=tokens[start:stop],
                logprobs=logprobs[start:stop],
                version=version,
                extras={name: values_TLk[prompt + start : prompt + stop] for name, values_TLk in records.items()},
            )
            for (start, version), stop in zip(self._version_starts, stops, strict=False)  # there may be no token
        )
        status = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}.get(finish_reason, Status.ABORTED)
        return Completion(
            spans=spans,
            status=status,
            finish_reason=finish_reason,
            cached_tokens=self._cached_tokens or 0,
            prompt_extras={name: values_TLk[:prompt] for name, values_TLk in records.items()},
            speculation=self._speculation,
        )

    def _gather_records(self) -> dict[str, Array]:
        """Records of every token by name, with the marker for unrecorded ones where a server returned none."""
        records: dict[str, Array] = {}
        if (experts := self._experts) is not None:
            shape, dtype = (experts.num_layers, experts.experts_per_token), expert_dtype(experts.num_experts)
            records[ROUTED_EXPERTS] = self._pad(self._routed_TLk, shape, dtype)
        if (indexer := self._indexer) is not None:
            shape = (len(indexer.layers), indexer.groups * indexer.count)
            records[INDEXER_TOPK] = self._pad(self._selected_TLk, shape, np.dtype(indexer.dtype))
        return records

    def _pad(self, recorded_TLk: Array | None, per_token: tuple[int, int], dtype: np.dtype[Any]) -> Array:
        length = len(self._prompt) + len(self._tokens)
        known_TLk = np.empty((0, *per_token), dtype) if recorded_TLk is None else recorded_TLk[:length]
        missing_TLk = np.full((length - len(known_TLk), *per_token), unrecorded_id(dtype), dtype)
        return np.concatenate((known_TLk, missing_TLk))

"""Output state of a streaming request: its tokens, text and formatted log-probs so far.

The engine's thread keeps appending while a response is written, so the state has its own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from miles.backends.native.engine.req import RequestOutput
from miles.backends.native.engine.request import FinishReason, OutputChunk, TokenLogprob
from miles.backends.native.server.api.request_types import ParsedRequest
from miles.core.detokenizer import IncrementalDetokenizer
from miles.core.types import Version

LogprobRow = tuple[float | None, int, str | None]
"""A log-prob, its token, and the token's text where it was requested, as SGLang writes them."""

MIN_FLOAT32 = -3.4028234663852886e38


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """Formatted log-probs of consecutive tokens; the other lists are filled where they were requested."""

    tokens: list[LogprobRow] = field(default_factory=list)
    top_logprobs: list[list[LogprobRow] | None] = field(default_factory=list)
    token_ids_logprobs: list[list[LogprobRow] | None] = field(default_factory=list)


class OutputState:
    """One request and its output so far. ``decode_token`` gives the text of a token; without a ``detokenizer`` there
    is no text. ``get_label`` names the weights of a version."""

    def __init__(
        self,
        request: ParsedRequest,
        prompt: Sequence[int],
        output: RequestOutput,
        *,
        detokenizer: IncrementalDetokenizer | None,
        decode_token: Callable[[int], str] | None,
        get_label: Callable[[Version | None], str],
        start_time: float,
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.output = output
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.output_logprobs = LogprobRows()
        self.start_time = start_time
        self.first_token_time: float | None = None
        self.end_time: float | None = None
        self._detokenizer = detokenizer
        self._decode_token = decode_token if request.return_text_in_logprobs else None
        self._get_label = get_label
        self._text: str | None = None if detokenizer is None else ""
        self._text_is_stale = False
        self._prompt_logprobs: LogprobRows | None = None

    # -- growing ----------------------------------------------------------------------------

    def add_chunk(self, chunk: OutputChunk, now: float) -> None:
        if self.first_token_time is None:
            self.first_token_time = now
        self._add(chunk.tokens, chunk.logprobs, chunk.top_logprobs, chunk.token_ids_logprobs)
        # More tokens may have arrived since the chunk was cut, and the finish reason belongs to all of them.
        if self.output.finish_reason is not None and len(self.tokens) == len(self.output.logprobs):
            self.finish(now)

    def finish(self, now: float) -> None:
        """The request has ended: take the rest of its output."""
        if self.finish_reason is not None:
            return
        output, start = self.output, len(self.tokens)
        self._add(
            output.tokens[start:],
            output.logprobs[start:],
            output.top_logprobs[start:],
            output.token_ids_logprobs[start:],
        )
        self.finish_reason = output.finish_reason
        self.end_time = now
        self._text_is_stale = True

    def _add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        top_logprobs: Sequence[tuple[TokenLogprob, ...]],
        token_ids_logprobs: Sequence[tuple[TokenLogprob, ...]],
    ) -> None:
        self.tokens.extend(tokens)
        if self._detokenizer is not None:
            self._detokenizer.add(tokens)
            self._text_is_stale = True
        if self.request.return_logprob:
            self.output_logprobs.tokens.extend(self._format_rows(tokens, logprobs))
            self.output_logprobs.top_logprobs.extend(self._format_tops(top_logprobs))
            self.output_logprobs.token_ids_logprobs.extend(self._format_tops(token_ids_logprobs))

    # -- reading ----------------------------------------------------------------------------

    @property
    def weight_version(self) -> str:
        """The label of the weights that sampled the last token."""
        return self._get_label(self.output.version)

    @property
    def weight_versions(self) -> list[tuple[str, int]]:
        """The labels of all weights that sampled the tokens, in order, each with its number of tokens."""
        return [(self._get_label(version), count) for version, count in self.output.split_by_version(len(self.tokens))]

    @property
    def text(self) -> str | None:
        """The text that is certain so far; all of it once the request has ended."""
        detokenizer, reason, request = self._detokenizer, self.finish_reason, self.request
        if detokenizer is None or not self._text_is_stale:
            return self._text
        self._text_is_stale = False
        if reason is None:
            self._text = detokenizer.text()
            return self._text
        matched, trim = reason.matched, request.trim_stop
        stop = matched if isinstance(matched, str) and matched in request.sampling.stop else None
        drop = int(isinstance(matched, int) and trim and bool(self.tokens))
        self._text = detokenizer.last(stop=stop, trim=trim, drop=drop)
        return self._text

    def prompt_logprobs(self) -> LogprobRows:
        """The log-probs of the prompt from the requested position on; that of the first token is null.

        They are complete once a token was sampled, or none will be.
        """
        scores = self.output.prompt_logprobs
        if self._prompt_logprobs is not None or scores is None:
            return self._prompt_logprobs or LogprobRows()
        tokens = self.prompt[scores.first :]
        logprobs = [None, *scores.logprobs[1:]] if scores.logprobs else []
        rows = LogprobRows(tokens=list(self._format_rows(tokens, logprobs)))
        if self.request.top_logprobs_num and tokens:
            rows.top_logprobs.extend([None, *self._format_tops(scores.top_logprobs[1:])])
        if self.request.token_ids_logprob and tokens:
            rows.token_ids_logprobs.extend([None, *self._format_tops(scores.token_ids_logprobs[1:])])
        self._prompt_logprobs = rows
        return rows

    def _format_rows(self, tokens: Sequence[int], logprobs: Sequence[float | None]) -> Iterable[LogprobRow]:
        texts = repeat(None) if self._decode_token is None else map(self._decode_token, tokens)
        return zip(logprobs, tokens, texts, strict=False)

    def _format_tops(self, rows: Sequence[tuple[TokenLogprob, ...]]) -> Iterable[list[LogprobRow] | None]:
        return ([self._format_row(logprob, token) for token, logprob in row] or None for row in rows)

    def _format_row(self, logprob: float, token: int) -> LogprobRow:
        """JSON has no infinity: an impossible token has float32's lowest number, as in SGLang."""
        return max(logprob, MIN_FLOAT32), token, None if self._decode_token is None else self._decode_token(token)

"""Client of a served teacher: batches scoring requests and validates the responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles.core.errors import EngineError
from miles.rollout.distill.wire import ScoreRequest, TokenScores, build_request_body, parse_scores
from miles.rollout.reward.batching import RequestBatcher
from miles.rollout.reward.context import HTTPEndpoint
from miles.rollout.reward.http import JSONClient
from miles.rollout.reward.types import GradingError, NonRetryableError

MAX_RESPONSE_BYTES = 256 << 20  # bytes


class TeacherClient:
    """Scores tokens at ``temperature``. A failed or invalid response ends the run with one sentence.

    ``endpoint.url`` is the engine's address, with or without ``/generate``. Requests that arrive while
    ``endpoint.concurrency`` are in flight are batched, at most ``endpoint.batch`` together.
    """

    def __init__(self, name: str, endpoint: HTTPEndpoint, *, temperature: float = 1.0) -> None:
        self.name = name
        self.url = endpoint.url.rstrip("/").removesuffix("/generate")
        self.temperature = temperature
        self.client = JSONClient(endpoint, url=self.url, max_bytes=MAX_RESPONSE_BYTES)
        self._endpoint = endpoint
        self._max_new_tokens = 0
        self._batcher = RequestBatcher(self._send, size=endpoint.batch, concurrency=endpoint.concurrency)

    async def score(self, request: ScoreRequest) -> TokenScores:
        """Score the tokens of a request."""
        try:
            return await self._batcher.submit(request)
        except GradingError as error:
            raise EngineError(
                f"the teacher {self.name} did not score a trajectory: {error}; check that it runs and serves SGLang's "
                "/generate, or give it longer with --opd-teacher-timeout."
            ) from error

    async def probe(self, request: ScoreRequest, temperature: float) -> TokenScores:
        """Score one request at another temperature before the run starts; raises ``GradingError``.

        A endpoint that rejects a request for no new tokens is asked for one token from then on.
        """
        try:
            (scores,) = await self._post([request], temperature)
        except NonRetryableError:
            if self._max_new_tokens:
                raise
            self._max_new_tokens = 1
            (scores,) = await self._post([request], temperature)
        return scores

    async def _send(self, requests: Sequence[ScoreRequest]) -> Sequence[TokenScores]:
        return await self._post(requests, self.temperature)

    async def _post(self, requests: Sequence[ScoreRequest], temperature: float) -> list[TokenScores]:
        responses: Any = await self.client.post(
            "/generate", build_request_body(requests, temperature=temperature, max_new_tokens=self._max_new_tokens)
        )
        if not isinstance(responses, list) or len(responses) != len(requests):
            raise GradingError(f"{self.url}/generate did not return one response for each of {len(requests)} prompts")
        return [parse_scores(request, response) for request, response in zip(requests, responses, strict=True)]

"""Single-turn rollouts: one prompt, one response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from miles.core.errors import DataError
from miles.core.media import Images
from miles.core.protocols import Completion, Engine, SamplingParams
from miles.core.types import Author, Prompt, Span, Tokens, Trajectory
from miles.rollout.span_extras import fill_span_extras


class SingleTurn:
    """A core.protocols.Generate. The response text, for graders, is the trajectory's ``metadata["text"]``.

    ``load_images`` gives the images among the tokens that ``render`` gives. ``decode`` omits special tokens. The text
    ends before a stop token or stop string; the tokens keep both, because the policy sampled them.
    """

    def __init__(
        self,
        render: Callable[[Prompt], Tokens],
        decode: Callable[[Sequence[int]], str],
        *,
        max_context_len: int | None = None,
        load_images: Callable[[Prompt], Awaitable[Images]] | None = None,
    ) -> None:
        self._render = render
        self._load_images = load_images
        self._decode = decode
        self._max_context_len = max_context_len

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: SamplingParams) -> Trajectory:
        images = () if self._load_images is None else await self._load_images(prompt)
        prompt_span = Span(author=Author.PROMPT, tokens=self._render(prompt), images=images)
        completion = await engine.generate(
            prompt_span.tokens, self._within_context(prompt, len(prompt_span), sampling), images
        )
        return Trajectory(
            branches=((*fill_span_extras([prompt_span], completion.prompt_extras), *completion.spans),),
            status=completion.status,
            metadata={"text": self._response_text(completion, sampling), "reason": completion.finish_reason},
        )

    async def resume(self, prompt: Prompt, partial: Trajectory, engine: Engine, sampling: SamplingParams) -> Trajectory:
        """Continue after the tokens a trajectory has, which keep their versions.

        A token's randomness depends on its position, so an interruption does not change it. The prompt is not rendered
        again.
        """
        (prompt_span, *sampled) = partial.branches[0]
        num_sampled = sum(map(len, sampled))
        tokens = np.concatenate([span.tokens for span in partial.branches[0]])
        remaining = self._within_context(prompt, len(prompt_span), sampling).max_new_tokens - num_sampled
        completion = await engine.generate(
            tokens, replace(sampling, max_new_tokens=remaining, num_prior_tokens=num_sampled), prompt_span.images
        )
        combined = replace(completion, spans=(*sampled, *completion.spans))
        return replace(
            partial,
            branches=((prompt_span, *combined.spans),),
            status=combined.status,
            metadata={
                **partial.metadata,
                "text": self._response_text(combined, sampling),
                "reason": combined.finish_reason,
            },
        )

    def _within_context(self, prompt: Prompt, prompt_length: int, sampling: SamplingParams) -> SamplingParams:
        if self._max_context_len is None:
            return sampling
        context_left = self._max_context_len - prompt_length
        if context_left < 1:
            raise DataError(
                f"Prompt {prompt.id} has {prompt_length} tokens, which leaves no room for a reply in a context of "
                f"{self._max_context_len}."
            )
        return sampling if sampling.max_new_tokens <= context_left else replace(sampling, max_new_tokens=context_left)

    def _response_text(self, completion: Completion, sampling: SamplingParams) -> str:
        ids: list[int] = [token for span in completion.spans for token in span.tokens.tolist()]
        if ids and ids[-1] in sampling.stop_token_ids:
            ids.pop()
        text = self._decode(ids)
        if completion.finish_reason != "stop":
            return text
        stops = [at for at in (text.find(stop) for stop in sampling.stop) if at >= 0]
        return text[: min(stops)] if stops else text

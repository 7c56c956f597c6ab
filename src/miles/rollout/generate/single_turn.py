"""One prompt, one reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from miles.core.errors import DataError
from miles.core.protocols import Completion, Engine, Sampling
from miles.core.types import Author, Prompt, Span, Tokens, Trajectory
from miles.rollout.given import stamped


class SingleTurn:
    """A core.protocols.Generate. The reply's text, for graders, is the trajectory's ``metadata["text"]``.

    ``text_of`` decodes without special tokens. The text ends before a stop token or stop string;
    the tokens keep both, because the policy wrote them.
    """

    def __init__(
        self,
        render: Callable[[Prompt], Tokens],
        text_of: Callable[[Sequence[int]], str],
        *,
        max_context_len: int | None = None,
    ) -> None:
        self._render = render
        self._text_of = text_of
        self._max_context_len = max_context_len

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: Sampling) -> Trajectory:
        asked = Span(author=Author.PROMPT, tokens=self._render(prompt))
        completion = await engine.generate(asked.tokens, self._within_context(prompt, len(asked), sampling))
        return Trajectory(
            branches=((*stamped([asked], completion.given), *completion.spans),),
            status=completion.status,
            metadata={"text": self._reply(completion, sampling), "reason": completion.reason},
        )

    async def resume(self, prompt: Prompt, past: Trajectory, engine: Engine, sampling: Sampling) -> Trajectory:
        """Go on behind the tokens that an attempt has: they stay as they are, under the versions that wrote them.

        The randomness of a token follows from its position, so a cut does not change it. What was asked is rendered
        no more.
        """
        (asked, *written) = past.branches[0]
        done = sum(map(len, written))
        whole = np.concatenate([span.tokens for span in past.branches[0]])
        left = self._within_context(prompt, len(asked), sampling).max_new_tokens - done
        completion = await engine.generate(whole, replace(sampling, max_new_tokens=left, drawn=done))
        both = replace(completion, spans=(*written, *completion.spans))
        return replace(
            past,
            branches=((asked, *both.spans),),
            status=both.status,
            metadata={**past.metadata, "text": self._reply(both, sampling), "reason": both.reason},
        )

    def _within_context(self, prompt: Prompt, asked: int, sampling: Sampling) -> Sampling:
        if self._max_context_len is None:
            return sampling
        room = self._max_context_len - asked
        if room < 1:
            raise DataError(
                f"Prompt {prompt.id} has {asked} tokens, which leaves no room for a reply in a context of "
                f"{self._max_context_len}; set --rollout-max-prompt-len to drop such prompts."
            )
        return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))

    def _reply(self, completion: Completion, sampling: Sampling) -> str:
        ids: list[int] = [int(i) for span in completion.spans for i in span.tokens]
        if ids and ids[-1] in sampling.stop_token_ids:
            ids.pop()
        text = self._text_of(ids)
        if completion.reason != "stop":
            return text
        found = [at for at in (text.find(stop) for stop in sampling.stop) if at >= 0]
        return text[: min(found)] if found else text

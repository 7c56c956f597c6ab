"""The desk: wishes become asks, are opened at the engine, and are let go of when whoever wished has left."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import lru_cache

import numpy as np

from miles.backends.native.answer import Answer
from miles.backends.native.engine import NativeEngine
from miles.backends.native.request import Ask, Constraint
from miles.backends.native.server.gate import Gate
from miles.backends.native.server.grammar import Grammars
from miles.backends.native.server.labels import Labels
from miles.backends.native.server.refusal import Refusal
from miles.backends.native.server.reply import Reply
from miles.backends.native.server.sessions import Sessions
from miles.backends.native.server.wish import Rule, Turn, Wish
from miles.core.errors import EngineError
from miles.core.spelling import Spelling
from miles.core.types import Version
from miles.models.tokenizer import HubTokenizer

LONG_TEXT = 1 << 15
"""Characters beyond which a text is encoded beside the event loop, not on it."""

MOST_TOPS = 1024


class Desk:
    """What is under way at one engine. All of it lives on the event loop."""

    def __init__(
        self,
        engine: NativeEngine,
        tokenizer: HubTokenizer | None,
        labels: Labels,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.labels = labels
        self.gate = Gate()
        self.draining = False
        self.clock = clock
        self.sessions = Sessions(clock)
        self._live: dict[str, Reply] = {}
        self._grammars: Grammars | None = None
        self._name = None if tokenizer is None else lru_cache(1 << 16)(lambda token: tokenizer.decode([token]))

    @property
    def live(self) -> int:
        """Answers under way."""
        return len(self._live)

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return min(self.engine.spec.max_positions, self.engine.kv_tokens)

    def name(self, token: int) -> str:
        """The text of one token."""
        return "" if self._name is None else self._name(token)

    @asynccontextmanager
    async def serve(self, wishes: Sequence[Wish]) -> AsyncIterator[list[Reply]]:
        """Open all wishes or none; on the way out those that have not ended are let go of."""
        if self.draining:
            raise Refusal("The server is shutting down and takes no more requests.", status=503)
        if self.engine.version is None:
            raise Refusal("The engine has no weights yet.", status=503)
        started = self.clock()
        async with self.gate.pass_through():
            replies: list[Reply] = []
            try:
                for wish, prompt, constraint in await self._prepare(wishes):
                    replies.append(self._open(wish, prompt, constraint, started))
                yield replies
            finally:
                for reply in replies:
                    self._live.pop(reply.wish.rid, None)
                    if reply.wish.turn is not None:
                        self.sessions.ended(reply.wish.turn, reply.wish.rid)
                    reply.answer.cancel()

    async def finish(self, replies: Sequence[Reply]) -> None:
        """Wait until all have ended."""
        if len(replies) == 1:
            await self._finish(replies[0])
        else:
            await asyncio.gather(*map(self._finish, replies))

    def rids_of(self, rid: str) -> list[str]:
        """The answers under way that a client means by ``rid``: the one, or all of the request it named so."""
        if rid in self._live:
            return [rid]
        return [live for live in self._live if live.startswith(f"{rid}_") and live[len(rid) + 1 :].isdigit()]

    def waiting_tokens(self, waiting: int) -> int:
        """Prompt tokens of the last ``waiting`` requests to come, which are those that have no place yet."""
        late = list(self._live.values())[max(0, len(self._live) - waiting) :] if waiting else []
        return sum(len(reply.prompt) for reply in late)

    async def _finish(self, reply: Reply) -> None:
        await reply.answer.completion()
        reply.end(self.clock())

    # -- opening ----------------------------------------------------------------------------

    async def _prepare(self, wishes: Sequence[Wish]) -> list[tuple[Wish, list[int], Constraint | None]]:
        prompts: dict[str | tuple[int, ...], list[int]] = {}
        prepared: list[tuple[Wish, list[int], Constraint | None]] = []
        for wish in wishes:
            if wish.prompt not in prompts:
                prompts[wish.prompt] = await self._encode(wish.prompt)
            constraint = None if wish.draw.rule is None else await self._constraint(wish.draw.rule)
            prompt = prompts[wish.prompt]
            if wish.turn is not None:
                prompt = await self._continued(wish.turn, prompt)
            prepared.append((wish, prompt, constraint))
        return prepared

    async def _continued(self, turn: Turn, tokens: list[int]) -> list[int]:
        """What a session has, with these tokens where they belong."""
        unfinished = self.sessions.unfinished(turn)
        if unfinished is not None:
            await self.engine.abort(unfinished, "its session went on without it")
        begins = None if self.tokenizer is None else self.tokenizer.bos_token_id
        return self.sessions.prompt_of(turn, tokens, begins)

    async def _encode(self, prompt: str | tuple[int, ...]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise Refusal("This server has no tokenizer (--skip-tokenizer-init): give input_ids instead of text.")
        if len(prompt) > LONG_TEXT:
            tokens = await asyncio.to_thread(tokenizer.prompt, prompt)
        else:
            tokens = tokenizer.prompt(prompt)
        if not tokens:
            raise Refusal("The prompt is empty, but must have at least one token.")
        return tokens

    async def _constraint(self, rule: Rule) -> Constraint:
        if self._grammars is None:
            tokenizer = None if self.tokenizer is None else self.tokenizer.as_json()
            if tokenizer is None:
                raise Refusal(f"{rule.kind} needs a fast tokenizer, and this server has none.", param=rule.kind)
            spec = self.engine.spec
            self._grammars = await asyncio.to_thread(Grammars, tokenizer, vocab_size=spec.vocab_size, ends=self._ends())
        return await asyncio.to_thread(self._grammars.constraint, rule)

    def _ends(self) -> list[int]:
        """Tokens that end a sequence: the model's and the tokenizer's."""
        own = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return list(dict.fromkeys([*self.engine.spec.eos_token_ids, *([] if own is None else [own])]))

    def _open(self, wish: Wish, prompt: list[int], constraint: Constraint | None, started: float) -> Reply:
        if wish.rid in self._live:
            raise Refusal(f"rid {wish.rid!r} is the name of a request that is still under way.", param="rid")
        ask = self._ask(wish, prompt, constraint)
        try:
            answer: Answer = self.engine.open(ask)
        except EngineError as error:
            raise Refusal(f"{error}.", status=503 if self.engine.lost else 400) from error
        draw, tokenizer = wish.draw, self.tokenizer
        spelling = None
        if tokenizer is not None:
            spelling = Spelling(tokenizer.text if draw.skip_special else tokenizer.decode, prompt, draw.sampling.stop)
        reply = Reply(wish, prompt, answer, spelling=spelling, name=self._name, label=self._label, started=started)
        self._live[wish.rid] = reply
        if wish.turn is not None:
            self.sessions.began(wish.turn, wish.rid, prompt, answer)
        return reply

    def _label(self, version: Version | None) -> str:
        """What the weights are called that drew last; before anything was drawn, those that are in force."""
        return self.labels.of(self.engine.version if version is None else version)

    def _ask(self, wish: Wish, prompt: list[int], constraint: Constraint | None) -> Ask:
        draw, context, vocabulary = wish.draw, self.context, self.engine.spec.vocab_size
        if len(prompt) >= context:
            raise Refusal(f"The prompt has {len(prompt)} tokens, but the context has room for {context}.")
        if draw.limit is not None and len(prompt) + draw.limit > context:
            raise Refusal(
                f"The prompt has {len(prompt)} tokens and {draw.limit} more are asked for, "
                f"but the context has room for {context}."
            )
        if draw.sampling.drawn > len(prompt):
            raise Refusal(f"sampling_drawn is {draw.sampling.drawn}, but the prompt has {len(prompt)} tokens.")
        if wish.scores_from is not None and wish.scores_from > len(prompt):
            raise Refusal(f"logprob_start_len is {wish.scores_from}, but the prompt has {len(prompt)} tokens.")
        if wish.experts_from is not None and wish.experts_from > len(prompt):
            raise Refusal(f"routed_experts_start_len is {wish.experts_from}, but the prompt has {len(prompt)} tokens.")
        if wish.tops > (most := min(vocabulary, MOST_TOPS)):
            raise Refusal(f"{wish.tops} likeliest tokens beside each are asked for, but at most {most} are told.")
        for token in (*wish.watch, *draw.logit_bias, *draw.sampling.stop_token_ids):
            if not 0 <= token < vocabulary:
                raise Refusal(f"Token {token} is outside the vocabulary of {vocabulary}.")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            wrong = next(token for token in prompt if not 0 <= token < vocabulary)
            raise Refusal(f"Token {wrong} of the prompt is outside the vocabulary of {vocabulary}.", param="input_ids")
        sampling = replace(
            draw.sampling,
            max_new_tokens=context - len(prompt) if draw.limit is None else draw.limit,
            stop_token_ids=self._stops(wish),
            seed=_seed(draw.seed, wish.attempt),
        )
        return Ask(
            tokens=np.array(prompt, np.int32),
            sampling=sampling,
            rid=wish.rid,
            priority=wish.priority,
            score_from=wish.scores_from if wish.scores_from is not None and wish.scores_from < len(prompt) else None,
            tops=wish.tops,
            watch=wish.watch,
            constraint=constraint,
            frequency_penalty=draw.frequency_penalty,
            presence_penalty=draw.presence_penalty,
            repetition_penalty=draw.repetition_penalty,
            logit_bias=draw.logit_bias,
            min_new_tokens=draw.min_new_tokens,
            stop_regex=draw.stop_regex,
            routed=wish.experts_from is not None,
        )

    def _stops(self, wish: Wish) -> tuple[int, ...]:
        """Stop tokens asked for, and the tokenizer's own end, which a model's config may not name."""
        sampling = wish.draw.sampling
        if sampling.ignore_eos:
            return sampling.stop_token_ids
        model = self.engine.spec.eos_token_ids
        return (*sampling.stop_token_ids, *(token for token in self._ends() if token not in model))


def _seed(given: int | None, attempt: int) -> int:
    """The seed of an answer: fresh, or the one given; further attempts at a prompt get their own from it."""
    if given is None:
        return secrets.randbits(63)
    if attempt == 0:
        return given
    return int.from_bytes(hashlib.blake2b(f"{given} {attempt}".encode(), digest_size=8).digest(), "little")

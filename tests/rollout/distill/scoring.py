"""A teacher on loopback: SGLang's ``/generate`` as far as scoring goes, over log-probs that a test gives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from tests.rollout.reward.scripted_server import Asked, Fault, Served, serving

Logps = Callable[[Sequence[int], float], np.ndarray]
"""Tokens and a temperature -> log-probs [tokens, vocabulary] of what comes after each."""


def table(vocab: int = 31, seed: int = 0) -> Logps:
    """A teacher that goes by the token before alone."""
    logits = np.random.default_rng(seed).normal(size=(vocab, vocab)) * 2

    def logps(tokens: Sequence[int], temperature: float) -> np.ndarray:
        scaled = logits[np.asarray(tokens)] / temperature
        return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))

    return logps


def scorer(logps: Logps, *, scales: bool = True, info: dict[str, Any] | None = None) -> Callable[[Asked], Any]:
    """Answers as the server does; without ``scales`` the temperature is ignored, as SGLang does with a prompt."""

    def answer(asked: Asked) -> Any:
        if asked.path == "/model_info":
            return info or {"model_path": "teacher", "is_generation": True}
        if asked.path != "/generate":
            return Fault(status=404, raw=b'{"detail": "Not Found"}')
        body = asked.body
        temperature = body["sampling_params"]["temperature"] if scales else 1.0
        count = len(body["input_ids"])
        tops = body.get("top_logprobs_num", [0] * count)
        watch = body.get("token_ids_logprob", [[]] * count)
        requests = zip(body["input_ids"], body["logprob_start_len"], tops, watch, strict=True)
        return [scored(logps(tokens, temperature), tokens, *rest) for tokens, *rest in requests]

    return answer


def scored(logp: np.ndarray, tokens: Sequence[int], start: int, tops: int, watch: Sequence[int]) -> dict[str, Any]:
    """One answer of the server's."""
    after = logp[start : len(tokens) - 1]
    own = [[float(row[token]), int(token), None] for row, token in zip(after, tokens[start + 1 :], strict=True)]
    meta: dict[str, Any] = {"input_token_logprobs": [[None, tokens[start], None], *own]}
    if tops:
        order = np.argsort(-after, axis=-1, kind="stable")[:, :tops]
        meta["input_top_logprobs"] = [None, *(_pairs(row, at) for row, at in zip(after, order, strict=True))]
    if watch:
        meta["input_token_ids_logprobs"] = [None, *(_pairs(row, watch) for row in after)]
    return {"text": "", "output_ids": [], "meta_info": meta | {"finish_reason": {"type": "length", "length": 0}}}


def _pairs(row: np.ndarray, ids: Sequence[int]) -> list[list[Any]]:
    return [[float(row[token]), int(token), None] for token in ids]


@contextmanager
def in_a_thread(answer: Callable[[Asked], Any]) -> Iterator[Served]:
    """Serve beside the test, for a run that is a process of its own."""
    loop, ready, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[Served] = []

    async def serve() -> None:
        async with serving(answer) as served:
            found.append(served)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()

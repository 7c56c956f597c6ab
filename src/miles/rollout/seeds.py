"""Seeds: pure hashes of names and numbers, so that nothing depends on order, batch composition or restarts.

Each use has its own stream, so that training, evaluation, shuffling and rewards never share a seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from miles.core.types import Prompt, Tokens

SeedFn = Callable[[Prompt, int], int]
"""(prompt, index) -> the sampling seed of that trajectory."""

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


class SeedStream(IntEnum):
    """Purpose of a hash."""

    TRAINING = 1
    EVALUATION = 2
    ORDER = 3
    REWARD = 4
    CURRICULUM = 5


def mix(*parts: int) -> int:
    """Hash integers, in order, to 64 bits.

    >>> mix(1, 2) == mix(1, 2), mix(1, 2) == mix(2, 1)
    (True, False)
    """
    return extend_hash(0, *parts)


def extend_hash(word: int, *parts: int) -> int:
    """``mix`` with more parts behind those of which ``word`` is the hash.

    >>> extend_hash(mix(1, 2), 3) == mix(1, 2, 3)
    True
    """
    for part in parts:
        word = _scramble(word ^ (part & _WORD))
    return word


def mix_each(prefix: tuple[int, ...], last: NDArray[np.int64]) -> NDArray[np.uint64]:
    """``mix(*prefix, x)`` for every ``x`` of ``last``, vectorized."""
    word = last.astype(np.uint64) ^ np.uint64(mix(*prefix))
    word = word + np.uint64(_GOLDEN)  # uint64 arrays wrap around, as intended
    word = (word ^ (word >> np.uint64(30))) * np.uint64(_FIRST)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(_SECOND)
    return word ^ (word >> np.uint64(31))


def hash_text(text: str) -> int:
    """Hash a text to 64 bits, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def make_training_seed_fn(run_seed: int) -> SeedFn:
    """Seeds of training: a 63-bit hash of (run seed, prompt, epoch, index)."""
    run = mix(SeedStream.TRAINING, run_seed)
    return lambda prompt, index: extend_hash(run, prompt.id, prompt.epoch, index) >> 1


def make_eval_seed_fn(run_seed: int, name: str) -> SeedFn:
    """Seeds of evaluation: the same at every evaluation, and distinct from training's."""
    held_out = mix(SeedStream.EVALUATION, run_seed, hash_text(name))
    return lambda prompt, index: extend_hash(held_out, prompt.id, index) >> 1


def _scramble(word: int) -> int:
    """One step of splitmix64, a bijection of 64-bit integers."""
    word = (word + _GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * _FIRST) & _WORD
    word = ((word ^ (word >> 27)) * _SECOND) & _WORD
    return word ^ (word >> 31)


def hash_context(tokens: Tokens) -> int:
    """A 64-bit hash of a context."""
    return int.from_bytes(hashlib.sha256(tokens.tobytes()).digest()[:8], "little")


def derive_turn_seed(session_seed: int, context_hash: int, num_repeats: int) -> int:
    """The seed of a turn, from its session, its context, and how often that context was requested before.

    It does not depend on other pending turns of the session, and changes when a turn is requested again.
    """
    return mix(session_seed, context_hash, num_repeats) >> 1

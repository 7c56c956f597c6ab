"""Where randomness comes from: pure hashes of names and numbers, so nothing depends on order, batch mates or restarts.

Each use has its own stream, so that no training attempt shares a seed with an evaluation, an order or a reward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from miles.core.types import Prompt

SeedOf = Callable[[Prompt, int], int]
"""The sampling seed of attempt ``index`` at a prompt."""

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


class Stream(IntEnum):
    """What a hash is for."""

    TRAINING = 1
    EVALUATION = 2
    ORDER = 3
    REWARD = 4
    LESSON = 5


def mix(*parts: int) -> int:
    """A 64-bit hash of whole numbers, in their order.

    >>> mix(1, 2) == mix(1, 2), mix(1, 2) == mix(2, 1)
    (True, False)
    """
    word = 0
    for part in parts:
        word = _scramble(word ^ (part & _WORD))
    return word


def mix_each(prefix: tuple[int, ...], last: NDArray[np.int64]) -> NDArray[np.uint64]:
    """``mix(*prefix, x)`` for every ``x`` of ``last`` at once."""
    word = last.astype(np.uint64) ^ np.uint64(mix(*prefix))
    word = word + np.uint64(_GOLDEN)  # arrays of uint64 wrap, which is what is wanted
    word = (word ^ (word >> np.uint64(30))) * np.uint64(_FIRST)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(_SECOND)
    return word ^ (word >> np.uint64(31))


def text_number(text: str) -> int:
    """A 64-bit number that stands for a text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def training_seeds(run_seed: int) -> SeedOf:
    """Seeds of training attempts: a 63-bit hash of (run seed, prompt, epoch, attempt)."""
    return lambda prompt, index: mix(Stream.TRAINING, run_seed, prompt.id, prompt.epoch, index) >> 1


def evaluation_seeds(run_seed: int, name: str) -> SeedOf:
    """Seeds of evaluation attempts: the same at every evaluation, and apart from training's."""
    held_out = text_number(name)
    return lambda prompt, index: mix(Stream.EVALUATION, run_seed, held_out, prompt.id, index) >> 1


def _scramble(word: int) -> int:
    """One step of splitmix64: every input bit reaches every output bit, and no two inputs meet."""
    word = (word + _GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * _FIRST) & _WORD
    word = ((word ^ (word >> 27)) * _SECOND) & _WORD
    return word ^ (word >> 31)

"""Teachers before a run starts: do they answer, do they know the policy's tokens, and at which temperature?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles.core.errors import UsageError
from miles.core.protocols import Tokenizer
from miles.rollout.reward.score import GradingError, Refused
from miles.rollout.teach.sets import TopSet
from miles.rollout.teach.teacher import Teacher
from miles.rollout.teach.wire import Said, Wish

_OTHER = 1.7
"""A factor by which a temperature changes what is said, whatever it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a teacher must be able to do: read the policy's ``vocabulary`` of tokens, and ``positions`` of them.

    ``tokens`` are some that the policy will read; ``text`` has tokens from all over the vocabulary.
    """

    tokens: Sequence[int]
    text: str
    vocabulary: int
    positions: int
    top: TopSet | None


async def try_out(teacher: Teacher, tokenizer: Tokenizer, needs: Needs) -> None:
    """Raise, in one sentence, where a teacher cannot teach this policy."""
    await _introduced(teacher, needs)
    await _spelt(teacher, tokenizer, needs.text)
    # The largest token is among those that are tried: better now than in the middle of a run.
    own, top = (*needs.tokens[: needs.positions - 1], needs.vocabulary - 1), needs.top
    watch = tuple(sorted(set(own))) if top is not None and top.watches else ()
    wish = Wish(tokens=own, start=1, tops=top.k if top is not None and top.asks_teacher else 0, watch=watch)
    said = await _asked(teacher, wish, teacher.temperature)
    if teacher.temperature == 1:
        return
    other = await _asked(teacher, wish, teacher.temperature * _OTHER)
    if np.array_equal(said.logprob_n, other.logprob_n):
        raise UsageError(
            f"{_who(teacher)} gives log-probs at temperature 1 whatever it is asked, and the policy is trained at "
            f"--rollout-temperature {teacher.temperature:g}; set that to 1, or let the trainer hold the teacher with "
            "--opd-teacher-load."
        )


async def _introduced(teacher: Teacher, needs: Needs) -> None:
    """What a server tells of itself, as far as it does: a token beyond a vocabulary can end one that does not check."""
    who, model = _who(teacher), await _told(teacher, "/model_info", must=True)
    size = model.get("vocab_size")
    if isinstance(size, int) and size < needs.vocabulary:
        raise UsageError(f"{who} knows {size} tokens and the policy {needs.vocabulary}; it must know all of them.")
    if model.get("is_generation") is False:
        raise UsageError(f"{who} serves a model that writes nothing and gives tokens no log-probs; serve another.")
    served = (await _told(teacher, "/v1/models")).get("data")
    longest = served[0].get("max_model_len") if isinstance(served, list) and served else None
    if isinstance(longest, int) and longest < needs.positions:
        raise UsageError(
            f"{who} reads {longest} positions and the policy may write {needs.positions}; give "
            f"--rollout-max-context-len {longest} or less."
        )


async def _spelt(teacher: Teacher, tokenizer: Tokenizer, text: str) -> None:
    """Does a server that can be asked read a text as the same tokens?"""
    theirs = (await _told(teacher, "/tokenize", {"prompt": text, "add_special_tokens": False})).get("tokens")
    ours = tokenizer.encode(text)
    if not isinstance(theirs, list) or theirs == ours:
        return
    place = next((at for at, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), 0)
    raise UsageError(
        f"{_who(teacher)} has another tokenizer than --hf-checkpoint: the policy's token {ours[place]} is "
        f"{tokenizer.decode(ours[place : place + 1])!r}, and the teacher does not know it by that number; choose a "
        "teacher of the same vocabulary."
    )


async def _asked(teacher: Teacher, wish: Wish, temperature: float) -> Said:
    try:
        return await teacher.try_out(wish, temperature)
    except GradingError as error:
        raise _useless(teacher, error) from error


async def _told(teacher: Teacher, path: str, body: Any = None, *, must: bool = False) -> dict[str, Any]:
    """An object that a server may have at ``path``, empty where it has none; with ``must`` it is at least there."""
    try:
        found = await (teacher.client.get(path) if body is None else teacher.client.post(path, body))
    except Refused:
        return {}
    except GradingError as error:
        if must:
            raise _useless(teacher, error) from error
        return {}
    return found if isinstance(found, dict) else {}


def _who(teacher: Teacher) -> str:
    return f"the teacher {teacher.name} at {teacher.url}"


def _useless(teacher: Teacher, error: GradingError) -> UsageError:
    return UsageError(f"{_who(teacher)} cannot be used: {error}; start it, or mend --opd-teacher-urls.")

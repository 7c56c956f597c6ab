"""Teacher preflight checks: reachable, same tokenizer and vocabulary, enough context, right temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles.core.errors import UsageError
from miles.core.protocols import Tokenizer
from miles.rollout.distill.teacher_client import TeacherClient
from miles.rollout.distill.topk_set import TopKSet
from miles.rollout.distill.wire import ScoreRequest, TokenScores
from miles.rollout.reward.types import GradingError, NonRetryableError

_OTHER_TEMPERATURE = 1.7
"""Factor by which the temperature is changed to see whether log-probs follow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRequirements:
    """What the policy requirements of a teacher: ``vocab_size`` tokens, and a context of ``positions``.

    ``tokens`` are some that the policy will read; ``text`` has tokens from all over the vocabulary.
    """

    tokens: Sequence[int]
    text: str
    vocab_size: int
    positions: int
    top: TopKSet | None


async def check_teacher(teacher: TeacherClient, tokenizer: Tokenizer, requirements: TeacherRequirements) -> None:
    """Raise UsageError where a teacher cannot be used for this policy."""
    await _check_model_info(teacher, requirements)
    await _check_tokenizer(teacher, tokenizer, requirements.text)
    # The largest token is included: an error now is better than one in the middle of a run.
    tokens, top = (*requirements.tokens[: requirements.positions - 1], requirements.vocab_size - 1), requirements.top
    query_ids = tuple(sorted(set(tokens))) if top is not None and top.scores_student_tokens else ()
    request = ScoreRequest(
        tokens=tokens, start=1, top_k=top.k if top is not None and top.needs_teacher_top_k else 0, query_ids=query_ids
    )
    scores = await _score(teacher, request, teacher.temperature)
    if teacher.temperature == 1:
        return
    other = await _score(teacher, request, teacher.temperature * _OTHER_TEMPERATURE)
    if np.array_equal(scores.logprob_n, other.logprob_n):
        raise UsageError(
            f"{_name(teacher)} returns log-probs at temperature 1 whatever is requested, and the policy is trained at "
            f"--rollout-temperature {teacher.temperature:g}; set that to 1, or let the trainer hold the teacher with "
            "--opd-teacher-load."
        )


async def _check_model_info(teacher: TeacherClient, requirements: TeacherRequirements) -> None:
    """Check the server's model info, as far as it has one: a token beyond the vocabulary can crash a server."""
    name, model = _name(teacher), await _fetch(teacher, "/model_info", required=True)
    size = model.get("vocab_size")
    if isinstance(size, int) and size < requirements.vocab_size:
        raise UsageError(
            f"{name} knows {size} tokens and the policy {requirements.vocab_size}; it must know all of them."
        )
    if model.get("is_generation") is False:
        raise UsageError(f"{name} serves a model that does not generate and returns no log-probs; serve another.")
    served = (await _fetch(teacher, "/v1/models")).get("data")
    longest = served[0].get("max_model_len") if isinstance(served, list) and served else None
    if isinstance(longest, int) and longest < requirements.positions:
        raise UsageError(
            f"{name} reads {longest} positions and the policy may write {requirements.positions}; give "
            f"--rollout-max-context-len {longest} or less."
        )


async def _check_tokenizer(teacher: TeacherClient, tokenizer: Tokenizer, text: str) -> None:
    """Check that the server tokenizes a text like the policy, where it has an endpoint for that."""
    theirs = (await _fetch(teacher, "/tokenize", {"prompt": text, "add_special_tokens": False})).get("tokens")
    ours = tokenizer.encode(text)
    if not isinstance(theirs, list) or theirs == ours:
        return
    place = next((at for at, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), 0)
    raise UsageError(
        f"{_name(teacher)} has another tokenizer than --hf-checkpoint: the policy's token {ours[place]} is "
        f"{tokenizer.decode(ours[place : place + 1])!r}, and the teacher does not know it by that number; choose a "
        "teacher of the same vocabulary."
    )


async def _score(teacher: TeacherClient, request: ScoreRequest, temperature: float) -> TokenScores:
    try:
        return await teacher.probe(request, temperature)
    except GradingError as error:
        raise _unusable(teacher, error) from error


async def _fetch(teacher: TeacherClient, path: str, body: Any = None, *, required: bool = False) -> dict[str, Any]:
    """Fetch a JSON object, empty where there is none; a ``required`` server has to be reachable."""
    try:
        found = await (teacher.client.get(path) if body is None else teacher.client.post(path, body))
    except NonRetryableError:
        return {}
    except GradingError as error:
        if required:
            raise _unusable(teacher, error) from error
        return {}
    return found if isinstance(found, dict) else {}


def _name(teacher: TeacherClient) -> str:
    return f"the teacher {teacher.name} at {teacher.url}"


def _unusable(teacher: TeacherClient, error: GradingError) -> UsageError:
    return UsageError(f"{_name(teacher)} cannot be used: {error}; start it, or fix --opd-teacher-urls.")

"""Teachers before a run starts: do they read the policy's tokens, has every prompt one, who asks those elsewhere?"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from miles.algo.distill import teacher_of
from miles.backends.native.engine import NativeEngine
from miles.backends.native.tops import Watched
from miles.core.errors import UsageError
from miles.core.protocols import Engine, Generate
from miles.core.types import Prompt, Tokens
from miles.launch.config import Config
from miles.launch.plan import Plan
from miles.models.spec import DecoderSpec
from miles.models.tokenizer import HubTokenizer, load_tokenizer
from miles.rollout.mixture import Part
from miles.rollout.sampling import context_limit

if TYPE_CHECKING:
    from miles.rollout.teach.sets import TopSet
    from miles.rollout.teach.teacher import Teacher

Applied = Callable[[Engine, Generate], tuple[Engine, Generate]]
"""The engine and the generate function of a run -> the same, with teachers listening."""
_SPREAD = 64
"""Tokens from all over the vocabulary that a teacher must read alike, and as many of the largest numbers."""


async def teachers_for(
    config: Config,
    plan: Plan,
    parts: Sequence[Part],
    *,
    tokenizer: HubTokenizer,
    spec: DecoderSpec,
    render: Callable[[Prompt], Tokens],
) -> Applied:
    """Look at every teacher and raise where one cannot teach; what it gives brings those elsewhere into the rollout."""
    _check_held(config, plan.teachers, tokenizer)
    names = tuple(plan.teachers or plan.teacher_urls)
    routed = bool(config.train.opd_teachers) or bool(set(plan.teacher_urls) - {"default"})
    if routed:
        for prompt in (prompt for part in parts for prompt in part.dataset.prompts):
            teacher_of(prompt, names, config.algo.opd_teacher_key)
    if not plan.teacher_urls:
        return lambda engine, generate: (engine, generate)
    teachers, top = _served(config, plan.teacher_urls), _top_of(config, spec)
    from miles.rollout.teach.probe import Needs, try_out

    needs = Needs(
        tokens=render(parts[0].dataset.prompts[0]).tolist(),
        text=_all_over(tokenizer),
        vocabulary=len(tokenizer),
        positions=context_limit(config.rollout, spec.max_positions),
        top=top,
    )
    for teacher in teachers:
        await try_out(teacher, tokenizer, needs)
    which = partial(teacher_of, names=names, key=config.algo.opd_teacher_key) if routed else _the_only
    return partial(_applied, teachers, which, top)


def _applied(
    teachers: Sequence[Teacher],
    which: Callable[[Prompt], int],
    top: TopSet | None,
    engine: Engine,
    generate: Generate,
) -> tuple[Engine, Generate]:
    from miles.rollout.teach.taught import Taught

    watched = top is not None and top.asks_student
    door: Engine = engine
    if top is not None and watched:
        assert isinstance(engine, NativeEngine), "a rule keeps servers from being asked for their likeliest tokens"
        door = Watched(engine=engine, k=top.k)
    return door, Taught(generate=generate, teachers=teachers, teacher_of=which, top=top)


def _the_only(prompt: Prompt) -> int:
    return 0


def _check_held(config: Config, teachers: Mapping[str, Path], tokenizer: HubTokenizer) -> None:
    """Raise where a teacher of the trainer's has another tokenizer than the policy's."""
    ours = tokenizer.vocabulary()
    for folder in teachers.values():
        theirs = load_tokenizer(folder, config.models.trust_remote_code).vocabulary()
        differ = sorted(ours.items() - theirs.items(), key=lambda pair: pair[1])
        if differ:
            word, number = differ[0]
            raise UsageError(
                f"the teacher in {folder} has another tokenizer than --hf-checkpoint: the policy's token {number} is "
                f"{word!r}, and the teacher does not know it by that number; choose a teacher of the same vocabulary."
            )


def _served(config: Config, urls: Mapping[str, str]) -> list[Teacher]:
    if importlib.util.find_spec("httpx") is None:
        raise UsageError("--opd-teacher-urls needs the package httpx; install it with pip install 'miles-rl[graders]'.")
    from miles.rollout.reward.means import Server
    from miles.rollout.teach.teacher import Teacher

    r, token = config.rollout, config.rollout.opd_teacher_token_env
    if token is not None and not os.environ.get(token):
        raise UsageError(f"--opd-teacher-token-env {token}: there is no such environment variable, or it is empty.")
    how = {
        "token": None if token is None else os.environ[token],
        "retries": r.opd_teacher_retries,
        "concurrency": r.opd_teacher_concurrency,
        "seconds": r.opd_teacher_timeout,
        "batch": r.opd_teacher_batch_size,
    }
    temperature = config.rollout.rollout_temperature
    return [Teacher(name, Server(url=url, **how), temperature=temperature) for name, url in urls.items()]


def _top_of(config: Config, spec: DecoderSpec) -> TopSet | None:
    from miles.rollout.teach.sets import TopSet

    k = config.algo.opd_log_prob_top_k
    return TopSet(k=k, strategy=config.algo.opd_top_k_strategy, vocabulary=spec.vocab_size) if k > 0 else None


def _all_over(tokenizer: HubTokenizer) -> str:
    """Tokens from all over the vocabulary, each on a line; those that are no whole character are left out."""
    count = len(tokenizer)
    chosen = sorted({*range(0, count, max(1, count // _SPREAD)), *range(max(0, count - _SPREAD), count)})
    return "\n".join(word for word in (tokenizer.decode([token]) for token in chosen) if "\ufffd" not in word)

"""Distillation teachers: check tokenizers and prompts before a run, and score trajectories with served teachers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from miles.algo.distillation_loss import resolve_teacher
from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.engine.request import GenerateRequest
from miles.core.errors import UsageError
from miles.core.media import Images
from miles.core.protocols import Completion, Engine, Generate, SamplingParams
from miles.core.token_fields import TOP_TOKENS
from miles.core.types import Prompt, Span, Tokens
from miles.launch.config import Config
from miles.launch.plan.plan import Plan
from miles.models.spec import DecoderSpec
from miles.models.tokenizer import HfTokenizer, load_tokenizer
from miles.rollout.config import resolve_context_limit
from miles.rollout.data.mixture import MixturePart

if TYPE_CHECKING:
    from miles.rollout.distill.teacher_client import TeacherClient
    from miles.rollout.distill.topk_set import TopKSet

WithTeachers = Callable[[Engine, NativeEngine | None, Generate], tuple[Engine, Generate]]
"""Wraps the generate function so that teachers score its trajectories; the engine may return top-k logprobs too."""
_PROBE_TOKENS = 64
"""Tokens sampled evenly from the vocabulary, and as many of the highest ids, that a teacher must read alike."""


async def build_teachers(
    config: Config,
    plan: Plan,
    parts: Sequence[MixturePart],
    *,
    tokenizer: HfTokenizer,
    spec: DecoderSpec,
    render: Callable[[Prompt], Tokens],
) -> WithTeachers:
    """Check every prompt and served teacher, and return the function that adds served teachers to the rollout."""
    names = tuple(plan.teachers or plan.teacher_urls)
    several = bool(config.train.opd_teachers) or bool(set(plan.teacher_urls) - {"default"})
    if several:
        for prompt in (prompt for part in parts for prompt in part.dataset.prompts):
            resolve_teacher(prompt, names, config.algo.opd_teacher_key)
    if not plan.teacher_urls:
        return lambda engine, native, generate: (engine, generate)
    teachers, top = _build_clients(config, plan.teacher_urls), _build_top_k_set(config, spec)
    from miles.rollout.distill.preflight import TeacherRequirements, check_teacher

    requirements = TeacherRequirements(
        tokens=render(parts[0].dataset.prompts[0]).tolist(),
        text=_sample_vocabulary(tokenizer),
        vocab_size=len(tokenizer),
        positions=resolve_context_limit(config.rollout, spec.max_positions),
        top=top,
    )
    for teacher in teachers:
        await check_teacher(teacher, tokenizer, requirements)
    select = partial(resolve_teacher, names=names, key=config.algo.opd_teacher_key) if several else _select_first
    return partial(_add_teachers, teachers, select, top)


def _add_teachers(
    teachers: Sequence[TeacherClient],
    select: Callable[[Prompt], int],
    top: TopKSet | None,
    engine: Engine,
    native: NativeEngine | None,
    generate: Generate,
) -> tuple[Engine, Generate]:
    from miles.rollout.distill.scored_generate import TeacherScoredGenerate

    if top is not None and top.needs_student_top_k:
        assert native is not None, "a rule refuses remote engines here"
        engine = TopLogprobsEngine(engine=native, k=top.k)
    return engine, TeacherScoredGenerate(generate=generate, teachers=teachers, select_teacher=select, top=top)


def _select_first(prompt: Prompt) -> int:
    return 0


def check_tokenizers(config: Config, teachers: Mapping[str, Path], tokenizer: HfTokenizer) -> None:
    """Raise where a teacher in the trainer has another tokenizer than the policy."""
    ours = tokenizer.vocabulary()
    for folder in teachers.values():
        theirs = load_tokenizer(folder, config.models.trust_remote_code).vocabulary()
        differ = sorted(ours.items() - theirs.items(), key=lambda pair: pair[1])
        if differ:
            token, token_id = differ[0]
            raise UsageError(
                f"the teacher in {folder} has another tokenizer than --hf-checkpoint: the policy's token {token_id} is "
                f"{token!r}, which the teacher does not have under that id; choose a teacher with the same vocabulary."
            )


def _build_clients(config: Config, urls: Mapping[str, str]) -> list[TeacherClient]:
    if importlib.util.find_spec("httpx") is None:
        raise UsageError("--opd-teacher-urls needs the package httpx; install it with pip install 'miles-rl[graders]'.")
    from miles.rollout.distill.teacher_client import TeacherClient
    from miles.rollout.reward.context import HTTPEndpoint

    r, token = config.rollout, config.rollout.opd_teacher_token_env
    if token is not None and not os.environ.get(token):
        raise UsageError(f"--opd-teacher-token-env {token}: this environment variable is unset or empty; set it.")

    def build_client(name: str, url: str) -> TeacherClient:
        endpoint = HTTPEndpoint(
            url=url,
            token=None if token is None else os.environ[token],
            retries=r.opd_teacher_retries,
            concurrency=r.opd_teacher_concurrency,
            seconds=r.opd_teacher_timeout,
            batch=r.opd_teacher_batch_size,
        )
        return TeacherClient(name, endpoint, temperature=r.rollout_temperature)

    return [build_client(name, url) for name, url in urls.items()]


def _build_top_k_set(config: Config, spec: DecoderSpec) -> TopKSet | None:
    from miles.rollout.distill.topk_set import TopKSet

    k = config.algo.opd_log_prob_top_k
    return TopKSet(k=k, strategy=config.algo.opd_top_k_strategy, vocab_size=spec.vocab_size) if k > 0 else None


def _sample_vocabulary(tokenizer: HfTokenizer) -> str:
    """Tokens sampled from the whole vocabulary, one per line, without those that are not a whole character."""
    count = len(tokenizer)
    token_ids = sorted({*range(0, count, max(1, count // _PROBE_TOKENS)), *range(max(0, count - _PROBE_TOKENS), count)})
    return "\n".join(text for text in (tokenizer.decode([token]) for token in token_ids) if "\ufffd" not in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobsEngine:
    """A core.protocols.Engine whose spans carry the ``k`` most likely tokens at each position as an extra.

    A vocabulary of fewer tokens gives all it has; the rest are -1.
    """

    engine: NativeEngine
    k: int

    async def generate(self, tokens: Tokens, sampling: SamplingParams, images: Images = ()) -> Completion:
        request = GenerateRequest(tokens=tokens, sampling=sampling, top_logprobs_num=self.k, images=images)
        output = self.engine.submit(request)
        completion = await output.completion()
        top_logprobs = output.top_logprobs
        top_nk = np.full((len(top_logprobs), self.k), -1, np.int32)
        for row, candidates in zip(top_nk, top_logprobs, strict=True):
            row[: len(candidates)] = [token for token, _ in candidates[: self.k]]
        assert len(top_nk) == sum(map(len, completion.spans)), "every sampled token has its top log-probs"
        spans: list[Span] = []
        start = 0
        for span in completion.spans:
            spans.append(replace(span, extras={**span.extras, TOP_TOKENS: top_nk[start : start + len(span)]}))
            start += len(span)
        return replace(completion, spans=tuple(spans))

"""Reader of upstream's rollout dumps: ``torch.save`` of a step's samples, read without executing pickled code.

``weights_only`` loading builds containers, numbers, texts and tensors, and nothing else: a file with any other object
is refused. Log-probs are those of the engine that sampled; the tokens count as the current version's, as upstream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import numpy as np

from miles.core.errors import DataError
from miles.core.token_fields import INDEXER_TOPK, ROUTED_EXPERTS
from miles.core.types import Author, Group, Prompt, Reward, Span, Status, Trajectory, Version
from miles.observe.rollout_reader import StepRollouts

LoadFn = Callable[[Path], Any]
_STATUS = {"completed": Status.COMPLETED, "truncated": Status.TRUNCATED, "failed": Status.FAILED}


def is_torch_dump(path: Path) -> bool:
    """Whether a file is one that ``torch.save`` wrote, which is a ZIP archive."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def read_torch_dump(path: Path, load: LoadFn, *, step: int, reward_key: str | None = None) -> StepRollouts:
    """The groups of a dump; DataError if it is not one, or holds what cannot be trained on.

    ``load`` reads a file of ``torch.save`` and raises UnpicklingError for objects that are not plain data.
    """
    try:
        content = load(path)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise DataError(
            f"{path} cannot be read without running code of the file: {str(error).splitlines()[0].rstrip('.')}; write "
            "dumps of plain lists, numbers, texts and tensors."
        ) from error
    samples = cast("dict[str, Any]", content).get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, list) or not all(isinstance(each, dict) for each in samples):
        raise DataError(f"{path} is no dump of rollouts: it needs a list of samples under the key samples.")
    groups = [
        _build_group(path, key, list(each), step, reward_key)
        for key, each in groupby(samples, key=lambda sample: sample.get("group_index"))
    ]
    return StepRollouts(
        path=path,
        step=step,
        tickets=tuple(range(len(groups))),
        groups=tuple(groups),
        probe=(),
        advantages=(),
        times=(),
        vocabulary=None,
        lost={},
        excluded_extras=(INDEXER_TOPK, ROUTED_EXPERTS),
    )


def _build_group(
    path: Path, key: Any, samples: Sequence[Mapping[str, Any]], step: int, reward_key: str | None
) -> Group:
    first = samples[0]
    if key is None:
        raise DataError(f"{path}: a sample has no group_index, by which trajectories of one prompt are known.")
    text = first.get("prompt") or ""
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
    metadata = {str(name): value for name, value in (first.get("metadata") or {}).items()}
    prompt = Prompt(id=int(key), messages=messages, label=first.get("label"), metadata=metadata)
    return Group(
        prompt=prompt,
        trajectories=tuple(
            _build_trajectory(f"{path}, sample {sample.get('index', number)}", number, sample, step, reward_key)
            for number, sample in enumerate(samples)
        ),
    )


def _build_trajectory(
    where: str, number: int, sample: Mapping[str, Any], step: int, reward_key: str | None
) -> Trajectory:
    tokens = np.asarray(sample.get("tokens") or (), np.int32)
    length = int(sample.get("response_length") or 0)
    logprobs = sample.get("rollout_log_probs")
    if not 0 < length < len(tokens):
        raise DataError(f"{where}: a response of {length} of {len(tokens)} tokens cannot be trained on.")
    if logprobs is None or len(logprobs) != length:
        raise DataError(f"{where}: rollout_log_probs must have a log-prob for each of the {length} response tokens.")
    mask = [0] * length if sample.get("remove_sample") else sample.get("loss_mask") or [1] * length
    if len(mask) != length:
        raise DataError(f"{where}: loss_mask has {len(mask)} entries for {length} response tokens.")
    start = len(tokens) - length
    prompt = Span(author=Author.PROMPT, tokens=tokens[:start].copy())
    response = _split_response(tokens[start:], np.asarray(logprobs, np.float32), mask, Version(number=step - 1))
    return Trajectory(
        branches=((prompt, *response),),
        status=_STATUS.get(str(sample.get("status")), Status.COMPLETED),
        reward=_build_reward(where, sample.get("reward"), reward_key),
        index=number,
        metadata={"text": str(sample.get("response") or "")},
    )


def _split_response(tokens: Any, logprobs: Any, mask: Sequence[int], version: Version) -> Iterator[Span]:
    """A span for each run of equal mask: the policy's where it is 1, the environment's where it is 0."""
    start = 0
    for trained, run in groupby(map(bool, mask)):
        part = slice(start, start + sum(1 for _ in run))
        start = part.stop
        yield Span(
            author=Author.POLICY if trained else Author.ENV,
            tokens=tokens[part].copy(),
            logprobs=logprobs[part].copy() if trained else None,
            version=version if trained else None,
        )


def _build_reward(where: str, reward: Any, reward_key: str | None) -> Reward:
    if isinstance(reward, dict):
        parts = {str(k): float(v) for k, v in reward.items() if isinstance(v, int | float)}
        if reward_key not in parts:
            raise DataError(f"{where}: the reward has the parts {', '.join(parts)}; name one with --reward-key.")
        return Reward(value=parts[reward_key], parts=parts)
    if not isinstance(reward, int | float):
        raise DataError(f"{where} has no reward.")
    return Reward(value=float(reward))

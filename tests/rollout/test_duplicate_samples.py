"""Copies in a group are reported only where chance cannot explain them."""

import asyncio
import math

import numpy as np
import pytest

from miles.core.errors import EngineError
from miles.core.protocols import SamplingParams
from miles.core.types import Author, Prompt, Reward, Span, Status, Trajectory, Version
from miles.rollout.duplicate_samples import find_improbable_copies
from miles.rollout.group_rollout import GroupRollout


def sample(tokens, logprob):
    ids = np.array(tokens, np.int32)
    span = Span(author=Author.POLICY, tokens=ids, logprobs=np.full(len(ids), logprob, np.float32), version=Version())
    return Trajectory(branches=((span,),), status=Status.COMPLETED)


def test_copies_of_a_long_uncertain_sample_are_reported():
    group = [sample(range(100), -1.0)] * 8
    found = find_improbable_copies(group, SamplingParams(temperature=1.0))
    assert found == (
        "8 of 8 samples have the same 100 tokens, which independent sampling gives with probability e^-700"
    )


def test_a_pair_among_different_samples_is_reported_too():
    group = [sample(range(100), -1.0), sample(range(1, 101), -1.0), sample(range(100), -1.0)]
    assert "2 of 3 samples" in str(find_improbable_copies(group, SamplingParams(temperature=1.0)))


@pytest.mark.parametrize(
    ("group", "sampling"),
    [
        ([sample(range(100), -1.0), sample(range(1, 101), -1.0)], {}),  # different samples
        ([sample([5], -0.7)] * 8, {}),  # a short answer
        ([sample(range(100), -0.001)] * 8, {}),  # a model that is sure
        ([sample(range(100), -1.0)] * 8, {"temperature": 0.0}),  # greedy
        ([sample(range(100), -1.0)] * 8, {"top_k": 1}),
        ([sample(range(100), math.log(0.5))] * 2, {"top_p": 0.5}),  # what top-p leaves is certain
        ([sample([], -1.0)] * 2, {}),
    ],
)
def test_copies_that_sampling_explains_are_not(group, sampling):
    assert find_improbable_copies(group, SamplingParams(**{"temperature": 1.0, **sampling})) is None


async def copies(prompt, engine, sampling):
    """A generate function that ignores its seed."""
    return sample(range(100), -1.0)


async def constant(prompt, trajectory):
    return Reward(value=1.0)


def rollout(**more):
    return GroupRollout(
        engine=None,  # type: ignore[arg-type]
        generate=copies,
        sampling=SamplingParams(temperature=1.0),
        group_size=4,
        seed_fn=lambda prompt, index: index,
        reward=constant,
        **more,
    )


def test_a_group_of_copies_ends_the_run_unless_it_is_allowed():
    prompt = Prompt(id=7, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(EngineError, match=r"Prompt 7: 4 of 4 samples .* --allow-duplicate-samples"):
        asyncio.run(rollout().produce(prompt))
    assert len(asyncio.run(rollout(allow_duplicates=True).produce(prompt)).trajectories) == 4

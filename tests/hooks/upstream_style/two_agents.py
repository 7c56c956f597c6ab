"""A generate function of two agents, whose conversations are trained on with one reward."""

import copy

from miles.rollout.rm_hub import async_rm
from miles.rollout.sglang_rollout import generate
from miles.utils.types import Sample


async def generate_with_agents(args, sample: Sample, sampling_params, evaluation=False) -> list[Sample]:
    critic = copy.deepcopy(sample)
    solver = await generate(args, sample, sampling_params.copy())
    critic.prompt = f"{solver.prompt}{solver.response}"
    critic = await generate(args, critic, sampling_params.copy())
    reward = await async_rm(args, solver)
    solver.reward = critic.reward = reward
    return [critic, solver]

"""A rollout function that asks for more groups than it needs, keeps those that differ, and returns the others."""

import asyncio

from miles.rollout.base_types import RolloutFnTrainOutput
from miles.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from miles.rollout.sglang_rollout import GenerateState, eval_rollout, generate_and_rm_group
from miles.utils.async_utils import run
from miles.utils.types import Sample


async def fill(args, data_source) -> list[list[Sample]]:
    state, kept, spare = GenerateState(args), [], []
    while len(kept) < args.rollout_batch_size:
        groups = data_source.get_samples(2 * args.rollout_batch_size)
        for task in asyncio.as_completed(
            [generate_and_rm_group(args, group, state.sampling_params.copy()) for group in groups]
        ):
            group = await task
            if not check_reward_nonzero_std(args, group).keep:
                continue
            (kept if len(kept) < args.rollout_batch_size else spare).append(group)
    data_source.add_samples(spare)
    return kept


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        output, _ = run(eval_rollout(args, rollout_id))
        return output
    return RolloutFnTrainOutput(samples=run(fill(args, data_source)))

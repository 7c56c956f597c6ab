"""A rollout function that is a class, for training and evaluation."""

import asyncio

from miles.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
)
from miles.rollout.sglang_rollout import GenerateState, eval_rollout, generate_and_rm_group


class CountingRollout:
    def __init__(self, input: RolloutFnConstructorInput):
        self.args = input.args
        self.data_source = input.data_source
        self.calls: list[int] = []

    async def __call__(
        self, input: RolloutFnTrainInput | RolloutFnEvalInput
    ) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
        if input.evaluation:
            output, _ = await eval_rollout(self.args, input.rollout_id)
            return output
        self.calls.append(input.rollout_id)
        assert self.calls == list(range(input.rollout_id + 1))
        state = GenerateState(self.args)
        groups = self.data_source.get_samples(self.args.rollout_batch_size)
        done = await asyncio.gather(
            *(generate_and_rm_group(self.args, group, state.sampling_params.copy()) for group in groups)
        )
        return RolloutFnTrainOutput(samples=list(done), metrics={"rollout/calls": len(self.calls)})

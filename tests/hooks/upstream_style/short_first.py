"""A data source that starts with the short prompts, and a log function."""

from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.utils import tracking_utils
from miles.utils.metric_utils import compute_rollout_step


class ShortFirst(RolloutDataSourceWithBuffer):
    def __init__(self, args):
        super().__init__(args)
        self.dataset.samples.sort(key=lambda sample: len(sample.prompt))

    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        for group in groups:
            for sample in group:
                sample.metadata["size"] = len(sample.prompt)
        return groups


def log_sizes(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    metrics = {"mine/size": sum(s.metadata["size"] for s in samples) / len(samples)}
    metrics["rollout/step"] = compute_rollout_step(args, rollout_id)
    tracking_utils.log(args, metrics, step_key="rollout/step")
    return False

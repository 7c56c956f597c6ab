"""Rewards of a whole group, their normalization, and filters of samples."""

from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.utils.iter_utils import group_by
from miles.utils.metric_utils import compute_statistics, dict_add_prefix
from miles.utils.types import Sample

SEEN: list[int] = []


async def rank(args, samples: list[Sample], **kwargs) -> list[float]:
    ordered = sorted(samples, key=lambda sample: (len(set(sample.response)), sample.index))
    return [float(ordered.index(sample)) for sample in samples]


def post_process(args, samples: list[Sample]):
    raw = [sample.get_reward_value(args) for sample in samples]
    groups = group_by(samples, key=lambda sample: sample.group_index)
    means = {key: sum(s.reward for s in group) / len(group) for key, group in groups.items()}
    return raw, [sample.reward - means[sample.group_index] for sample in samples]


def keep(args, samples: list[Sample], **kwargs) -> DynamicFilterOutput:
    return DynamicFilterOutput(keep=len({s.reward for s in samples}) > 1, reason="all_equal")


def drop_truncated(args, data: list[list[Sample]]) -> None:
    for group in data:
        for sample in group[1:]:
            sample.remove_sample = sample.status == Sample.Status.TRUNCATED


def look(args, all_samples: list[list[Sample]], data_source) -> None:
    SEEN.append(len(all_samples))


def log_rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool:
    lengths = compute_statistics([sample.response_length for sample in samples])
    rollout_extra_metrics.update(dict_add_prefix(lengths, "mine/length_"))
    return False

"""Functions as upstream's users write them, and some that cannot be fitted."""

from miles.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.utils.async_utils import run
from miles.utils.http_utils import post
from miles.utils.types import Sample

URL = "http://engine.invalid:80/generate"


async def generate(args, sample, sampling_params):
    output = await post(URL, {"input_ids": [1, 2, 3], "sampling_params": sampling_params})
    wrote = [token for _, token, _ in output["meta_info"]["output_token_logprobs"]]
    sample.tokens, sample.response_length = [1, 2, 3, *wrote], len(wrote)
    sample.response, sample.status = output["text"], Sample.Status.COMPLETED
    return sample


async def generate_by_text(args, sample, sampling_params):
    output = await post(URL, {"text": "1 2 3", "sampling_params": {"max_new_tokens": 2, "stop": "x"}})
    sample.tokens, sample.response_length = [1, 2, 3, *output["output_ids"][:3]], 3
    sample.response, sample.status = output["text"], Sample.Status.COMPLETED
    return sample


async def generate_told(args, sample, sampling_params, evaluation):
    sample = await generate(args, sample, sampling_params)
    sample.metadata["evaluation"] = evaluation
    return sample


async def two_branches(args, sample, sampling_params):
    other = Sample(status=Sample.Status.COMPLETED)
    output = await post(URL, {"input_ids": [7, 7], "sampling_params": sampling_params})
    other.tokens, other.response_length = [7, 7, *output["output_ids"]], len(output["output_ids"])
    return [other, await generate(args, sample, sampling_params)]


async def tokenised_anew(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.tokens[-1] += 1
    return sample


async def shifted(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.tokens = [5, *sample.tokens]
    return sample


async def unmasked(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.tokens, sample.response_length = [*sample.tokens, 9], sample.response_length + 1
    return sample


async def short_mask(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.loss_mask = [1]
    return sample


async def pending(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.status = Sample.Status.PENDING
    return sample


async def elsewhere(args, sample, sampling_params):
    await post("http://engine.invalid/flush_cache", {})


async def odd_sampling(args, sample, sampling_params):
    await post(URL, {"input_ids": [1], "sampling_params": {"repetition_penalty": 1.1}})


async def given_up(args, sample, sampling_params):
    sample.status = Sample.Status.ABORTED
    return sample


async def score(args, sample, **kwargs):
    return sample.response_length


async def score_parts(args, sample):
    return {"length": sample.response_length, "why": "because", "ok": True}


async def score_text(args, sample):
    return "good"


async def score_all(args, samples):
    return [float(sample.index) for sample in samples]


def keep(args, samples, **kwargs):
    return sum(sample.get_reward_value(args) for sample in samples) > 0


def keep_told(args, samples):
    return DynamicFilterOutput(keep=False, reason="dull")


def centred(args, samples):
    raw = [sample.reward for sample in samples]
    return raw, [reward - sum(raw) / len(raw) for reward in raw]


def drop_first(args, groups):
    for group in groups:
        group[0].remove_sample = True


def newest(args, rollout_id, buffer, num_samples):
    return buffer[:num_samples] if rollout_id < 3 else []


def convert(args, samples):
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [2.0 * sample.reward for sample in samples],
        "loss_masks": [[0, *sample.loss_mask[1:]] for sample in samples],
    }


def convert_wrongly(args, samples):
    data = convert(args, samples)
    data["tokens"] = [list(reversed(tokens)) for tokens in data["tokens"]]
    return data


def convert_too_much(args, samples):
    data = convert(args, samples)
    data["loss_masks"] = [[1] * len(sample.tokens) for sample in samples]
    return data


LOOKED = []


def look(args, all_samples, data_source):
    LOOKED.append(all_samples)


def hide_last(args, rollout_data):
    for mask in rollout_data["loss_masks"]:
        mask[-1] = 0


def log_rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    rollout_extra_metrics["seen"] = float(len(samples))
    return rollout_id == 7


def log_eval(rollout_id, args, data, extra_metrics):
    extra_metrics["best"] = max(data["held"]["rewards"])
    return False


class Deck:
    def __init__(self, args):
        self.size, self.distributed = args.rollout_batch_size, 0

    def get_samples(self, num_samples):
        self.distributed += 1
        return [[Sample(prompt=f"question {self.distributed}", label=str(self.distributed))]]


def generate_rollout(args, rollout_id, data_buffer, evaluation=False):
    return []


def init(args):
    LOOKED.append(args.lr)


async def marked(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.prompt, sample.turns, sample.remove_sample = "rewritten", [1, 2], True
    return sample


async def short_log_probs(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.rollout_log_probs = [0.0]
    return sample


async def generate_input(input):
    return await generate(input.args, input.sample, input.sampling_params)


async def _fill(args, groups):
    for group in groups:
        for sample in group:
            await generate(args, sample, {})
            sample.reward = float(sample.index)
    return groups


def rollout(args, rollout_id, data_source, evaluation=False):
    LOOKED.append((rollout_id, args.rollout_batch_size))
    if evaluation:
        return RolloutFnEvalOutput(data={"held": {"rewards": [1.0, 0.0], "truncated": [False, True]}})
    spare, *groups = run(_fill(args, data_source.get_samples(args.rollout_batch_size + 1)))
    data_source.add_samples([spare])
    return RolloutFnTrainOutput(samples=groups)


def rollout_of_one(args, rollout_id, data_source, evaluation=False):
    return run(_fill(args, data_source.get_samples(1)))


def rollout_of_nothing(args, rollout_id, data_source, evaluation=False):
    return None


def rollout_that_fails(args, rollout_id, data_source, evaluation=False):
    raise OSError("no network")


class RolloutClass:
    def __init__(self, input):
        self.source = input.data_source

    async def __call__(self, input):
        assert not input.evaluation
        return RolloutFnTrainOutput(samples=await _fill(None, self.source.get_samples(2)))


class LastIn:
    def __init__(self, input):
        self.entries = []

    async def put(self, input):
        self.entries.append(input)

    async def get(self):
        return self.entries.pop()


def pick_longest(leaf_samples, session_metadata):
    return [max(leaf_samples, key=lambda sample: sample.response_length)]


async def score_group(args, samples):
    return [0.0 for _ in samples]


def rollout_without_a_source(args, rollout_id):
    return []


def only_the_end(leaf_samples, session_metadata):
    for sample in leaf_samples:
        sample.loss_mask = [0, 0, *sample.loss_mask[2:-1], 0]
        sample.reward = 7.0
    return leaf_samples


def invented(leaf_samples, session_metadata):
    for sample in leaf_samples:
        sample.loss_mask = [1] * sample.response_length
    return leaf_samples

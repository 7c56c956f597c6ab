"""Prefix sharing in training of a run: as configured, else by an estimate for each global batch. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from miles.launch.config import Config
from miles.launch.plan.plan import Plan, count_samples_per_prompt
from miles.launch.plan.step_limit import plan_workload
from miles.launch.rules.paths import read_spec_or_none
from miles.models.accounting.prefix_sharing import MIN_SPEEDUP, PrefixCost, count_segments, count_sequences
from miles.models.capabilities import check_prefix_sharing
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSharingChoice:
    """Whether samples of a prompt share prefixes in training: ``on``, ``off``, or ``auto``, by ``cost`` for each batch.

    ``reason`` says why, where the user has not chosen.
    """

    mode: str
    reason: str = ""
    cost: PrefixCost | None = None


def choose_prefix_sharing(config: Config, plan: Plan, spec: DecoderSpec) -> PrefixSharingChoice:
    """Return what the trainer of a policy of ``spec`` does."""
    if config.train.share_prefix is not None:
        return PrefixSharingChoice(mode="on" if config.train.share_prefix else "off")
    refused = next(_list_obstacles(config, plan, spec), None)
    if refused is not None:
        return PrefixSharingChoice(mode="off", reason=refused)
    cost = PrefixCost(spec, plan.dtype, config.models.numerics)
    return PrefixSharingChoice(mode="auto", reason=_describe_estimate(config, spec, cost), cost=cost)


def format_prefix_sharing(config: Config, plan: Plan, spec: DecoderSpec) -> list[str]:
    """Return the line of ``miles plan``; none if the run trains on nothing or on samples that share no prompt."""
    choice = choose_prefix_sharing(config, plan, spec)
    if config.observe.debug_rollout_only or (choice.mode == "off" and not choice.reason):
        return []
    reason = f": {choice.reason}" if choice.reason else " (--share-prefix)"
    modes = {"on": "shared in training", "off": "not shared in training", "auto": "shared in training where it pays"}
    return [f"prefixes   {modes[choice.mode]}{reason}"]


def _list_obstacles(config: Config, plan: Plan, spec: DecoderSpec) -> Iterator[str]:
    """Yield why prefixes are not shared unless the user says so."""
    if config.train.train_backend != "fsdp":
        yield f"--train-backend {config.train.train_backend} does not share them"
    if plan.device == "cpu":
        yield "the estimate is for GPUs; --share-prefix turns it on"
    if config.train.micro_batch_size is not None and not config.train.use_dynamic_batch_size:
        yield "--micro-batch-size counts samples; --share-prefix turns it on"
    replays = config.algo.use_routing_replay or config.algo.use_rollout_routing_replay
    if replays and spec.moe is not None and spec.vision is not None and spec.vision.bidirectional_spans:
        yield "replayed experts may differ within an image, which cannot be cut; --share-prefix turns it on"
    specs = {"the model": spec}
    folders = {"--ref-load": plan.reference, "--critic-load": plan.critic}
    folders |= {f"the teacher {name}": folder for name, folder in plan.teachers.items()}
    for name, folder in folders.items():
        found = None if folder is None else read_spec_or_none(str(folder), config.models.model_impl)
        specs |= {} if found is None else {name: found}
    for name, each in specs.items():
        if isinstance(each, HfAdapterSpec):
            yield f"{name} is computed by transformers"
        elif (problem := check_prefix_sharing(each)) is not None:
            yield f"{name} cannot: {problem}"


def _describe_estimate(config: Config, spec: DecoderSpec, cost: PrefixCost) -> str:
    """Return what the estimate says of prompts and responses of the greatest length."""
    prompt = config.rollout.rollout_max_prompt_len
    workload, _ = plan_workload(config, spec)
    count = count_samples_per_prompt(config)
    if workload is None or not workload.prompts or not prompt or count == 1:
        return "decided for each batch"
    total, prompt = workload.sequences[0], workload.prompts[0]
    plain = count_sequences([total] * count)
    speedup = cost.estimate_speedup(plain, count_segments([(0, prompt), *[(prompt, total)] * count]))
    answer = "yes" if speedup >= MIN_SPEEDUP else "no"
    return (
        f"decided for each batch; {answer} for {count} responses of {total - prompt:,} tokens to prompts of {prompt:,} "
        f"(estimate {speedup:.2f}x, at least {MIN_SPEEDUP}x)"
    )

"""Types that upstream-signature functions see: the run's arguments, a sample, a filter's output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Protocol

from miles.core.protocols import GroupRewardFn, RewardFn
from miles.core.types import Array, Author, Prompt, Sample, Span, Tokens, Trajectory


class BuildRows(Protocol):
    """Builds a trajectory's training samples, one per branch, with the same advantage for each trained token."""

    def __call__(
        self, prompt_id: int, trajectory: Trajectory, *, advantage: float, trained_author: Author
    ) -> list[Sample]: ...


class UpstreamArgs(Namespace):
    """The run's flags by name. What a function sets is for other functions alone: a run does not read it.

    >>> UpstreamArgs(lr=1e-6).lr
    1e-06
    """

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args has no {name}: this run has no such flag; set it with --custom-config-path, or read what the "
            "function needs from sample.metadata or the environment."
        )

    def replace(self, **values: Any) -> UpstreamArgs:
        """The same flags with some other values."""
        return UpstreamArgs(**{**vars(self), **values})


def _no_rewards() -> tuple[None, None]:
    return None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamServices:
    """Parts of a run that whole rollout functions use: its rewards, and further prompts of its data source.

    ``rewards`` builds the function that scores a trajectory or the one that scores a group, for use on the caller's
    event loop. ``first_rollout`` is the number of steps that were made before the run was resumed.
    """

    rewards: Callable[[], tuple[RewardFn | None, GroupRewardFn | None]] = _no_rewards
    next_prompt: Callable[[], Prompt] | None = None
    first_rollout: int = 0


NO_SERVICES = UpstreamServices()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamContext:
    """The run's flags as ``args``, and functions to show prompts and trajectories as upstream did.

    ``tokenizer`` returns the checkpoint's transformers tokenizer. ``render`` returns a prompt's tokens and
    ``prompt_text`` what a sample calls its prompt: their text, or messages. ``fill_extras`` writes data the engine
    returned for prompt tokens into their spans; ``build_samples`` builds training samples. ``source`` names the
    function in errors.
    """

    args: UpstreamArgs
    tokenizer: Callable[[], Any]
    render: Callable[[Prompt], Tokens]
    prompt_text: Callable[[Prompt], str | Sequence[Mapping[str, Any]]]
    fill_extras: Callable[[Sequence[Span], Mapping[str, Array]], list[Span]]
    build_samples: BuildRows
    services: UpstreamServices = NO_SERVICES
    source: str = "The generate function"


class UpstreamStatus(Enum):
    """Progress of a trajectory, in upstream's words."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_FINISH_STATUS = {
    "stop": UpstreamStatus.COMPLETED,
    "length": UpstreamStatus.TRUNCATED,
    "abort": UpstreamStatus.ABORTED,
}


@dataclass
class _Counters:
    """Numbers summed over the replies to a sample's requests; a subclass maps its fields to keys of a reply."""

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the numbers of one reply."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + meta_info.get(each.metadata["key"], 0))

    def to_dict(self) -> dict[str, int]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> Any:
        return cls(**{each.name: data.get(each.name, 0) for each in fields(cls)})


def _counter(key: str) -> Any:
    return field(default=0, metadata={"key": key})


@dataclass
class SpeculativeCounters(_Counters):
    """Counts of speculative decoding."""

    spec_accept_token_num: int = _counter("spec_accept_token_num")
    spec_draft_token_num: int = _counter("spec_draft_token_num")
    spec_verify_ct: int = _counter("spec_verify_ct")
    completion_token_num: int = _counter("completion_tokens")

    @property
    def spec_accept_rate(self) -> float:
        """The fraction of drafted tokens that was accepted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """The number of tokens per verification, whose last token is sampled after the accepted ones."""
        return 1 + self.spec_accept_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0


@dataclass
class PrefixCacheCounters(_Counters):
    """Counts of the prefix cache."""

    cached_tokens: int = _counter("cached_tokens")
    total_prompt_tokens: int = _counter("prompt_tokens")

    @property
    def prefix_cache_hit_rate(self) -> float:
        """The fraction of prompt tokens that was cached."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0


@dataclass
class UpstreamSample:
    """One trajectory, as upstream's functions read and write it; further attributes may be set.

    ``tokens`` are the prompt's and the response's, of which the last ``response_length`` are the response;
    ``loss_mask`` and ``rollout_log_probs`` have an entry for each of these. Without a mask all of the response is the
    policy's. ``remove_sample`` excludes the trajectory from the loss.
    """

    group_index: int | None = None
    index: int | None = None
    prompt: str | Sequence[Mapping[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Array | None = None
    remove_sample: bool = False
    status: UpstreamStatus = UpstreamStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    routing_key: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpeculativeCounters = field(default_factory=SpeculativeCounters)
    prefix_cache_info: PrefixCacheCounters = field(default_factory=PrefixCacheCounters)
    teacher_log_probs: list[float] | None = None

    Status = UpstreamStatus
    SpecInfo = SpeculativeCounters
    PrefixCacheInfo = PrefixCacheCounters

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def oldest_weight_version(self) -> int | None:
        """The oldest version that sampled any token."""
        return min(map(int, self.weight_versions), default=None)

    def get_reward_value(self, args: Any) -> Any:
        """The reward that is trained on."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) else self.reward

    def validate(self) -> None:
        """Raise where the lengths of the per-token lists do not agree."""
        length = self.response_length
        assert 0 <= length <= len(self.tokens), f"response_length {length} of {len(self.tokens)} tokens"
        for name in ("loss_mask", "rollout_log_probs"):
            values = getattr(self, name)
            assert values is None or len(values) == length, f"{name} has {len(values)} entries for {length} tokens"

    def append_response_tokens(
        self,
        args: Any = None,
        tokens: Sequence[int] = (),
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Append tokens to the response: the policy's, or, where they are not ``trainable``, the environment's."""
        mask = [1] * self.response_length if self.loss_mask is None else self.loss_mask
        logprobs = [0.0] * self.response_length if self.rollout_log_probs is None else self.rollout_log_probs
        mask += [int(trainable)] * len(tokens)
        logprobs += [0.0] * len(tokens) if log_probs is None else [float(p) for p in log_probs]
        self.loss_mask, self.rollout_log_probs = mask, logprobs
        self.tokens = [*self.tokens, *tokens]
        self.response_length += len(tokens)
        if meta_info is not None:
            self.update_from_meta_info(args, meta_info)

    def strip_last_output_tokens(self, n: int, tokenizer: Any) -> None:
        """Remove the last ``n`` response tokens with their per-token data."""
        assert n <= self.response_length, f"{n} tokens cannot be removed from a response of {self.response_length}"
        if n <= 0:
            return
        self.tokens = self.tokens[:-n]
        self.response_length -= n
        self.loss_mask = self.loss_mask and self.loss_mask[:-n]
        self.rollout_log_probs = self.rollout_log_probs and self.rollout_log_probs[:-n]
        if self.rollout_routed_experts is not None:
            self.rollout_routed_experts = self.rollout_routed_experts[:-n]
        kept = self.tokens[len(self.tokens) - self.response_length :]
        self.response = tokenizer.decode(kept) if kept else ""

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Take status, version and counts from the reply to a request."""
        self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        self.status = _FINISH_STATUS.get(meta_info["finish_reason"]["type"], self.status)

    def to_dict(self) -> dict[str, Any]:
        """All attributes by name, with plain values."""
        counters = {"spec_info": self.spec_info.to_dict(), "prefix_cache_info": self.prefix_cache_info.to_dict()}
        return {**vars(self), "status": self.status.value, **counters}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> UpstreamSample:
        """A sample from what ``to_dict`` returned."""
        values = dict(data)
        values["status"] = UpstreamStatus(values.get("status", "pending"))
        values["spec_info"] = SpeculativeCounters.from_dict(values.get("spec_info", {}))
        values["prefix_cache_info"] = PrefixCacheCounters.from_dict(values.get("prefix_cache_info", {}))
        names = {each.name for each in fields(cls)}
        sample = cls(**{name: value for name, value in values.items() if name in names})
        vars(sample).update({name: value for name, value in values.items() if name not in names})
        return sample


UpstreamGroup = list[UpstreamSample | list[UpstreamSample]]
"""The samples of one prompt; a list in place of a sample has the branches of one trajectory."""


@dataclass
class DynamicFilterOutput:
    """Upstream's filter result."""

    keep: bool
    reason: str | None = None


@dataclass
class MetricGatherer:
    """Counts of dropped groups by reason."""

    counts: dict[str, int] = field(default_factory=dict)

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count a dropped group."""
        if reason:
            self.counts[reason] = self.counts.get(reason, 0) + 1

    def collect(self) -> dict[str, int]:
        """The counts as metrics."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self.counts.items()}


# -- whole rollouts -------------------------------------------------------------------------


@dataclass(frozen=True)
class GenerateFnInput:
    """What a generate function of one argument gets; ``state`` has the tokenizer and the run's flags."""

    state: Any
    sample: UpstreamSample
    sampling_params: dict[str, Any]
    evaluation: bool

    @property
    def args(self) -> UpstreamArgs:
        """The run's flags."""
        return self.state.args


@dataclass(frozen=True)
class GenerateFnOutput:
    """What such a function returns; several samples are the branches of one trajectory."""

    samples: UpstreamSample | list[UpstreamSample]


@dataclass(frozen=True)
class RolloutFnConstructorInput:
    """What the class of a rollout function is constructed with."""

    args: UpstreamArgs
    data_source: Any


@dataclass(frozen=True)
class RolloutFnBaseInput:
    """The input of one call of a rollout function; ``rollout_id`` counts from 0."""

    rollout_id: int
    weight_version: int | None = None

    @property
    def evaluation(self) -> bool:
        """Whether held-out sets are evaluated."""
        return False


@dataclass(frozen=True)
class RolloutFnTrainInput(RolloutFnBaseInput):
    """A call for training data."""


@dataclass(frozen=True)
class RolloutFnEvalInput(RolloutFnBaseInput):
    """A call for an evaluation."""

    generate_state: Any = None

    @property
    def evaluation(self) -> bool:
        """Whether held-out sets are evaluated."""
        return True


@dataclass
class RolloutFnTrainOutput:
    """Groups to train on, and further metrics."""

    samples: list[UpstreamGroup]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """``rewards``, ``truncated`` and ``samples`` of each held-out set by name, and further metrics."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


RolloutFnInput = RolloutFnTrainInput | RolloutFnEvalInput
RolloutFnOutput = RolloutFnTrainOutput | RolloutFnEvalOutput


class RolloutFnProtocol(Protocol):
    """A rollout function as a class, or an async one."""

    def __call__(self, input: RolloutFnInput) -> RolloutFnOutput | Awaitable[RolloutFnOutput]: ...


class BaseRolloutFn:
    """The base class of rollout functions that are classes."""

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.args = input.args
        self.data_source = input.data_source


# -- held-out sets ------------------------------------------------------------------------


@dataclass
class EvalDatasetConfig:
    """A held-out set: its name, its file, and what differs from the flags."""

    name: str
    path: str
    rm_type: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """What determines the prompts of the set."""
        return (self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key)

    def inject_metadata(self, sample_metadata: Any) -> dict[str, Any]:
        """The metadata of a sample with what the set adds to it."""
        metadata = dict(sample_metadata) if isinstance(sample_metadata, dict) else {}
        return metadata | ({"rm_type": self.rm_type} if self.rm_type is not None else {}) | self.metadata_overrides


# -- async data buffers ---------------------------------------------------------------------


@dataclass(frozen=True)
class DataBufferConstructorInput:
    """What a data buffer is constructed with; ``unused_handler_fn`` and ``on_evict`` take groups it drops."""

    args: UpstreamArgs
    unused_handler_fn: Callable[[list[UpstreamSample]], None]

    @property
    def on_evict(self) -> Callable[[list[UpstreamSample]], None]:
        """The former name of ``unused_handler_fn``."""
        return self.unused_handler_fn


@dataclass
class DataBufferInput:
    """A finished group, the samples to generate it again from, and the version when it finished."""

    prompt_group: list[UpstreamSample]
    group: UpstreamGroup
    weight_version: int | None


class BaseDataBuffer(ABC):
    """A store of finished groups between the rollouts and the trainer."""

    @abstractmethod
    async def put(self, input: DataBufferInput) -> None:
        """Take a finished group."""

    @abstractmethod
    async def get(self) -> DataBufferInput:
        """The next group to train on."""

    def get_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        return {}

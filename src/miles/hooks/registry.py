"""Registry of hook points: the flag, protocol, default and call time of every place for user code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from miles.hooks.guard import guard_hook
from miles.hooks.import_path import NO_BUILTINS
from miles.hooks.load import is_async, load_hook

if TYPE_CHECKING:
    from miles.hooks.compat.types import UpstreamContext


@dataclass(frozen=True, slots=True, kw_only=True)
class HookPoint:
    """One place for user code. ``protocol_name`` is the name of its protocol in ``module``.

    ``upstream_names`` maps upstream's addresses to our built-ins; ``runtime_names`` are names of what a run builds from
    its options instead of loading. Where the hook ``is_factory``, a class is the factory itself and is not instantiated
    first. Where a failure ``is_contained``, its caller handles what the hook raises; elsewhere it ends the run.
    """

    flag: str
    protocol_name: str
    default: str
    when: str
    builtins: Mapping[str, str] = field(default_factory=lambda: NO_BUILTINS)
    upstream_names: Mapping[str, str] = field(default_factory=lambda: NO_BUILTINS)
    module: str = "miles.core.protocols"
    runtime_names: tuple[str, ...] = ()
    is_factory: bool = False
    is_contained: bool = False

    @property
    def option(self) -> str:
        """The config field of the flag."""
        return self.flag.removeprefix("--").replace("-", "_")

    def protocol(self) -> type:
        """The protocol, imported on demand, since its types need numpy or torch."""
        return getattr(import_module(self.module), self.protocol_name)

    def resolve_name(self, path: str | None) -> str | None:
        """Our name for ``path``, if it is one of upstream's."""
        return path if path is None else self._translate(path)

    def is_builtin(self, path: str) -> bool:
        """Whether ``path`` names a built-in, by its own name or upstream's."""
        return self._translate(path) in self.builtins

    def load(self, path: str, run: UpstreamContext | None = None) -> Any:
        """Load what the user named under this flag, and check it against the protocol.

        With the context of a ``run``, functions with upstream signatures are adapted.
        """
        return self._load(path, run, only_check=False)

    def load_guarded(self, path: str, run: UpstreamContext | None = None) -> Any:
        """Load as ``load`` does; what a user's function raises then names it (see ``guard``)."""
        # Imported on demand: command-line help must not load numpy.
        from miles.hooks.compat.rollout import is_batch_function

        hook = self.load(path, run)
        if self.is_builtin(path) or is_batch_function(hook):
            return hook
        return guard_hook(hook, f"{self.flag} {path}", is_async=is_async(hook), is_contained=self.is_contained)

    def check(self, path: str, run: UpstreamContext | None = None) -> None:
        """Check as ``load`` does, without instantiating a class."""
        self._load(path, run, only_check=True)

    def _translate(self, path: str) -> str:
        address = path.replace(":", ".")
        address = f"miles.{address.removeprefix('slime.')}" if address.startswith("slime.") else address
        return self.upstream_names.get(address, path)

    def _load(self, path: str, run: UpstreamContext | None, *, only_check: bool) -> Any:
        return load_hook(
            self._translate(path),
            self.protocol(),
            builtins=self.builtins,
            flag=self.flag,
            is_factory=self.is_factory,
            only_check=only_check,
            run=run,
        )


def _list_builtins(module: str, *names: str) -> Mapping[str, str]:
    """The addresses of functions of one module."""
    return {name: f"{module}:{name}" for name in names}


GENERATE = HookPoint(
    flag="--custom-generate-function-path",
    protocol_name="Generate",
    default="one response per prompt (miles.rollout.generate.single_turn); multi_turn adds tools",
    when="once for each trajectory",
    upstream_names={
        "miles.rollout.generate_hub.single_turn.generate": "single_turn",
        "miles.rollout.generate_hub.multi_turn.generate": "multi_turn",
        "miles.rollout.generate_hub.agentic_tool_call.generate": "agent",
    },
    runtime_names=("single_turn", "multi_turn", "agent"),
)
AGENT = HookPoint(
    flag="--custom-agent-function-path",
    protocol_name="AgentFn",
    default="no agent: prompts are answered by --custom-generate-function-path",
    when="once for each trajectory",
    module="miles.rollout.generate.agent",
    is_contained=True,
)
MULTI_AGENT = HookPoint(
    flag="--custom-cast-function-path",
    protocol_name="MultiAgentFn",
    default="no multi-agent function: one policy answers prompts",
    when="once for each trajectory, with the agents of --policies",
    builtins=_list_builtins("miles.rollout.multi_agent.self_play", "solver_verifier", "self_play"),
    module="miles.rollout.multi_agent.agents",
    is_contained=True,
)
MESSAGE_MATCHER = HookPoint(
    flag="--session-message-matcher-path",
    protocol_name="MessageMatcher",
    default="loose_tool_call: tool calls as what they say, all else to the letter",
    when="for each message of an agent's request at the position of a stored one",
    builtins=_list_builtins("miles.rollout.session.match", "strict", "loose_tool_call", "role_content_only"),
    module="miles.rollout.session.match",
)
SAMPLE_PICKER = HookPoint(
    flag="--session-sample-picker-path",
    protocol_name="SamplePicker",
    default="all conversations of a session, with shared tokens once",
    when="once for each trajectory of an agent",
    module="miles.rollout.session.branches",
)
SAMPLE_POSTPROCESSOR = HookPoint(
    flag="--session-sample-postprocessor-path",
    protocol_name="TrajectoryPostProcess",
    default="the trajectory as the session has it",
    when="once for each trajectory of an agent that did not fail",
    module="miles.rollout.session.branches",
)
REWARD = HookPoint(
    flag="--custom-rm-path",
    protocol_name="RewardFn",
    default="the built-in reward named by --rm-type",
    when="once for each finished trajectory",
    is_contained=True,
)
GROUP_REWARD = HookPoint(
    flag="--custom-rm-path",
    protocol_name="GroupRewardFn",
    default="the built-in reward named by --rm-type",
    when="with --group-rm, once for all trajectories of a prompt",
    is_contained=True,
)
FILTER = HookPoint(
    flag="--dynamic-sampling-filter-path",
    protocol_name="Filter",
    default="every group is kept",
    when="once for each scored group; a dropped one is replaced by another prompt's",
    builtins=_list_builtins("miles.rollout.filters", "nonzero_std", "keep_all"),
    upstream_names={"miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": "nonzero_std"},
)
CURRICULUM = HookPoint(
    flag="--curriculum-path",
    protocol_name="Curriculum",
    default="every prompt in its turn, or parts by their weights",
    when="before a prompt is read, after each step or when its last list of prompts is used up",
    builtins=_list_builtins("miles.rollout.data.curriculum", "learnable_parts", "unsolved_first"),
)
CORRECTION = HookPoint(
    flag="--custom-tis-function-path",
    protocol_name="Correction",
    default="the built-in correction named by --tis-mode",
    when="with --use-tis, once for each micro-batch",
    module="miles.algo.policy_loss",
)

REWARD_POST_PROCESS = HookPoint(
    flag="--custom-reward-post-process-path",
    protocol_name="AdvantageFn",
    default="the comparison that --advantage-estimator makes",
    when="once for each scored group that is kept",
)
CONVERT_SAMPLES = HookPoint(
    flag="--custom-convert-samples-to-train-data-path",
    protocol_name="AdvantageEstimator",
    default="a sample for each branch of a trajectory, all its tokens with the same advantage (miles.algo.advantages)",
    when="once for each scored group that is kept",
)
OBJECTIVE = HookPoint(
    flag="--custom-loss-function-path",
    protocol_name="LossFn",
    default="the policy loss of --advantage-estimator",
    when="with --loss-type custom_loss, once for each micro-batch",
    module="miles.algo.policy_loss",
)
REDUCER = HookPoint(
    flag="--custom-pg-loss-reducer-function-path",
    protocol_name="Reducer",
    default="the mean over trajectories of the mean over tokens",
    when="once for each global batch",
    module="miles.algo.loss_aggregation",
)

ROLLOUT = HookPoint(
    flag="--rollout-function-path",
    protocol_name="RolloutFn",
    default="standard: --n-samples-per-prompt trajectories, generated concurrently and scored",
    when="once for each prompt",
    builtins={"standard": "miles.rollout.custom:standard", "fully_async": "miles.rollout.custom:standard"},
    upstream_names={
        "miles.rollout.sglang_rollout.generate_rollout": "standard",
        "miles.rollout.sft_rollout.generate_rollout": "standard",
        "miles.rollout.fully_async_rollout.generate_rollout_fully_async": "fully_async",
        "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn": "fully_async",
        "fully_async_rollout.generate_rollout_fully_async": "fully_async",
        "miles.rollout.inference_rollout.inference_rollout_common.InferenceRolloutFn": "standard",
    },
    module="miles.core.hooks",
)
DATA_SOURCE = HookPoint(
    flag="--data-source-path",
    protocol_name="DataSource",
    default="the prompts of --prompt-data in the order the flags ask for",
    when="once, before the first prompt; the source it returns is then called for each prompt and its state",
    upstream_names={
        "miles.rollout.data_source.RolloutDataSource": "in_order",
        "miles.rollout.data_source.RolloutDataSourceWithBuffer": "in_order",
    },
    builtins=_list_builtins("miles.rollout.custom", "in_order"),
    module="miles.core.hooks",
    is_factory=True,
)
EVALUATE = HookPoint(
    flag="--eval-function-path",
    protocol_name="EvalFn",
    default="--n-samples-per-eval-prompt trajectories per prompt, scored as in training",
    when="once for each set of --eval-prompt-data in each evaluation",
    upstream_names={"miles.rollout.sglang_rollout.generate_rollout": "standard"},
    builtins={"standard": "miles.rollout.custom:standard_evaluation"},
    module="miles.core.hooks",
)
SAMPLE_FILTER = HookPoint(
    flag="--rollout-sample-filter-path",
    protocol_name="SampleFilter",
    default="every trajectory of a kept group is trained on",
    when="once for each scored group that is kept",
    module="miles.core.hooks",
)
ALL_SAMPLES = HookPoint(
    flag="--rollout-all-samples-process-path",
    protocol_name="AllSamples",
    default="nothing",
    when="once for each step, when its batch is full and before it is trained on",
    module="miles.core.hooks",
)
DATA_BUFFER = HookPoint(
    flag="--custom-async-data-buffer-path",
    protocol_name="DataBuffer",
    default="the one that was asked for first",
    when="each time the trainer takes a group of the --reorder-window that have come back",
    builtins=_list_builtins("miles.schedule.reorder_buffer", "freshest"),
    module="miles.core.hooks",
)
BUFFER_FILTER = HookPoint(
    flag="--buffer-filter-path",
    protocol_name="BufferFilter",
    default="every group that was kept is trained on",
    when="once for each kept group, when its turn to be trained on has come",
    module="miles.core.hooks",
)
ADVANTAGE = HookPoint(
    flag="--custom-advantage-function-path",
    protocol_name="Advantage",
    default="what the rows of each group came with",
    when="once for each step, with the whole batch, before it is trained on",
    module="miles.core.hooks",
)
POST_PROCESS = HookPoint(
    flag="--rollout-data-postprocess-path",
    protocol_name="PostProcess",
    default="the batch as it is",
    when="once for each step, with the whole batch and its advantages, before it is trained on",
    module="miles.core.hooks",
)
MODEL_PROVIDER = HookPoint(
    flag="--custom-model-provider-path",
    protocol_name="ModelProvider",
    default="the model as its checkpoint describes it",
    when="once for each model of the policy's architecture: the trainer's, the engine's, the reference's",
    module="miles.models.model_provider",
)
TRAINER_INIT = HookPoint(
    flag="--custom-megatron-init-path",
    protocol_name="InitHook",
    default="nothing",
    when="once on every rank, when the trainer has its model and optimizer",
    module="miles.train.hooks",
)
BEFORE_LOG_PROBS = HookPoint(
    flag="--custom-megatron-before-log-prob-hook-path",
    protocol_name="BeforeLogProbsHook",
    default="nothing",
    when="once for each training step on every rank, before any log-prob of its tokens is computed",
    module="miles.train.hooks",
)
BEFORE_TRAIN_STEP = HookPoint(
    flag="--custom-megatron-before-train-step-hook-path",
    protocol_name="BeforeTrainStepHook",
    default="nothing",
    when="once for each optimizer step on every rank, before its gradient is computed",
    module="miles.train.hooks",
)
POST_SAVE = HookPoint(
    flag="--custom-megatron-post-save-hook-path",
    protocol_name="PostSave",
    default="nothing",
    when="once for each complete checkpoint; a resumed run repeats it for its first one",
    module="miles.core.hooks",
)
POST_WRITE = HookPoint(
    flag="--custom-update-weight-post-write-path",
    protocol_name="PostWriteHook",
    default="nothing",
    when="after each publication, the one before the first step included, before any token is sampled",
    module="miles.sync.publish",
)
ROLLOUT_LOG = HookPoint(
    flag="--custom-rollout-log-function-path",
    protocol_name="RolloutLog",
    default="the metrics of miles.observe.metric",
    when="once for each step, after it was trained on",
    module="miles.core.hooks",
)
EVAL_LOG = HookPoint(
    flag="--custom-eval-rollout-log-function-path",
    protocol_name="EvalLog",
    default="the metrics of miles.rollout.evaluate",
    when="once for each evaluation, when all sets are answered",
    module="miles.core.hooks",
)
TRACKER = HookPoint(
    flag="--custom-tracker-path",
    protocol_name="Observer",
    default="the logs of the run directory, and what --use-tensorboard and the like ask for",
    when="for every event of a run (miles.core.events); one that raises is not called again",
    is_contained=True,
)

HOOK_POINTS: tuple[HookPoint, ...] = (
    ROLLOUT,
    DATA_SOURCE,
    EVALUATE,
    GENERATE,
    AGENT,
    MULTI_AGENT,
    MESSAGE_MATCHER,
    SAMPLE_PICKER,
    SAMPLE_POSTPROCESSOR,
    REWARD,
    GROUP_REWARD,
    FILTER,
    REWARD_POST_PROCESS,
    CONVERT_SAMPLES,
    OBJECTIVE,
    REDUCER,
    CORRECTION,
    CURRICULUM,
    SAMPLE_FILTER,
    ALL_SAMPLES,
    DATA_BUFFER,
    BUFFER_FILTER,
    ADVANTAGE,
    POST_PROCESS,
    MODEL_PROVIDER,
    TRAINER_INIT,
    BEFORE_LOG_PROBS,
    BEFORE_TRAIN_STEP,
    POST_SAVE,
    POST_WRITE,
    ROLLOUT_LOG,
    EVAL_LOG,
    TRACKER,
)

"""The table of every plug point: its flag, its door, what is there when nothing is plugged, when it is called."""

from types import MappingProxyType

from miles.plug.point import Point

GENERATE = Point(
    flag="--custom-generate-function-path",
    door="Generate",
    default="one reply to each prompt (miles.rollout.generate.single_turn); multi_turn is with tools",
    when="once for each attempt at a prompt",
    former=MappingProxyType(
        {
            "miles.rollout.generate_hub.single_turn.generate": "single_turn",
            "miles.rollout.generate_hub.multi_turn.generate": "multi_turn",
            "miles.rollout.generate_hub.agentic_tool_call.generate": "agent",
        }
    ),
    named=("single_turn", "multi_turn", "agent"),
)
AGENT = Point(
    flag="--custom-agent-function-path",
    door="Agent",
    default="no agent: prompts are answered by --custom-generate-function-path",
    when="once for each attempt at a prompt",
    room="miles.rollout.generate.agent",
)
CAST_PLAY = Point(
    flag="--custom-cast-function-path",
    door="Play",
    default="no cast: one policy answers prompts",
    when="once for each attempt at a prompt, with the policies of --policies to speak to",
    builtins=MappingProxyType(
        {
            "solver_verifier": "miles.rollout.cast.games:solver_verifier",
            "self_play": "miles.rollout.cast.games:self_play",
        }
    ),
    room="miles.rollout.cast.cast",
)
MATCH = Point(
    flag="--session-message-matcher-path",
    door="Match",
    default="loose_tool_call: tool calls as what they say, all else to the letter",
    when="for each message of an agent's request that stands where one is remembered",
    builtins=MappingProxyType(
        {
            "strict": "miles.rollout.session.match:strict",
            "loose_tool_call": "miles.rollout.session.match:loose_tool_call",
            "role_content_only": "miles.rollout.session.match:role_content_only",
        }
    ),
    room="miles.rollout.session.match",
)
PICK = Point(
    flag="--session-sample-picker-path",
    door="Pick",
    default="all conversations of a session, tokens they share once",
    when="once for each attempt of an agent",
    room="miles.rollout.session.ledger",
)
REWARD = Point(
    flag="--custom-rm-path",
    door="RewardFn",
    default="the built-in reward named by --rm-type",
    when="once for each finished attempt",
)
GROUP_REWARD = Point(
    flag="--custom-rm-path",
    door="GroupRewardFn",
    default="the built-in reward named by --rm-type",
    when="with --group-rm, once for all attempts at a prompt",
)
FILTER = Point(
    flag="--dynamic-sampling-filter-path",
    door="Filter",
    default="every group is kept",
    when="once for each scored group; a dropped one is replaced by another prompt's",
    builtins=MappingProxyType(
        {"nonzero_std": "miles.rollout.filters:nonzero_std", "keep_all": "miles.rollout.filters:keep_all"}
    ),
    former=MappingProxyType(
        {"miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": "nonzero_std"}
    ),
)
CURRICULUM = Point(
    flag="--curriculum-path",
    door="Curriculum",
    default="every prompt in its turn, or parts by their weights",
    when="before a prompt is drawn, when a step has passed or the prompts it named last are used up",
    builtins=MappingProxyType(
        {
            "learnable_parts": "miles.rollout.lessons:learnable_parts",
            "unsolved_first": "miles.rollout.lessons:unsolved_first",
        }
    ),
)
CORRECTION = Point(
    flag="--custom-tis-function-path",
    door="Correction",
    default="the built-in correction named by --tis-mode",
    when="with --use-tis, once for each micro-batch",
    room="miles.algo.objective",
)

WORTH = Point(
    flag="--custom-reward-post-process-path",
    door="Worth",
    default="the comparison that --advantage-estimator makes",
    when="once for each scored group that is kept",
)
CREDIT = Point(
    flag="--custom-convert-samples-to-train-data-path",
    door="Credit",
    default="a row for each branch of an attempt, all its tokens worth the same (miles.algo.credit)",
    when="once for each scored group that is kept",
)
OBJECTIVE = Point(
    flag="--custom-loss-function-path",
    door="Objective",
    default="the policy loss of --advantage-estimator",
    when="with --loss-type custom_loss, once for each micro-batch",
    room="miles.algo.objective",
)
REDUCER = Point(
    flag="--custom-pg-loss-reducer-function-path",
    door="Reducer",
    default="the mean over trajectories of the mean over tokens",
    when="once for each global batch",
    room="miles.algo.reduce",
)

ROLLOUT = Point(
    flag="--rollout-function-path",
    door="RolloutFn",
    default="standard: as many attempts as --n-samples-per-prompt side by side, each scored (miles.rollout.produce)",
    when="once for each prompt that is drawn",
    builtins=MappingProxyType({"standard": "miles.rollout.own:standard"}),
    former=MappingProxyType(
        {
            "miles.rollout.sglang_rollout.generate_rollout": "standard",
            "miles.rollout.sft_rollout.generate_rollout": "standard",
            "miles.rollout.inference_rollout.inference_rollout_common.InferenceRolloutFn": "standard",
        }
    ),
    room="miles.core.plugs",
)
DATA_SOURCE = Point(
    flag="--data-source-path",
    door="DataSource",
    default="the prompts of --prompt-data in the order the flags ask for",
    when="once, before the first prompt is drawn; what it gives is asked for each prompt, and for its state at each",
    former=MappingProxyType(
        {
            "miles.rollout.data_source.RolloutDataSource": "in_order",
            "miles.rollout.data_source.RolloutDataSourceWithBuffer": "in_order",
        }
    ),
    builtins=MappingProxyType({"in_order": "miles.rollout.own:in_order"}),
    room="miles.core.plugs",
    makes=True,
)
EVALUATE = Point(
    flag="--eval-function-path",
    door="EvalFn",
    default="as many attempts as --n-samples-per-eval-prompt at each prompt, scored as in training",
    when="once for each set of --eval-prompt-data in each evaluation",
    former=MappingProxyType({"miles.rollout.sglang_rollout.generate_rollout": "standard"}),
    builtins=MappingProxyType({"standard": "miles.rollout.own:standard_evaluation"}),
    room="miles.core.plugs",
)
SAMPLE_FILTER = Point(
    flag="--rollout-sample-filter-path",
    door="SampleFilter",
    default="every attempt of a kept group is learned from",
    when="once for each scored group that is kept",
    room="miles.core.plugs",
)
ALL_SAMPLES = Point(
    flag="--rollout-all-samples-process-path",
    door="AllSamples",
    default="nothing",
    when="once for each step, when its batch is full and before it is trained on",
    room="miles.core.plugs",
)
DATA_BUFFER = Point(
    flag="--custom-async-data-buffer-path",
    door="DataBuffer",
    default="the one that was asked for first",
    when="each time the trainer takes a group of the --shelf-window that have come back",
    builtins=MappingProxyType({"freshest": "miles.schedule.buffer:freshest"}),
    room="miles.core.plugs",
)
BUFFER_FILTER = Point(
    flag="--buffer-filter-path",
    door="BufferFilter",
    default="every group that was kept is trained on",
    when="once for each kept group, when its turn to be trained on has come",
    room="miles.core.plugs",
)
ADVANTAGE = Point(
    flag="--custom-advantage-function-path",
    door="Advantage",
    default="what the rows of each group came with",
    when="once for each step, with the whole batch, before it is trained on",
    room="miles.core.plugs",
)
POST_PROCESS = Point(
    flag="--rollout-data-postprocess-path",
    door="PostProcess",
    default="the batch as it is",
    when="once for each step, with the whole batch and its advantages, before it is trained on",
    room="miles.core.plugs",
)
PROVIDE = Point(
    flag="--custom-model-provider-path",
    door="Provide",
    default="the model as its checkpoint describes it",
    when="once for each model of the policy's architecture: the trainer's, the engine's, the reference's",
    room="miles.models.provide",
)
INIT = Point(
    flag="--custom-megatron-init-path",
    door="Init",
    default="nothing",
    when="once on every rank, when the trainer has its model and optimizer",
    room="miles.train.hooks",
)
BEFORE_LOG_PROBS = Point(
    flag="--custom-megatron-before-log-prob-hook-path",
    door="BeforeLogProbs",
    default="nothing",
    when="once for each training step on every rank, before any log-prob of its tokens is computed",
    room="miles.train.hooks",
)
BEFORE_TRAIN_STEP = Point(
    flag="--custom-megatron-before-train-step-hook-path",
    door="BeforeTrainStep",
    default="nothing",
    when="once for each optimizer step on every rank, before its gradient is computed",
    room="miles.train.hooks",
)
POST_SAVE = Point(
    flag="--custom-megatron-post-save-hook-path",
    door="PostSave",
    default="nothing",
    when="once for each checkpoint, when it is complete on the disk; a run that goes on tells of its first one again",
    room="miles.core.plugs",
)
POST_WRITE = Point(
    flag="--custom-update-weight-post-write-path",
    door="PostWrite",
    default="nothing",
    when="after each publication, the one before the first step included, before any token is sampled",
    room="miles.sync.post_write",
)
ROLLOUT_LOG = Point(
    flag="--custom-rollout-log-function-path",
    door="RolloutLog",
    default="the metrics of miles.observe.metric",
    when="once for each step, after it was trained on",
    room="miles.core.plugs",
)
EVAL_LOG = Point(
    flag="--custom-eval-rollout-log-function-path",
    door="EvalLog",
    default="the metrics of miles.rollout.evaluate",
    when="once for each evaluation, when all sets are answered",
    room="miles.core.plugs",
)
TRACKER = Point(
    flag="--custom-tracker-path",
    door="Observer",
    default="the logs of the run directory, and what --use-tensorboard and the like ask for",
    when="for everything that happens in a run (miles.core.events); one that raises is told no more",
)

POINTS: tuple[Point, ...] = (
    ROLLOUT,
    DATA_SOURCE,
    EVALUATE,
    GENERATE,
    AGENT,
    CAST_PLAY,
    MATCH,
    PICK,
    REWARD,
    GROUP_REWARD,
    FILTER,
    WORTH,
    CREDIT,
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
    PROVIDE,
    INIT,
    BEFORE_LOG_PROBS,
    BEFORE_TRAIN_STEP,
    POST_SAVE,
    POST_WRITE,
    ROLLOUT_LOG,
    EVAL_LOG,
    TRACKER,
)

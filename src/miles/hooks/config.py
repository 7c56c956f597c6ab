"""Options of user hooks at the boundaries of rollout, training and scheduling."""

from dataclasses import dataclass
from typing import Any

from miles.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class HooksConfig:
    """Import paths of your own rollout, data source, evaluation, advantages, trainer hooks and trackers."""

    rollout_function_path: str | None = option(
        None, "Hook that generates the whole group of a prompt (see core.hooks.RolloutFn)."
    )
    data_source_path: str | None = option(
        None, "Hook that builds the source of prompts from those of --prompt-data (see core.hooks.DataSource)."
    )
    eval_function_path: str | None = option(
        None, "Hook that evaluates a held-out set (see core.hooks.EvalFn); absent is as in training."
    )
    rollout_sample_filter_path: str | None = option(
        None, "Hook that selects the trajectories of a kept group to train on (see core.hooks.SampleFilter)."
    )
    rollout_all_samples_process_path: str | None = option(
        None, "Hook that sees all groups of a step, dropped ones too (see core.hooks.AllSamples)."
    )
    custom_async_data_buffer_path: str | None = option(
        None, "Hook that selects the waiting group to train on next, such as freshest (see core.hooks.DataBuffer)."
    )
    buffer_filter_path: str | None = option(
        None, "Hook that decides whether a group may still be trained on in its turn (see core.hooks.BufferFilter)."
    )
    custom_advantage_function_path: str | None = option(
        None, "Hook that computes the advantage of every token of a batch (see core.hooks.Advantage)."
    )
    rollout_data_postprocess_path: str | None = option(
        None, "Hook that receives a whole batch and returns the one to train on (see core.hooks.PostProcess)."
    )
    custom_model_provider_path: str | None = option(
        None, "Hook that builds the model, for trainer and engine alike (see models.model_provider.ModelProvider)."
    )
    custom_megatron_init_path: str | None = option(
        None, "Hook called once the trainer has its model, on any backend (see train.hooks.InitHook)."
    )
    custom_megatron_before_log_prob_hook_path: str | None = option(
        None, "Hook called before a step's log-probs are computed, on any backend (see train.hooks.BeforeLogProbsHook)."
    )
    custom_megatron_before_train_step_hook_path: str | None = option(
        None, "Hook called before each optimizer step, on any backend (see train.hooks.BeforeTrainStepHook)."
    )
    custom_megatron_post_save_hook_path: str | None = option(
        None, "Hook called with each checkpoint that is complete, on any backend (see core.hooks.PostSave)."
    )
    custom_update_weight_post_write_path: str | None = option(
        None, "Hook called after each publication of weights (see sync.publish.PostWriteHook)."
    )
    custom_rollout_log_function_path: str | None = option(
        None, "Hook that selects the metrics of a step's groups to log (see core.hooks.RolloutLog)."
    )
    custom_eval_rollout_log_function_path: str | None = option(
        None, "Hook that selects the metrics of an evaluation to log (see core.hooks.EvalLog)."
    )
    custom_tracker_path: str | None = option(
        None, "Hook that receives every event of the run (see core.protocols.Observer)."
    )
    custom_config_path: str | None = option(
        None,
        "A YAML or TOML file that wins over flags: keys that are options set them, all others are attributes of "
        "the args that functions with upstream signatures get.",
        path=True,
    )
    hook_arguments: dict[str, Any] = option(
        factory=dict,
        help="JSON object of further attributes of these args; those that hooks declare with add_arguments are added.",
    )

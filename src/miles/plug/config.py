"""Knobs of a user's own code at the edges of the planes; those inside a plane are among the plane's own knobs."""

from dataclasses import dataclass

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class PlugConfig:
    """Functions of the user's own, by the address of each."""

    rollout_function_path: str | None = knob(
        None, "Plug that makes the whole group of a prompt (see core.plugs.RolloutFn)."
    )
    data_source_path: str | None = knob(
        None, "Plug that makes the source of prompts out of those of --prompt-data (see core.plugs.DataSource)."
    )
    eval_function_path: str | None = knob(
        None, "Plug that answers a held-out set (see core.plugs.EvalFn); absent is as in training."
    )
    rollout_sample_filter_path: str | None = knob(
        None, "Plug that says which attempts of a kept group are learned from (see core.plugs.SampleFilter)."
    )
    rollout_all_samples_process_path: str | None = knob(
        None, "Plug that sees all groups of a step, dropped ones too (see core.plugs.AllSamples)."
    )
    custom_async_data_buffer_path: str | None = knob(
        None, "Plug that says which waiting group is taken next, such as freshest (see core.plugs.DataBuffer)."
    )
    buffer_filter_path: str | None = knob(
        None, "Plug that says whether a group may still be trained on in its turn (see core.plugs.BufferFilter)."
    )
    custom_advantage_function_path: str | None = knob(
        None, "Plug that says what every token of a batch is worth (see core.plugs.Advantage)."
    )
    rollout_data_postprocess_path: str | None = knob(
        None, "Plug that gets a whole batch and gives the one to train on (see core.plugs.PostProcess)."
    )
    custom_model_provider_path: str | None = knob(
        None, "Plug that makes the model, for trainer and engine alike (see models.provide.Provide)."
    )
    custom_megatron_init_path: str | None = knob(
        None, "Plug called once the trainer has its model, on any backend (see train.hooks.Init)."
    )
    custom_megatron_before_log_prob_hook_path: str | None = knob(
        None, "Plug called before a step's log-probs are computed, on any backend (see train.hooks.BeforeLogProbs)."
    )
    custom_megatron_before_train_step_hook_path: str | None = knob(
        None, "Plug called before each optimizer step, on any backend (see train.hooks.BeforeTrainStep)."
    )
    custom_megatron_post_save_hook_path: str | None = knob(
        None, "Plug called with each checkpoint that is complete, on any backend (see core.plugs.PostSave)."
    )
    custom_update_weight_post_write_path: str | None = knob(
        None, "Plug called after each publication of weights (see sync.post_write.PostWrite)."
    )
    custom_rollout_log_function_path: str | None = knob(
        None, "Plug that says which metrics of a step's groups are logged (see core.plugs.RolloutLog)."
    )
    custom_eval_rollout_log_function_path: str | None = knob(
        None, "Plug that says which metrics of an evaluation are logged (see core.plugs.EvalLog)."
    )
    custom_tracker_path: str | None = knob(
        None, "Plug that is told of everything that happens in the run (see core.protocols.Observer)."
    )

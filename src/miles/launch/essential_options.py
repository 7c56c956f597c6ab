"""Essential options: the flags of ``miles train`` that most runs set, shown first by ``--help``."""

ESSENTIAL_OPTIONS = {
    "Model and data": (
        "hf_checkpoint",
        "prompt_data",
        "input_key",
        "label_key",
        "apply_chat_template",
        "system_prompt",
        "prompt_template",
    ),
    "Reward": ("rm_type", "custom_rm_path"),
    "Rollout": (
        "rollout_batch_size",
        "n_samples_per_prompt",
        "rollout_max_prompt_len",
        "rollout_max_response_len",
        "rollout_temperature",
        "max_weight_staleness",
    ),
    "Learning": (
        "advantage_estimator",
        "loss_type",
        "lr",
        "global_batch_size",
        "use_kl_loss",
        "kl_loss_coef",
        "lora_rank",
    ),
    "Memory and devices": (
        "device",
        "max_tokens_per_gpu",
        "gradient_checkpointing",
        "actor_num_gpus_per_node",
        "rollout_num_gpus",
        "rollout_backend",
    ),
    "Length, evaluation and output": (
        "num_rollout",
        "num_epoch",
        "eval_prompt_data",
        "eval_interval",
        "save",
        "save_interval",
        "use_tensorboard",
    ),
}

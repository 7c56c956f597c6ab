"""Options of single held-out sets: keys of a dataset in --eval-config, and the options of evaluation they replace."""

from collections.abc import Mapping
from typing import Any

from miles.rollout.config import RolloutConfig

METADATA_OVERRIDES = "metadata_overrides"
"""Key of a table that is added to the metadata of every prompt of a set."""

EVAL_KEYS: Mapping[str, str] = {
    "rm_type": "rm_type",
    "custom_rm_path": "custom_rm_path",
    "reward_key": "eval_reward_key",
    "n_samples_per_eval_prompt": "n_samples_per_eval_prompt",
    "temperature": "eval_temperature",
    "top_p": "eval_top_p",
    "top_k": "eval_top_k",
    "max_response_len": "eval_max_response_len",
    "max_prompt_len": "eval_max_prompt_len",
    "max_context_len": "eval_max_context_len",
    "stop": "rollout_stop",
    "stop_token_ids": "rollout_stop_token_ids",
    "input_key": "eval_input_key",
    "label_key": "eval_label_key",
    "tool_key": "eval_tool_key",
    "metadata_key": "metadata_key",
}
"""Key of a dataset -> the option it replaces for this set."""


def list_set_options(config: RolloutConfig, name: str) -> dict[str, Any]:
    """The options of rollouts that are different for the held-out set ``name``."""
    given = config.eval_options.get(name, {})
    values = {EVAL_KEYS[key]: tuple(v) if isinstance(v, list) else v for key, v in given.items() if key in EVAL_KEYS}
    if "rm_type" in values:
        values["custom_rm_path"] = None
    elif "custom_rm_path" in values:
        values["rm_type"] = None
    return values


def get_metadata_overrides(config: RolloutConfig, name: str) -> Mapping[str, Any]:
    """What is added to the metadata of every prompt of the held-out set ``name``."""
    return config.eval_options.get(name, {}).get(METADATA_OVERRIDES, {})


def lists_tools(config: RolloutConfig) -> bool:
    """Whether the prompts of any set have tools that the chat template lists."""
    keys = (config.tool_key, config.eval_tool_key, *(each.get("tool_key") for each in config.eval_options.values()))
    return any(key is not None for key in keys)

"""Knobs of the rollout plane: which prompts, how they are answered, how answers are scored."""

from dataclasses import dataclass
from typing import Any

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How prompts become scored groups."""

    # -- data
    prompt_data: str | None = knob(
        None, "JSONL or Parquet file of prompts, with an optional slice of rows as in data.jsonl@[0:100].", path=True
    )
    input_key: str = knob("input", "Column that holds the prompt, either text or a list of chat messages.")
    label_key: str | None = knob(None, "Column that holds the reference answer a reward compares with.")
    metadata_key: str = knob("metadata", "Column that holds an object handed unread to plugs; rows may lack it.")
    apply_chat_template: bool = knob(False, "Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] = knob(
        factory=dict, help="JSON object of extra arguments for the chat template."
    )
    rollout_shuffle: bool = knob(False, "Read the prompts of each epoch in an order drawn from the rollout seed.")
    rollout_seed: int = knob(42, "Seed of the prompt order and of every sampled token.")

    # -- attempts
    rollout_batch_size: int = knob(32, "Prompts whose groups one rollout hands to training.", unit="prompts")
    n_samples_per_prompt: int = knob(1, "Attempts at each prompt.", unit="attempts")
    rollout_max_response_len: int = knob(1024, "Most tokens an attempt may have.", unit="tokens")
    rollout_max_prompt_len: int | None = knob(
        None, "Prompts that render to more tokens are dropped, and counted, before training.", unit="tokens"
    )
    rollout_max_context_len: int | None = knob(
        None, "Most tokens of prompt and attempt together; the attempt is cut to fit.", unit="tokens"
    )
    rollout_temperature: float = knob(1.0, "Sampling temperature, where 0 is greedy.")
    rollout_top_p: float = knob(1.0, "Sample from the smallest set of tokens with this probability, where 1 is off.")
    rollout_top_k: int = knob(-1, "Sample from this many most likely tokens, where -1 is off.")
    rollout_stop: tuple[str, ...] = knob((), "Strings that end an attempt when they appear in it.")
    rollout_stop_token_ids: tuple[int, ...] = knob((), "Token ids that end an attempt, besides the model's own.")
    custom_generate_function_path: str | None = knob(
        None, "Plug that answers a prompt (see core.protocols.Generate); a single turn when absent."
    )

    # -- rewards and filters
    rm_type: str | None = knob(
        None, "Built-in reward by name, such as exact, math or f1; with boxed_ before it, it grades the boxed answer."
    )
    custom_rm_path: str | None = knob(
        None, "Plug that scores an attempt (see core.protocols.RewardFn), used instead of a built-in reward."
    )
    group_rm: bool = knob(False, "The custom reward scores all attempts at a prompt in one call (GroupRewardFn).")
    reward_key: str | None = knob(None, "Train on this named part of the reward instead of its value.")
    dynamic_sampling_filter_path: str | None = knob(
        None, "Plug that says whether a group may be trained on (see core.protocols.Filter); absent keeps all."
    )

    # -- evaluation
    eval_prompt_data: tuple[str, ...] = knob(
        (), "Held-out sets as pairs of a name and a file, such as easy data.jsonl.", path="pairs"
    )
    n_samples_per_eval_prompt: int = knob(1, "Attempts at each held-out prompt.", unit="attempts")
    eval_temperature: float | None = knob(None, "Sampling temperature of evaluation; the rollout's when absent.")
    eval_top_p: float | None = knob(None, "Nucleus probability of evaluation; the rollout's when absent.")
    eval_top_k: int | None = knob(None, "Top-k of evaluation; the rollout's when absent.")
    eval_max_response_len: int | None = knob(
        None, "Most tokens of an attempt in evaluation; the rollout's when absent.", unit="tokens"
    )
    eval_input_key: str | None = knob(None, "Prompt column of the held-out sets; the input key when absent.")
    eval_label_key: str | None = knob(None, "Answer column of the held-out sets; the label key when absent.")
    skip_eval_before_train: bool = knob(False, "Do not evaluate before the first training step.")
    log_passrate: bool = knob(False, "Also report pass@k, for every power of two up to the attempts at a prompt.")

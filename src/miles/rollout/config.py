"""Knobs of the rollout plane: which prompts, how they are answered, how answers are scored."""

from dataclasses import dataclass
from typing import Any, Literal

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How prompts become scored groups."""

    # -- data
    prompt_data: tuple[str, ...] = knob(
        (),
        "Prompts: files, folders, globs or reasoning_gym:TASK, each perhaps with a slice and a weight, "
        "as in data.jsonl@[0:100]*0.3.",
        path=True,
        schemes=("reasoning_gym",),
    )
    skip_bad_rows: bool = knob(False, "Leave out rows that cannot be read, and count them, instead of stopping.")
    curriculum_path: str | None = knob(
        None, "Plug that says which prompts come next, or how much of each part (see core.protocols.Curriculum)."
    )
    input_key: str = knob("input", "Column that holds the prompt, either text or a list of chat messages.")
    label_key: str | None = knob(None, "Column that holds the reference answer a reward compares with.")
    chosen_key: str = knob("chosen", "Column that holds the preferred reply of a pair, text or chat messages.")
    rejected_key: str = knob("rejected", "Column that holds the other reply of a pair, text or chat messages.")
    metadata_key: str = knob("metadata", "Column that holds an object handed unread to plugs; rows may lack it.")
    apply_chat_template: bool = knob(False, "Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] = knob(
        factory=dict, help="JSON object of extra arguments for the chat template."
    )
    loss_mask_type: Literal["all", "last", "each"] = knob(
        "all",
        "Which of the assistant's turns in a conversation sft_loss learns: all of them, the last message alone, or "
        "each in a row of its own, for chat templates that rewrite earlier turns.",
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
        None,
        "Built-in reward by name, such as math or f1, or a weighted sum such as math:0.9+f1:0.1; with boxed_ before a "
        "name, it grades the boxed answer.",
    )
    custom_rm_path: str | None = knob(
        None, "Plug that scores an attempt (see core.protocols.RewardFn), used instead of a built-in reward."
    )
    group_rm: bool = knob(False, "Score all attempts at a prompt in one call, as a custom GroupRewardFn wants it.")
    reward_key: str | None = knob(None, "Train on this named part of the reward instead of its value.")
    reward_timeout: float = knob(
        300.0, "Longest wait for a reward, after which the attempt earns 0 and counts as unscored.", unit="seconds"
    )
    max_unscored_attempts: int = knob(
        128, "Attempts in a row whose reward may fail before the run stops with the reason.", unit="attempts"
    )
    reward_num_workers: int = knob(
        0, "Processes that compute rewards, on Ray spread over the nodes; 0 computes them in the run's own process."
    )
    reward_worker_concurrency: int = knob(8, "Most rewards that each such process is asked for at once.")
    grade_workers: int = knob(2, "Processes for graders that may not end, started when first needed.")
    grade_timeout: float = knob(
        5.0, "Longest time one grade may take in such a process before it is killed.", unit="seconds"
    )
    rm_url: str | None = knob(None, "Address that the reward remote_rm posts attempts to.")
    rm_token_env: str | None = knob(None, "Environment variable with the token that remote_rm sends.")
    rm_batch_size: int = knob(1, "Most attempts in one request to remote_rm or reward_model.", unit="attempts")
    rm_concurrency: int = knob(32, "Most requests under way at once to each server that gives rewards.")
    rm_retries: int = knob(3, "How often a request for a reward that failed is repeated, ever more slowly.")
    rm_request_timeout: float = knob(60.0, "Longest time one request for a reward may take.", unit="seconds")
    reward_model_url: str | None = knob(None, "Address of the served scalar model that the reward reward_model asks.")
    reward_model_api: Literal["sglang", "openai"] = knob(
        "sglang", "Form of the classify requests that the served reward model understands."
    )
    reward_model_name: str | None = knob(None, "Name of the reward model, where its server serves several.")
    reward_model_tokenizer: str | None = knob(
        None, "Checkpoint whose chat template renders conversations for the reward model; absent sends text.", path=True
    )
    reward_model_token_env: str | None = knob(None, "Environment variable with the token that reward_model sends.")
    judge_url: str | None = knob(
        None, "OpenAI-compatible address, often ending in /v1, that the reward llm_judge asks."
    )
    judge_model: str | None = knob(None, "Name of the model that judges.")
    judge_rubric: str | None = knob(None, "What the judge shall look for, in a sentence or two; absent is correctness.")
    judge_max_tokens: int = knob(1024, "Most tokens of a judge's answer.", unit="tokens")
    judge_token_env: str | None = knob(None, "Environment variable with the token that llm_judge sends.")
    opd_teacher_urls: tuple[str, ...] = knob(
        (),
        "Addresses of teachers that SGLang or miles serve, as NAME=URL for prompts that name them, or a URL alone for "
        "those that name none.",
    )
    opd_teacher_token_env: str | None = knob(None, "Environment variable with the token that served teachers want.")
    opd_teacher_batch_size: int = knob(8, "Most attempts in one request to a served teacher.", unit="attempts")
    opd_teacher_concurrency: int = knob(32, "Most requests under way at once to each served teacher.")
    opd_teacher_retries: int = knob(3, "How often a request to a teacher that failed is repeated, ever more slowly.")
    opd_teacher_timeout: float = knob(120.0, "Longest time one request to a teacher may take.", unit="seconds")
    dynamic_sampling_filter_path: str | None = knob(
        None, "Plug that says whether a group may be trained on (see core.protocols.Filter); absent keeps all."
    )

    # -- evaluation
    eval_prompt_data: tuple[str, ...] = knob(
        (),
        "Held-out sets as pairs of a name and a file, such as easy data.jsonl.",
        path="pairs",
        schemes=("reasoning_gym",),
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

    # -- code: what a program in a reply may use when the code reward runs it
    code_wall_seconds: float = knob(20.0, "Longest a program may run, waiting included.", unit="seconds")
    code_cpu_seconds: float = knob(10.0, "Most CPU time of a program, all its processes together.", unit="seconds")
    code_memory_mib: int = knob(512, "Most memory of a program, all its processes together.", unit="MiB")
    code_processes: int = knob(16, "Most processes and threads a program may have at a time.", unit="processes")
    code_scratch_mib: int = knob(64, "Most a program may write to its scratch folder.", unit="MiB")
    code_output_kib: int = knob(1024, "Most a program may write to standard output and error.", unit="KiB")
    code_concurrency: int = knob(8, "Programs that are run at the same time.", unit="programs")
    allow_unsandboxed_code: bool = knob(
        False, "Run programs even where the machine cannot hold a sandbox, with whatever walls it has."
    )

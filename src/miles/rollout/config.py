"""Options of rollouts: prompts, sampling, rewards, evaluation, sandbox limits."""

from dataclasses import dataclass
from typing import Any, Literal

from miles.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Prompt data, sampling, rewards, filters, evaluation and limits of graded code."""

    # -- data
    prompt_data: tuple[str, ...] = option(
        (),
        "Prompts: files, folders, globs, splits on the hub such as openai/gsm8k:main@train, reasoning_gym:TASK or "
        "lm_eval:TASK, each optionally with a slice and a weight, as in data.jsonl@[0:100]*0.3.",
        path=True,
        hub="dataset",
        schemes=("reasoning_gym", "lm_eval"),
    )
    skip_bad_rows: bool = option(
        False, "Skip and count rows that cannot be read, rendered or answered within the context, instead of stopping."
    )
    check_rows: int = option(
        10_000,
        "Prompts of each data entry that are rendered before the model is loaded, to find those that cannot be used; "
        "with --skip-bad-rows all are, and 0 is none.",
        unit="prompts",
        ge=0,
    )
    curriculum_path: str | None = option(
        None, "Hook that selects the next prompts, or the weight of each part (see core.protocols.Curriculum)."
    )
    input_key: str = option("input", "Column of the prompt, text or a list of chat messages.")
    label_key: str | None = option(None, "Column of the reference answer for rewards.")
    chosen_key: str = option("chosen", "Column of the preferred reply of a pair, text or chat messages.")
    rejected_key: str = option("rejected", "Column of the rejected reply of a pair, text or chat messages.")
    metadata_key: str = option("metadata", "Column of an object passed to hooks as it is; rows may lack it.")
    tool_key: str | None = option(
        None, "Column of the tools that the chat template lists, a list or its JSON; hooks see it as metadata tools."
    )
    multimodal_keys: dict[str, Any] = option(
        factory=dict,
        help='JSON object of the column of each kind of media: {"image": "images", "video": "frames"}; images '
        "are paths, bytes, base64 or URLs, videos lists of these; <image> and <video> in a text stand for them.",
    )
    apply_chat_template: bool = option(False, "Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] = option(
        factory=dict, help="JSON object of extra arguments for the chat template."
    )
    system_prompt: str | None = option(
        None, "System message for rows without one, with --apply-chat-template; @file reads a file.", text=True
    )
    prompt_template: str | None = option(
        None,
        "Text that replaces the last user message of each row, with {prompt} where that message goes; @file reads a "
        "file.",
        text=True,
    )
    loss_mask_type: Literal["all", "last", "each"] = option(
        "all",
        "Assistant turns that sft_loss trains on: all of them, the last message alone, or each in a sample of its own, "
        "for chat templates that rewrite earlier turns.",
    )
    rollout_shuffle: bool = option(False, "Shuffle the prompts of each epoch with the rollout seed.")
    rollout_seed: int = option(42, "Seed of the prompt order and of every sampled token.", ge=-(2**63), le=2**63 - 1)

    # -- trajectories
    rollout_batch_size: int = option(32, "Prompts per rollout step.", unit="prompts", ge=1)
    n_samples_per_prompt: int = option(
        8, "Trajectories per prompt; losses on given replies have one.", unit="trajectories", ge=1
    )
    rollout_max_response_len: int = option(1024, "Maximum response tokens.", unit="tokens", ge=1)
    rollout_max_prompt_len: int | None = option(
        None, "Maximum prompt tokens; longer prompts are dropped and counted before training.", unit="tokens", ge=1
    )
    rollout_max_context_len: int | None = option(
        None, "Maximum tokens of prompt and response together; the response is truncated to fit.", unit="tokens", ge=2
    )
    rollout_temperature: float = option(1.0, "Sampling temperature, where 0 is greedy.", ge=0)
    rollout_top_p: float = option(
        1.0, "Sample from the smallest set of tokens with this probability, where 1 is off.", gt=0, le=1
    )
    rollout_top_k: int = option(-1, "Sample from this many most likely tokens, where -1 is off.", ge=1, or_value=-1)
    rollout_stop: tuple[str, ...] = option((), "Strings that end a response.")
    rollout_stop_token_ids: tuple[int, ...] = option(
        (), "Token ids that end a response, besides the model's own.", ge=0
    )
    custom_generate_function_path: str | None = option(
        None, "Hook that generates a trajectory (see core.protocols.Generate); a single turn when absent."
    )

    # -- rewards and filters
    rm_type: str | None = option(
        None,
        "Built-in reward by name, such as math or f1, or a weighted sum such as math:0.9+f1:0.1; with boxed_ before a "
        "name, it grades the boxed answer.",
    )
    custom_rm_path: str | None = option(
        None, "Hook that scores a trajectory (see core.protocols.RewardFn), instead of a built-in reward."
    )
    group_rm: bool = option(False, "Score all trajectories of a prompt in one call, as a custom GroupRewardFn needs.")
    reward_key: str | None = option(None, "Train on this named part of the reward instead of its value.")
    reward_timeout: float = option(
        300.0,
        "Time limit of a reward, after which the trajectory earns 0 and counts as unscored.",
        unit="seconds",
        gt=0,
    )
    max_reward_failures: int = option(
        128, "Consecutive trajectories whose reward may fail before the run stops.", unit="trajectories", ge=1
    )
    allow_duplicate_samples: bool = option(
        False, "Accept groups with copies that independent sampling cannot explain, instead of ending the run."
    )
    reward_num_workers: int = option(
        0,
        "Processes that compute rewards, on Ray spread over the nodes; 0 computes them in the run's own process.",
        ge=0,
    )
    reward_worker_concurrency: int = option(8, "Maximum concurrent rewards per such process.", ge=1)
    grade_workers: int = option(2, "Processes for graders that may not terminate, started when first needed.", ge=1)
    grade_timeout: float = option(
        5.0, "Time limit of one grade in such a process, after which it is killed.", unit="seconds", gt=0
    )
    rm_url: str | None = option(None, "URL to which the reward remote_rm posts trajectories.")
    rm_token_env: str | None = option(None, "Environment variable with the token that remote_rm sends.")
    rm_batch_size: int = option(
        1, "Maximum trajectories per request to remote_rm or reward_model.", unit="trajectories", ge=1
    )
    rm_concurrency: int = option(32, "Maximum concurrent requests per reward server.", ge=1)
    rm_retries: int = option(3, "Retries of a failed reward request, with exponential backoff.", ge=0)
    rm_request_timeout: float = option(60.0, "Time limit of one reward request.", unit="seconds", gt=0)
    reward_model_url: str | None = option(None, "URL of the scalar reward model that the reward reward_model queries.")
    reward_model_api: Literal["sglang", "openai"] = option(
        "sglang", "Format of the classify requests of the reward model server."
    )
    reward_model_name: str | None = option(None, "Name of the reward model, where its server serves several.")
    reward_model_tokenizer: str | None = option(
        None,
        "Checkpoint whose chat template renders conversations for the reward model; absent sends text.",
        path=True,
        hub="model",
    )
    reward_model_token_env: str | None = option(None, "Environment variable with the token that reward_model sends.")
    judge_url: str | None = option(
        None, "OpenAI-compatible URL, often ending in /v1, that the reward llm_judge queries."
    )
    judge_model: str | None = option(None, "Name of the judge model.")
    judge_rubric: str | None = option(None, "Rubric of the judge, in a sentence or two; correctness when absent.")
    judge_max_tokens: int = option(1024, "Maximum tokens of a judge's answer.", unit="tokens", ge=1)
    judge_token_env: str | None = option(None, "Environment variable with the token that llm_judge sends.")
    opd_teacher_urls: tuple[str, ...] = option(
        (),
        "URLs of teachers served by SGLang or miles, as NAME=URL for prompts that name them, or a URL alone for those "
        "that name none.",
    )
    opd_teacher_token_env: str | None = option(None, "Environment variable with the token for served teachers.")
    opd_teacher_batch_size: int = option(
        8, "Maximum trajectories per request to a served teacher.", unit="trajectories", ge=1
    )
    opd_teacher_concurrency: int = option(32, "Maximum concurrent requests per served teacher.", ge=1)
    opd_teacher_retries: int = option(3, "Retries of a failed request to a teacher, with exponential backoff.", ge=0)
    opd_teacher_timeout: float = option(120.0, "Time limit of one request to a teacher.", unit="seconds", gt=0)
    dynamic_sampling_filter_path: str | None = option(
        None, "Hook that decides whether a group is trained on (see core.protocols.Filter); absent keeps all."
    )

    # -- evaluation
    eval_prompt_data: tuple[str, ...] = option(
        (),
        "Held-out sets as pairs of a name and a file, a split on the hub or a task such as lm_eval:gsm8k, as in easy "
        "data.jsonl.",
        path="pairs",
        hub="dataset",
        schemes=("reasoning_gym", "lm_eval"),
    )
    eval_config: str | None = option(
        None,
        "A YAML file of held-out sets, each with its own data, columns, sampling, number of trajectories and grader.",
        path=True,
    )
    eval_options: dict[str, Any] = option(
        factory=dict, help="JSON object of the options of each held-out set by name, with the keys of --eval-config."
    )
    n_samples_per_eval_prompt: int = option(1, "Trajectories per held-out prompt.", unit="trajectories", ge=1)
    eval_temperature: float | None = option(
        None, "Sampling temperature of evaluation; the rollout's when absent.", ge=0
    )
    eval_top_p: float | None = option(None, "Nucleus probability of evaluation; the rollout's when absent.", gt=0, le=1)
    eval_top_k: int | None = option(None, "Top-k of evaluation; the rollout's when absent.", ge=1, or_value=-1)
    eval_max_response_len: int | None = option(
        None, "Maximum response tokens in evaluation; the rollout's when absent.", unit="tokens", ge=1
    )
    eval_max_prompt_len: int | None = option(
        None, "Maximum prompt tokens of the held-out sets; the rollout's when absent.", unit="tokens", ge=1
    )
    eval_max_context_len: int | None = option(
        None,
        "Maximum tokens of prompt and response together in evaluation; the rollout's when absent.",
        unit="tokens",
        ge=2,
    )
    eval_reward_key: str | None = option(
        None, "Named part of the reward that evaluation reports; the reward key when absent."
    )
    eval_input_key: str | None = option(None, "Prompt column of the held-out sets; the input key when absent.")
    eval_label_key: str | None = option(None, "Answer column of the held-out sets; the label key when absent.")
    eval_tool_key: str | None = option(None, "Tools column of the held-out sets; the tool key when absent.")
    skip_eval_before_train: bool = option(False, "Do not evaluate before the first training step.")
    log_passrate: bool = option(False, "Also report pass@k, for every power of two up to the trajectories per prompt.")

    # -- code: limits of programs that run in the sandbox, of the code reward and of the tools python and shell
    code_wall_seconds: float = option(20.0, "Wall-clock limit of a program.", unit="seconds", gt=0)
    code_cpu_seconds: float = option(
        10.0, "CPU time limit of a program, all its processes together.", unit="seconds", gt=0
    )
    code_memory_mib: int = option(512, "Memory limit of a program, all its processes together.", unit="MiB", ge=64)
    code_processes: int = option(16, "Maximum processes and threads of a program.", unit="processes", ge=1)
    code_scratch_mib: int = option(64, "Size limit of a program's scratch folder.", unit="MiB", ge=1)
    code_output_kib: int = option(1024, "Size limit of standard output and error together.", unit="KiB", ge=1)
    code_concurrency: int = option(
        8, "Programs of rewards and tools together that run concurrently in a process.", unit="programs", ge=1
    )
    code_sandbox: Literal["native", "bubblewrap", "docker", "podman"] = option(
        "native",
        "What isolates programs: native for namespaces that Miles makes, bubblewrap for those of the installed bwrap, "
        "docker or podman for a container per program.",
    )
    code_sandbox_image: str = option(
        "docker.io/library/python:3.12-slim",
        "Image of the containers of programs, with python3 in it; it is never pulled.",
    )
    allow_unsandboxed_code: bool = option(
        False, "Run programs even where the machine lacks the minimum isolation, with whatever it has."
    )


def resolve_context_limit(config: RolloutConfig, positions: int) -> int:
    """Maximum tokens of prompt and response together, for a model with that many positions."""
    limit = config.rollout_max_context_len
    return positions if limit is None else min(limit, positions)

"""The training objective of a run as one line of text, with its numbers. No torch."""

from collections.abc import Iterator
from types import MappingProxyType

from miles.algo.config import DISTILLATION_ESTIMATOR, AlgoConfig, uses_distillation
from miles.algo.correction_schedule import CorrectionMode, resolve_bounds, uses_correction
from miles.config.value_types import format_value
from miles.launch.config import Config
from miles.launch.plan.plan import Plan

_RATIO = MappingProxyType({"gspo": "ρ = exp(mean over the sample of log π/π_old)"})
_BASELINES = MappingProxyType(
    {
        "rloo": "R − mean of the others' R",
        "maxrl": "(R − mean R) / mean R",
        "opo": "R − Σ length·R / Σ length",
        "reinforce_plus_plus_baseline": "R − mean R",
    }
)
_LEVEL = MappingProxyType(
    {
        "token": "π_old/π_engine",
        "sequence": "Π over the sample of π_old/π_engine",
        "geometric": "exp(mean over the sample of log π_old/π_engine)",
    }
)


def format_objective(config: Config, plan: Plan) -> str:
    """The objective as one line with its numbers."""
    a = config.algo
    mean = _format_mean(a, plan.global_batch_size)
    if a.loss_type == "sft_loss":
        return f"maximise {mean} of log π(token)"
    if a.loss_type == "rm_loss":
        return (
            f"maximise mean over {plan.global_batch_size} pairs of log σ(score of the chosen − score of the rejected)"
        )
    if a.loss_type == "dpo_loss":
        return _format_dpo(a, plan.global_batch_size)
    if a.loss_type == "custom_loss":
        also = f", plus {mean} of {_format_distillation(a)}" if uses_distillation(a) and a.opd_log_prob_top_k else ""
        return f"minimise {a.custom_loss_function_path}, where a mean is the {mean}{also}; {_format_advantage(config)}"
    policy = "".join([*_list_weights(a), _format_surrogate(a)])
    kl = f" − {format_value(a.kl_loss_coef)}·{_format_kl(a)}" if a.use_kl_loss else ""
    entropy = f" + {format_value(a.entropy_coef)}·H(π)" if a.entropy_coef else ""
    distillation = f" − {_format_distillation(a)}" if uses_distillation(a) and a.opd_log_prob_top_k else ""
    terms = f"[{policy}{kl}{entropy}{distillation}]" if kl or entropy or distillation else policy
    ratio = _RATIO.get(a.advantage_estimator, "ρ = π/π_old")
    return "; ".join([f"maximise {mean} of {terms}", f"{ratio}, {_format_advantage(config)}", *_list_definitions(a)])


def _format_dpo(a: AlgoConfig, size: int) -> str:
    margin = (
        f"m = {format_value(a.dpo_beta)}·(Σ log π/π_ref over the chosen reply − Σ log π/π_ref over the rejected one)"
    )
    term = "log σ(m)"
    if a.dpo_label_smoothing:
        right, wrong = format_value(1 - a.dpo_label_smoothing), format_value(a.dpo_label_smoothing)
        term = f"{right}·log σ(m) + {wrong}·log σ(−m)"
    return f"maximise mean over {size} pairs of {term}; {margin}"


def _format_distillation(a: AlgoConfig) -> str:
    """The KL to the teacher, where it is a term of its own."""
    k = a.opd_log_prob_top_k
    over = "the vocabulary" if k < 0 else f"the top {k} ({a.opd_top_k_strategy}) and all others as one"
    kl = "KL(π ‖ π_teacher)" if a.opd_reward_weight_mode == "student_p" else "KL(π_teacher ‖ π)"
    return f"{format_value(a.opd_kl_coef)}·{kl} over {over}"


def _format_mean(a: AlgoConfig, size: int) -> str:
    if a.custom_pg_loss_reducer_function_path is not None:
        return f"sum over the tokens of {size} trajectories, weighted by {a.custom_pg_loss_reducer_function_path},"
    if a.constant_loss_length is not None:
        return f"mean over {size} trajectories of 1/{a.constant_loss_length} of the sum over tokens"
    if a.calculate_per_token_loss:
        return f"mean over all tokens of {size} trajectories"
    return f"mean over {size} trajectories of mean over tokens"


def _format_surrogate(a: AlgoConfig) -> str:
    high = a.eps_clip if a.eps_clip_high is None else a.eps_clip_high
    clipped_ratio = f"clip(ρ, {format_value(1 - a.eps_clip)}, {format_value(1 + high)})"
    if a.advantage_estimator == "cispo":
        return f"sg[{clipped_ratio}]·A·log π"
    clipped = f"min(ρ·A, {clipped_ratio}·A)"
    return clipped if a.eps_clip_c is None else f"max({clipped}, {format_value(a.eps_clip_c)}·A where A < 0)"


def _format_kl(a: AlgoConfig) -> str:
    kl = f"KL[{a.kl_loss_type}](π, π_ref)"
    return f"(π/π_old)·{kl}" if a.use_unbiased_kl else kl


def _list_weights(a: AlgoConfig) -> Iterator[str]:
    """The factors of the surrogate that ``_list_definitions`` defines."""
    if uses_correction(a):
        yield "w·"
    if a.use_opsm:
        yield "m·"


def _list_definitions(a: AlgoConfig) -> Iterator[str]:
    if uses_correction(a):
        yield f"w = {_format_correction(a)}"
    if a.use_opsm:
        yield f"m = 0 where A < 0 and mean over the sample of log π_engine/π > {format_value(a.opsm_delta)}, else 1"


def _format_correction(a: AlgoConfig) -> str:
    if a.custom_tis_function_path is not None:
        return f"as {a.custom_tis_function_path} computes it"
    weight = "1"
    if a.use_tis and a.tis_mode == "auto":
        weight = f"1, {_format_weight(a, 'truncate')} or {_format_weight(a, 'icepop')}, depending on parity"
    elif a.use_tis and a.tis_mode != "auto":
        weight = _format_weight(a, a.tis_mode)
    masked = []
    if a.use_rs:
        low, high = format_value(a.rs_lower_bound), format_value(a.rs_upper_bound)
        masked.append(f"{_LEVEL[a.rs_level]} is outside [{low}, {high}]")
    if a.rs_veto_threshold is not None:
        masked.append(f"any π_old/π_engine of the sample is below {format_value(a.rs_veto_threshold)}")
    zeros = f", 0 where {' or '.join(masked)}" if masked else ""
    return weight + zeros + (", over its mean" if a.tis_batch_normalize else "")


def _format_weight(a: AlgoConfig, mode: CorrectionMode) -> str:
    bounds, ratio = resolve_bounds(a, mode), _LEVEL[a.tis_level]
    low, high = format_value(float(bounds.low)), format_value(float(bounds.high))
    return f"clip({ratio}, {low}, {high})" if mode == "truncate" else f"{ratio} within [{low}, {high}] and else 0"


def _format_advantage(config: Config) -> str:
    a = config.algo
    text = f"A = {_format_group_advantage(config)}"
    if a.advantage_estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        text = f"A = Σ over later tokens of {format_value(a.gamma)}^distance·r, {_format_token_reward(config)}"
    elif a.advantage_estimator == "ppo":
        gamma, lambd = format_value(a.gamma), format_value(a.lambd)
        text = f"A = GAE(γ {gamma}, λ {lambd}) of r and the critic's V, {_format_token_reward(config)}"
    if a.normalize_advantages:
        text += ", A normalized to mean 0 and deviation 1 over the batch"
    if uses_distillation(a) and not a.opd_log_prob_top_k:
        text += f", then A + {format_value(a.opd_kl_coef)}·(log π_teacher − log π_old)"
    if a.overlong_buffer_len is not None:
        start = config.rollout.rollout_max_response_len - a.overlong_buffer_len
        factor = format_value(a.overlong_penalty_factor)
        text += f", R less {factor}·clip((length − {start}) / {a.overlong_buffer_len}, 0, 1)"
    return text


def _format_token_reward(config: Config) -> str:
    a = config.algo
    kl = f" − {format_value(a.kl_coef)}·KL[{a.kl_loss_type}](π_old, π_ref)" if a.kl_coef else ""
    return f"r = ({_format_group_advantage(config)} at the last token){kl}"


def _format_group_advantage(config: Config) -> str:
    """The advantage of a whole trajectory."""
    a = config.algo
    if a.custom_convert_samples_to_train_data_path is not None:
        return f"as {a.custom_convert_samples_to_train_data_path} computes it"
    if a.custom_reward_post_process_path is not None:
        return f"{a.custom_reward_post_process_path}(R)"
    if a.advantage_estimator in ("reinforce_plus_plus", "ppo"):
        return "R"
    if a.advantage_estimator == DISTILLATION_ESTIMATOR:
        return "0"
    if not a.rewards_normalization:
        return "R"
    grpo = "(R − mean R) / std R" if a.grpo_std_normalization else "R − mean R"
    role = "" if a.advantage_role_key is None else f" with the same {a.advantage_role_key}"
    over = f"over the {config.rollout.n_samples_per_prompt} trajectories of a prompt{role}"
    return f"{_BASELINES.get(a.advantage_estimator, grpo)} {over}"

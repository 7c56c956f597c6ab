"""What a run maximises, as one line with its numbers (without torch, so that a plan can print it)."""

from collections.abc import Iterator
from types import MappingProxyType

from miles.algo.config import UNREWARDED, AlgoConfig, distils
from miles.algo.ladder import Mode, bounds_of, corrects
from miles.config.help import shown
from miles.launch.config import Config
from miles.launch.plan import Plan

_RATIO = MappingProxyType({"gspo": "ρ = exp(mean over the sample of log π/π_old)"})
_COMPARED = MappingProxyType(
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


def objective(config: Config, plan: Plan) -> str:
    """What is maximised, as one line with its numbers."""
    a = config.algo
    mean = _mean(a, plan.global_batch_size)
    if a.loss_type == "sft_loss":
        return f"maximise {mean} of log π(token)"
    if a.loss_type == "rm_loss":
        return (
            f"maximise mean over {plan.global_batch_size} pairs of log σ(score of the chosen − score of the rejected)"
        )
    if a.loss_type == "dpo_loss":
        return _preference(a, plan.global_batch_size)
    if a.loss_type == "custom_loss":
        also = f", plus {mean} of {_taught(a)}" if distils(a) and a.opd_log_prob_top_k else ""
        return f"minimise {a.custom_loss_function_path}, where a mean is the {mean}{also}; {_advantage(config)}"
    policy = "".join([*_weights(a), _surrogate(a)])
    kl = f" − {shown(a.kl_loss_coef)}·{_divergence(a)}" if a.use_kl_loss else ""
    entropy = f" + {shown(a.entropy_coef)}·H(π)" if a.entropy_coef else ""
    taught = f" − {_taught(a)}" if distils(a) and a.opd_log_prob_top_k else ""
    terms = f"[{policy}{kl}{entropy}{taught}]" if kl or entropy or taught else policy
    ratio = _RATIO.get(a.advantage_estimator, "ρ = π/π_old")
    return "; ".join([f"maximise {mean} of {terms}", f"{ratio}, {_advantage(config)}", *_meanings(a)])


def _preference(a: AlgoConfig, size: int) -> str:
    margin = f"m = {shown(a.dpo_beta)}·(Σ log π/π_ref over the chosen reply − Σ log π/π_ref over the rejected one)"
    likely = "log σ(m)"
    if a.dpo_label_smoothing:
        right, wrong = shown(1 - a.dpo_label_smoothing), shown(a.dpo_label_smoothing)
        likely = f"{right}·log σ(m) + {wrong}·log σ(−m)"
    return f"maximise mean over {size} pairs of {likely}; {margin}"


def _taught(a: AlgoConfig) -> str:
    """The divergence from the teacher, where it is a term of its own."""
    k = a.opd_log_prob_top_k
    over = "the vocabulary" if k < 0 else f"the top {k} ({a.opd_top_k_strategy}) and all others as one"
    kl = "KL(π ‖ π_teacher)" if a.opd_reward_weight_mode == "student_p" else "KL(π_teacher ‖ π)"
    return f"{shown(a.opd_kl_coef)}·{kl} over {over}"


def _mean(a: AlgoConfig, size: int) -> str:
    if a.custom_pg_loss_reducer_function_path is not None:
        return f"sum over the tokens of {size} trajectories, weighed by {a.custom_pg_loss_reducer_function_path},"
    if a.constant_loss_length is not None:
        return f"mean over {size} trajectories of 1/{a.constant_loss_length} of the sum over tokens"
    if a.calculate_per_token_loss:
        return f"mean over all tokens of {size} trajectories"
    return f"mean over {size} trajectories of mean over tokens"


def _surrogate(a: AlgoConfig) -> str:
    high = a.eps_clip if a.eps_clip_high is None else a.eps_clip_high
    held = f"clip(ρ, {shown(1 - a.eps_clip)}, {shown(1 + high)})"
    if a.advantage_estimator == "cispo":
        return f"sg[{held}]·A·log π"
    clipped = f"min(ρ·A, {held}·A)"
    return clipped if a.eps_clip_c is None else f"max({clipped}, {shown(a.eps_clip_c)}·A where A < 0)"


def _divergence(a: AlgoConfig) -> str:
    kl = f"KL[{a.kl_loss_type}](π, π_ref)"
    return f"(π/π_old)·{kl}" if a.use_unbiased_kl else kl


def _weights(a: AlgoConfig) -> Iterator[str]:
    """The factors before the surrogate that ``_meanings`` says more of."""
    if corrects(a):
        yield "w·"
    if a.use_opsm:
        yield "m·"


def _meanings(a: AlgoConfig) -> Iterator[str]:
    if corrects(a):
        yield f"w = {_correction(a)}"
    if a.use_opsm:
        yield f"m = 0 where A < 0 and mean over the sample of log π_engine/π > {shown(a.opsm_delta)}, else 1"


def _correction(a: AlgoConfig) -> str:
    if a.custom_tis_function_path is not None:
        return f"as {a.custom_tis_function_path} says"
    weight = "1"
    if a.use_tis and a.tis_mode == "auto":
        weight = f"1, {_weight(a, 'truncate')} or {_weight(a, 'icepop')}, as the parity asks"
    elif a.use_tis and a.tis_mode != "auto":
        weight = _weight(a, a.tis_mode)
    unless = []
    if a.use_rs:
        low, high = shown(a.rs_lower_bound), shown(a.rs_upper_bound)
        unless.append(f"{_LEVEL[a.rs_level]} is outside [{low}, {high}]")
    if a.rs_veto_threshold is not None:
        unless.append(f"any π_old/π_engine of the sample is below {shown(a.rs_veto_threshold)}")
    left_out = f", 0 where {' or '.join(unless)}" if unless else ""
    return weight + left_out + (", over its mean" if a.tis_batch_normalize else "")


def _weight(a: AlgoConfig, mode: Mode) -> str:
    bounds, ratio = bounds_of(a, mode), _LEVEL[a.tis_level]
    low, high = shown(float(bounds.low)), shown(float(bounds.high))
    return f"clip({ratio}, {low}, {high})" if mode == "truncate" else f"{ratio} within [{low}, {high}] and else 0"


def _advantage(config: Config) -> str:
    a = config.algo
    told = f"A = {_worth(config)}"
    if a.advantage_estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        told = f"A = Σ over later tokens of {shown(a.gamma)}^distance·r, {_token_reward(config)}"
    elif a.advantage_estimator == "ppo":
        told = f"A = GAE(γ {shown(a.gamma)}, λ {shown(a.lambd)}) of r and the critic's V, {_token_reward(config)}"
    if a.normalize_advantages:
        told += ", A shifted and scaled to mean 0 and deviation 1 over the batch"
    if distils(a) and not a.opd_log_prob_top_k:
        told += f", then A + {shown(a.opd_kl_coef)}·(log π_teacher − log π_old)"
    if a.overlong_buffer_len is not None:
        start = config.rollout.rollout_max_response_len - a.overlong_buffer_len
        told += f", R less {shown(a.overlong_penalty_factor)}·clip((length − {start}) / {a.overlong_buffer_len}, 0, 1)"
    return told


def _token_reward(config: Config) -> str:
    a = config.algo
    kl = f" − {shown(a.kl_coef)}·KL[{a.kl_loss_type}](π_old, π_ref)" if a.kl_coef else ""
    return f"r = ({_worth(config)} at the last token){kl}"


def _worth(config: Config) -> str:
    """What an attempt is worth as a whole."""
    a = config.algo
    if a.custom_convert_samples_to_train_data_path is not None:
        return f"as {a.custom_convert_samples_to_train_data_path} says"
    if a.custom_reward_post_process_path is not None:
        return f"{a.custom_reward_post_process_path}(R)"
    if a.advantage_estimator in ("reinforce_plus_plus", "ppo"):
        return "R"
    if a.advantage_estimator == UNREWARDED:
        return "0"
    grpo = "(R − mean R) / std R" if a.grpo_std_normalization else "R − mean R"
    side = "" if a.advantage_role_key is None else f" that have its {a.advantage_role_key}"
    over = f"over the {config.rollout.n_samples_per_prompt} attempts at a prompt{side}"
    return f"{_COMPARED.get(a.advantage_estimator, grpo)} {over}"

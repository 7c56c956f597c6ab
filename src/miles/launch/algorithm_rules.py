"""Rules about how rewards become a loss: what contradicts itself, and what would do nothing."""

from collections.abc import Callable, Iterator

from miles.launch.config import Config


def a_loss_of_ones_own_is_named_and_asked_for(c: Config) -> Iterator[str]:
    asked, path = c.algo.loss_type == "custom_loss", c.algo.custom_loss_function_path
    if asked and path is None:
        yield "--loss-type custom_loss needs --custom-loss-function-path: name the function that is to be minimised."
    elif path is not None and not asked:
        yield f"--custom-loss-function-path {path} does nothing without --loss-type custom_loss; add that."


def a_loss_of_ones_own_sets_its_own_terms(c: Config) -> Iterator[str]:
    a = c.algo
    if a.loss_type != "custom_loss":
        return
    ours = {
        "--eps-clip-high": a.eps_clip_high is not None,
        "--eps-clip-c": a.eps_clip_c is not None,
        "--kl-loss-coef": a.kl_loss_coef > 0,
        "--use-unbiased-kl": a.use_unbiased_kl,
        "--entropy-coef": a.entropy_coef > 0,
        "--use-opsm": a.use_opsm,
        "--use-tis": a.use_tis,
        "--use-rs": a.use_rs,
        "--rs-veto-threshold": a.rs_veto_threshold is not None,
    }
    for flag in (flag for flag, given in ours.items() if given):
        yield f"--loss-type custom_loss replaces the policy loss, whose part {flag} is; leave one of them out."


def supervised_training_weighs_no_attempts(c: Config) -> Iterator[str]:
    a = c.algo
    if a.loss_type != "sft_loss":
        return
    idle = {
        "--advantage-role-key": a.advantage_role_key is not None,
        "--custom-reward-post-process-path": a.custom_reward_post_process_path is not None,
        "--custom-convert-samples-to-train-data-path": a.custom_convert_samples_to_train_data_path is not None,
        "--overlong-buffer-len": a.overlong_buffer_len is not None,
        "--use-opsm": a.use_opsm,
    }
    for flag in (flag for flag, given in idle.items() if given):
        yield f"--loss-type sft_loss learns from demonstrations, where {flag} means nothing; leave it out."


def a_loss_is_averaged_one_way(c: Config) -> Iterator[str]:
    a = c.algo
    ways = {
        "--calculate-per-token-loss": a.calculate_per_token_loss,
        "--constant-loss-length": a.constant_loss_length is not None,
        "--custom-pg-loss-reducer-function-path": a.custom_pg_loss_reducer_function_path is not None,
    }
    given = [flag for flag, on in ways.items() if on]
    if len(given) > 1:
        yield f"{' and '.join(given)} each say how the loss is averaged; keep one."


def attempts_are_valued_one_way(c: Config) -> Iterator[str]:
    a = c.algo
    rows, worth = a.custom_convert_samples_to_train_data_path, a.custom_reward_post_process_path
    own = "--custom-convert-samples-to-train-data-path" if rows else "--custom-reward-post-process-path"
    if rows and worth:
        yield f"{own} makes the rows itself, and never asks --custom-reward-post-process-path; keep one."
    if rows and a.overlong_buffer_len is not None:
        yield f"{own} makes the rows itself, and never sees --overlong-buffer-len; leave one of them out."
    if (rows or worth) and a.advantage_role_key is not None:
        yield f"{own} values attempts itself, so --advantage-role-key does nothing; leave one of them out."


def roles_are_for_attempts_that_are_compared(c: Config) -> Iterator[str]:
    name = c.algo.advantage_estimator
    if c.algo.advantage_role_key is not None and name in ("reinforce_plus_plus", "ppo"):
        yield f"--advantage-role-key is for estimators that compare attempts, and {name} does not; leave it out."


def a_length_penalty_has_room_and_a_place(c: Config) -> Iterator[str]:
    a, limit = c.algo, c.rollout.rollout_max_response_len
    if a.overlong_buffer_len is None and a.overlong_penalty_factor != 1:
        yield "--overlong-penalty-factor does nothing without --overlong-buffer-len; add that."
    if a.overlong_buffer_len is not None and a.overlong_buffer_len > limit:
        yield (
            f"--overlong-buffer-len {a.overlong_buffer_len} is longer than --rollout-max-response-len {limit}, at "
            "whose end it stands; lower it."
        )
    if a.overlong_buffer_len is not None and a.advantage_estimator == "maxrl":
        yield "--overlong-buffer-len makes rewards negative, and --advantage-estimator maxrl divides by their mean."


def a_switch_is_on_where_its_number_counts(c: Config) -> Iterator[str]:
    a = c.algo
    if a.opsm_delta != 1e-4 and not a.use_opsm:
        yield "--opsm-delta does nothing without --use-opsm; add that."
    if a.use_unbiased_kl and not a.use_kl_loss:
        yield "--use-unbiased-kl does nothing without --use-kl-loss; add that."
    if a.eps_clip_c is not None and a.advantage_estimator == "cispo":
        yield "--eps-clip-c bounds a loss that --advantage-estimator cispo does not have; leave it out."


ALGORITHM: tuple[Callable[[Config], Iterator[str]], ...] = (
    a_loss_of_ones_own_is_named_and_asked_for,
    a_loss_of_ones_own_sets_its_own_terms,
    supervised_training_weighs_no_attempts,
    a_loss_is_averaged_one_way,
    attempts_are_valued_one_way,
    roles_are_for_attempts_that_are_compared,
    a_length_penalty_has_room_and_a_place,
    a_switch_is_on_where_its_number_counts,
)

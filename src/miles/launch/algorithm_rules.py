"""Rules about how rewards become a loss: what contradicts itself, and what would do nothing."""

from collections.abc import Callable, Iterator

from miles.algo.config import GIVEN, PAIRED
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
    if a.loss_type not in GIVEN:
        return
    idle = {
        "--advantage-role-key": a.advantage_role_key is not None,
        "--custom-reward-post-process-path": a.custom_reward_post_process_path is not None,
        "--custom-convert-samples-to-train-data-path": a.custom_convert_samples_to_train_data_path is not None,
        "--overlong-buffer-len": a.overlong_buffer_len is not None,
        "--use-opsm": a.use_opsm,
    }
    for flag in (flag for flag, given in idle.items() if given):
        yield f"--loss-type {a.loss_type} learns from {GIVEN[a.loss_type]}, where {flag} means nothing; leave it out."


def pairs_are_named_where_they_are_read(c: Config) -> Iterator[str]:
    a, r = c.algo, c.rollout
    if a.loss_type in PAIRED:
        if r.chosen_key == r.rejected_key:
            yield f"--chosen-key and --rejected-key are both {r.chosen_key}, and a pair is two replies; name another."
    elif r.chosen_key != "chosen" or r.rejected_key != "rejected":
        flag = "--chosen-key" if r.chosen_key != "chosen" else "--rejected-key"
        yield f"{flag} does nothing without --loss-type dpo_loss or rm_loss; add one of them."
    if a.loss_type != "dpo_loss":
        idle = {"--dpo-beta": a.dpo_beta != 0.1, "--dpo-label-smoothing": a.dpo_label_smoothing > 0}
        for flag in (flag for flag, given in idle.items() if given):
            yield f"{flag} does nothing without --loss-type dpo_loss; add that."


def turns_are_chosen_where_demonstrations_have_turns(c: Config) -> Iterator[str]:
    named, r = f"--loss-mask-type {c.rollout.loss_mask_type}", c.rollout
    if r.loss_mask_type == "all":
        return
    if c.algo.loss_type != "sft_loss":
        yield f"{named} does nothing without --loss-type sft_loss; leave it out."
    elif not r.apply_chat_template:
        yield f"{named} does nothing without --apply-chat-template, as a text has no turns; add that."


def a_reward_model_answers_no_prompts(c: Config) -> Iterator[str]:
    if c.algo.loss_type == "rm_loss" and c.rollout.eval_prompt_data:
        yield "--loss-type rm_loss trains a model that scores and never answers; leave --eval-prompt-data out."


def pairs_are_weighed_alike_and_kept_whole(c: Config) -> Iterator[str]:
    a, size = c.algo, c.train.micro_batch_size
    if a.loss_type not in PAIRED:
        return
    ways = {
        "--calculate-per-token-loss": a.calculate_per_token_loss,
        "--constant-loss-length": a.constant_loss_length is not None,
        "--custom-pg-loss-reducer-function-path": a.custom_pg_loss_reducer_function_path is not None,
        "--entropy-coef": a.entropy_coef > 0,
    }
    for flag in (flag for flag, given in ways.items() if given):
        yield f"--loss-type {a.loss_type} is the mean over pairs, where {flag} has no place; leave it out."
    if size is not None and size % 2 and not c.train.use_dynamic_batch_size:
        yield f"--micro-batch-size {size} would tear a pair of replies apart; make it even."


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
    pairs_are_named_where_they_are_read,
    turns_are_chosen_where_demonstrations_have_turns,
    a_reward_model_answers_no_prompts,
    pairs_are_weighed_alike_and_kept_whole,
    a_loss_is_averaged_one_way,
    attempts_are_valued_one_way,
    roles_are_for_attempts_that_are_compared,
    a_length_penalty_has_room_and_a_place,
    a_switch_is_on_where_its_number_counts,
)

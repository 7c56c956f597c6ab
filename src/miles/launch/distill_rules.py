"""Rules about teachers: where there are any, what they must read, and what means nothing beside them."""

from collections.abc import Callable, Iterator

from miles.algo.config import DEFAULT_TEACHER, GIVEN, UNREWARDED, distils
from miles.core.errors import MilesError
from miles.launch.config import Config
from miles.launch.found import spec_or_none, told, why_not_a_checkpoint
from miles.launch.plan import teacher_folders
from miles.models.choice import chosen_spec


def a_teacher_is_named_where_there_is_one(c: Config) -> Iterator[str]:
    a, t = c.algo, c.train
    asked = f"--advantage-estimator {UNREWARDED}" if a.advantage_estimator == UNREWARDED else "--use-opd"
    if distils(a):
        if t.opd_teacher_load is None and not t.opd_teachers:
            yield f"{asked} needs a teacher: name the folder of its checkpoint with --opd-teacher-load."
        return
    if a.loss_type in GIVEN and (a.use_opd or a.advantage_estimator == UNREWARDED):
        yield f"--loss-type {a.loss_type} learns from {GIVEN[a.loss_type]}, where {asked} means nothing; leave it out."
        return
    idle = {
        "--opd-teacher-load": t.opd_teacher_load is not None,
        "--opd-teachers": bool(t.opd_teachers),
        "--opd-kl-coef": a.opd_kl_coef != 1,
        "--opd-log-prob-top-k": a.opd_log_prob_top_k != 0,
        "--opd-top-k-strategy": a.opd_top_k_strategy != "only-student",
        "--opd-teacher-key": a.opd_teacher_key != "opd_teacher",
    }
    for flag in (flag for flag, given in idle.items() if given):
        yield f"{flag} is for distillation, and does nothing without --use-opd; add that."


def teachers_are_pairs_of_a_name_and_a_folder(c: Config) -> Iterator[str]:
    yield from told(teacher_folders, c)


def teachers_read_what_the_policy_writes(c: Config) -> Iterator[str]:
    policy = spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if not distils(c.algo) or policy is None or list(told(teacher_folders, c)):
        return
    longest = min(c.rollout.rollout_max_context_len or policy.max_positions, policy.max_positions)
    for name, folder in teacher_folders(c).items():
        alone = name == DEFAULT_TEACHER and c.train.opd_teacher_load is not None
        who = f"--opd-teacher-load {folder}" if alone else f"--opd-teachers {name} {folder}"
        if found := why_not_a_checkpoint(folder):
            yield f"{who} {found}"
            continue
        try:
            spec = chosen_spec(folder, c.models.model_impl)
        except MilesError as error:
            yield f"{who} cannot be used: {error}"
            continue
        if spec.vocab_size < policy.vocab_size:
            yield (
                f"{who} knows {spec.vocab_size} tokens and --hf-checkpoint {policy.vocab_size}; a teacher must know "
                "all of the policy's."
            )
        if spec.max_positions < longest:
            yield (
                f"{who} reads {spec.max_positions} positions and the policy may write {longest}; give "
                f"--rollout-max-context-len {spec.max_positions} or less."
            )


def a_token_set_has_a_size(c: Config) -> Iterator[str]:
    a = c.algo
    if distils(a) and a.opd_top_k_strategy != "only-student" and a.opd_log_prob_top_k < 1:
        yield f"--opd-top-k-strategy {a.opd_top_k_strategy} does nothing without --opd-log-prob-top-k; add that."


def a_key_is_read_where_teachers_have_names(c: Config) -> Iterator[str]:
    if distils(c.algo) and c.algo.opd_teacher_key != "opd_teacher" and not c.train.opd_teachers:
        yield f"--opd-teacher-key {c.algo.opd_teacher_key} does nothing without --opd-teachers; add that."


def a_teacher_alone_takes_nothing_from_rewards(c: Config) -> Iterator[str]:
    a = c.algo
    if a.advantage_estimator != UNREWARDED or a.loss_type in GIVEN:
        return
    idle = {
        "--normalize-advantages": a.normalize_advantages,
        "--advantage-role-key": a.advantage_role_key is not None,
        "--overlong-buffer-len": a.overlong_buffer_len is not None,
        "--custom-reward-post-process-path": a.custom_reward_post_process_path is not None,
    }
    for flag in (flag for flag, given in idle.items() if given):
        yield (
            f"--advantage-estimator {UNREWARDED} learns from the teacher alone, where {flag} means nothing; leave it "
            "out, or choose another estimator with --use-opd."
        )


DISTILLATION: tuple[Callable[[Config], Iterator[str]], ...] = (
    a_teacher_is_named_where_there_is_one,
    teachers_are_pairs_of_a_name_and_a_folder,
    teachers_read_what_the_policy_writes,
    a_token_set_has_a_size,
    a_key_is_read_where_teachers_have_names,
    a_teacher_alone_takes_nothing_from_rewards,
)

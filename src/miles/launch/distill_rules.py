"""Rules about teachers: where there are any, what they must read, and what means nothing beside them."""

from collections.abc import Callable, Iterator

from miles.algo.config import DEFAULT_TEACHER, GIVEN, UNREWARDED, distils
from miles.core.errors import MilesError
from miles.launch.config import Config
from miles.launch.found import spec_or_none, told, why_not_a_checkpoint, why_not_an_address
from miles.launch.plan import teacher_addresses, teacher_folders
from miles.models.choice import chosen_spec


def a_teacher_is_named_where_there_is_one(c: Config) -> Iterator[str]:
    a, t = c.algo, c.train
    asked = f"--advantage-estimator {UNREWARDED}" if a.advantage_estimator == UNREWARDED else "--use-opd"
    if distils(a):
        if t.opd_teacher_load is None and not t.opd_teachers and not c.rollout.opd_teacher_urls:
            yield (
                f"{asked} needs a teacher: name the folder of its checkpoint with --opd-teacher-load, or where it is "
                "served with --opd-teacher-urls."
            )
        return
    if a.loss_type in GIVEN and (a.use_opd or a.advantage_estimator == UNREWARDED):
        yield f"--loss-type {a.loss_type} learns from {GIVEN[a.loss_type]}, where {asked} means nothing; leave it out."
        return
    idle = {
        "--opd-teacher-load": t.opd_teacher_load is not None,
        "--opd-teachers": bool(t.opd_teachers),
        "--opd-teacher-urls": bool(c.rollout.opd_teacher_urls),
        "--opd-type": a.opd_type is not None,
        "--opd-reward-weight-mode": a.opd_reward_weight_mode != "student_p",
        "--opd-kl-coef": a.opd_kl_coef != 1,
        "--opd-log-prob-top-k": a.opd_log_prob_top_k != 0,
        "--opd-top-k-strategy": a.opd_top_k_strategy != "only-student",
        "--opd-teacher-key": a.opd_teacher_key != "opd_teacher",
    }
    for flag in (flag for flag, given in idle.items() if given):
        yield f"{flag} is for distillation, and does nothing without --use-opd; add that."


def teachers_are_pairs_of_a_name_and_a_folder(c: Config) -> Iterator[str]:
    yield from told(teacher_folders, c)


def a_teacher_is_held_or_served(c: Config) -> Iterator[str]:
    held = c.train.opd_teacher_load is not None or bool(c.train.opd_teachers)
    served, kind = bool(c.rollout.opd_teacher_urls), c.algo.opd_type
    if held and served:
        named = "--opd-teacher-load" if c.train.opd_teacher_load is not None else "--opd-teachers"
        yield f"{named} has the trainer hold a teacher and --opd-teacher-urls asks a server for one; keep one of them."
    elif kind == "sglang" and held:
        yield "--opd-type sglang asks servers, and teachers are named by folders; name them with --opd-teacher-urls."
    elif kind == "fsdp" and served:
        yield "--opd-type fsdp has the trainer hold teachers, and --opd-teacher-urls names servers; leave it out."


def a_served_teacher_has_an_address(c: Config) -> Iterator[str]:
    if problems := list(told(teacher_addresses, c)):
        yield from problems
        return
    for url in teacher_addresses(c).values():
        yield from why_not_an_address("--opd-teacher-urls", url, "--opd-teacher-token-env")


def a_served_teacher_tells_of_a_few_tokens(c: Config) -> Iterator[str]:
    a, r = c.algo, c.rollout
    if not distils(a) or not r.opd_teacher_urls:
        return
    if a.opd_log_prob_top_k < 0:
        yield (
            "--opd-log-prob-top-k -1 needs all that a teacher says of every token, which no server sends; give a "
            "number, or let the trainer hold the teacher with --opd-teacher-load."
        )
    longest = (r.opd_teacher_retries + 1) * r.opd_teacher_timeout
    if longest >= c.schedule.stall_timeout:
        yield (
            f"--opd-teacher-timeout {r.opd_teacher_timeout:g} with --opd-teacher-retries {r.opd_teacher_retries} is no "
            f"sooner than --stall-timeout {c.schedule.stall_timeout:g}; make one of them smaller."
        )


def asking_a_teacher_is_set_up_where_one_is_asked(c: Config) -> Iterator[str]:
    r = c.rollout
    if r.opd_teacher_urls:
        return
    idle = {
        "--opd-teacher-token-env": r.opd_teacher_token_env is not None,
        "--opd-teacher-batch-size": r.opd_teacher_batch_size != 8,
        "--opd-teacher-concurrency": r.opd_teacher_concurrency != 32,
        "--opd-teacher-retries": r.opd_teacher_retries != 3,
        "--opd-teacher-timeout": r.opd_teacher_timeout != 120,
    }
    for flag in (flag for flag, given in idle.items() if given):
        yield f"{flag} is for teachers that are served, and does nothing without --opd-teacher-urls; leave it out."


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
    if distils(a) and a.opd_reward_weight_mode != "student_p" and a.opd_log_prob_top_k == 0:
        mode = f"--opd-reward-weight-mode {a.opd_reward_weight_mode}"
        yield f"{mode} does nothing without --opd-log-prob-top-k; add that."


def a_key_is_read_where_teachers_have_names(c: Config) -> Iterator[str]:
    several = bool(c.train.opd_teachers or c.rollout.opd_teacher_urls)
    if distils(c.algo) and c.algo.opd_teacher_key != "opd_teacher" and not several:
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
    a_teacher_is_held_or_served,
    a_served_teacher_has_an_address,
    a_served_teacher_tells_of_a_few_tokens,
    asking_a_teacher_is_set_up_where_one_is_asked,
    teachers_read_what_the_policy_writes,
    a_token_set_has_a_size,
    a_key_is_read_where_teachers_have_names,
    a_teacher_alone_takes_nothing_from_rewards,
)

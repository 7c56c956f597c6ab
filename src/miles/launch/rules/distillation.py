"""Rules of on-policy distillation: where teachers are, what they must be able to read, and flags without effect."""

from collections.abc import Iterator

from miles.algo.config import DEFAULT_TEACHER, DISTILLATION_ESTIMATOR, OFFLINE_LOSSES, uses_distillation
from miles.core.errors import MilesError
from miles.launch.config import Config
from miles.launch.plan.plan import parse_teacher_folders, parse_teacher_urls
from miles.launch.plan.topology import is_remote
from miles.launch.rules.flags import Rule, list_set_flags
from miles.launch.rules.paths import check_url, collect_problems, find_checkpoint_problem, read_spec_or_none
from miles.models.resolve import resolve_spec


def check_teacher_is_named(c: Config) -> Iterator[str]:
    a, t = c.algo, c.train
    if uses_distillation(a) and t.opd_teacher_load is None and not t.opd_teachers and not c.rollout.opd_teacher_urls:
        distills = a.advantage_estimator == DISTILLATION_ESTIMATOR
        cause = f"--advantage-estimator {DISTILLATION_ESTIMATOR}" if distills else "--use-opd"
        yield (
            f"{cause} needs a teacher: name the folder of its checkpoint with --opd-teacher-load, or its server with "
            "--opd-teacher-urls."
        )


def check_teacher_folders(c: Config) -> Iterator[str]:
    yield from collect_problems(parse_teacher_folders, c)


def check_teacher_location(c: Config) -> Iterator[str]:
    local = list_set_flags(c, "--opd-teacher-load", "--opd-teachers")
    served, location = bool(c.rollout.opd_teacher_urls), c.algo.opd_type
    if local and served:
        yield (f"{local[0]} loads a teacher in the trainer and --opd-teacher-urls calls a server; keep one of them.")
    elif location == "sglang" and local:
        yield f"--opd-type sglang calls servers, but {local[0]} names folders; use --opd-teacher-urls."
    elif location == "fsdp" and served:
        yield "--opd-type fsdp loads teachers in the trainer, but --opd-teacher-urls names servers; remove it."


def check_teacher_urls(c: Config) -> Iterator[str]:
    if problems := list(collect_problems(parse_teacher_urls, c)):
        yield from problems
        return
    for url in parse_teacher_urls(c).values():
        yield from check_url("--opd-teacher-urls", url, "--opd-teacher-token-env")


def check_served_teacher_limits(c: Config) -> Iterator[str]:
    a = c.algo
    r = c.rollout
    stall = c.schedule.stall_timeout
    if not uses_distillation(a) or not r.opd_teacher_urls:
        return
    if r.multimodal_keys:
        yield (
            "--opd-teacher-urls cannot be used with --multimodal-keys, since a teacher's server is sent tokens and no "
            "images; load the teacher in the trainer with --opd-teacher-load."
        )
    if a.opd_log_prob_top_k < 0:
        yield (
            "--opd-log-prob-top-k -1 needs the teacher's logprobs of the whole vocabulary, which no server sends; give "
            "a number, or load the teacher in the trainer with --opd-teacher-load."
        )
    if (r.opd_teacher_retries + 1) * r.opd_teacher_timeout >= stall:
        yield (
            f"--opd-teacher-timeout {r.opd_teacher_timeout:g} with --opd-teacher-retries {r.opd_teacher_retries} is "
            f"not below --stall-timeout {stall:g}; lower one of them."
        )
    needs_student = a.opd_log_prob_top_k > 0 and a.opd_top_k_strategy != "only-teacher"
    if needs_student and is_remote(c):
        yield (
            f"--opd-top-k-strategy {a.opd_top_k_strategy} needs the engine's top-k tokens, which only "
            "--rollout-backend native returns; use only-teacher."
        )


def check_teacher_models(c: Config) -> Iterator[str]:
    policy = read_spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if not uses_distillation(c.algo) or policy is None or list(collect_problems(parse_teacher_folders, c)):
        return
    longest = min(c.rollout.rollout_max_context_len or policy.max_positions, policy.max_positions)
    for name, folder in parse_teacher_folders(c).items():
        unnamed = name == DEFAULT_TEACHER and c.train.opd_teacher_load is not None
        flag = f"--opd-teacher-load {folder}" if unnamed else f"--opd-teachers {name} {folder}"
        if problem := find_checkpoint_problem(folder):
            yield f"{flag} {problem}"
            continue
        try:
            spec = resolve_spec(folder, c.models.model_impl)
        except MilesError as error:
            yield f"{flag} cannot be used: {error}"
            continue
        if c.rollout.multimodal_keys and spec.vision is None:
            yield f"{flag} has no vision tower, and --multimodal-keys gives prompts images; name a teacher with one."
        if spec.vocab_size < policy.vocab_size:
            yield (
                f"{flag} has {spec.vocab_size} tokens and --hf-checkpoint {policy.vocab_size}; name a teacher with the "
                "policy's whole vocabulary."
            )
        if spec.max_positions < longest:
            yield (
                f"{flag} has {spec.max_positions} positions but contexts may have {longest}; give "
                f"--rollout-max-context-len {spec.max_positions} or less."
            )


def check_pure_distillation(c: Config) -> Iterator[str]:
    if c.algo.advantage_estimator != DISTILLATION_ESTIMATOR or c.algo.loss_type in OFFLINE_LOSSES:
        return
    for flag in list_set_flags(
        c,
        "--normalize-advantages",
        "--advantage-role-key",
        "--overlong-buffer-len",
        "--custom-reward-post-process-path",
    ):
        yield (
            f"--advantage-estimator {DISTILLATION_ESTIMATOR} ignores rewards, so {flag} has no effect; remove it, or "
            "choose another estimator with --use-opd."
        )


DISTILLATION_RULES: tuple[Rule, ...] = (
    check_teacher_is_named,
    check_teacher_folders,
    check_teacher_location,
    check_teacher_urls,
    check_served_teacher_limits,
    check_teacher_models,
    check_pure_distillation,
)

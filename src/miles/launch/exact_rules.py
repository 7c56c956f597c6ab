"""Rules of exact arithmetic: what cannot be computed so, or would be computed otherwise in the two planes."""

from collections.abc import Callable, Iterator

from miles.algo.config import GIVEN
from miles.launch.config import Config
from miles.launch.found import spec_or_none
from miles.models.exactness import inexact

_EXACT = "--parity exact"


def a_model_is_one_whose_arithmetic_can_be_exact(c: Config) -> Iterator[str]:
    if c.models.parity != "exact":
        return
    spec = spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if spec is not None and (problem := inexact(spec)) is not None:
        yield f"{_EXACT} cannot be had of this model: {problem}; leave it out."


def models_beside_the_policy_can_be_exact_too(c: Config) -> Iterator[str]:
    if c.models.parity != "exact":
        return
    beside = {"--critic-load": c.train.critic_load, "--opd-teacher-load": c.train.opd_teacher_load}
    given = [(flag, folder) for flag, folder in beside.items() if folder is not None]
    given += [("--opd-teachers", folder) for folder in c.train.opd_teachers[1::2]]
    for flag, folder in given:
        spec = spec_or_none(folder, c.models.model_impl)
        if spec is not None and (problem := inexact(spec)) is not None:
            yield f"{_EXACT} cannot be had of {flag} {folder}: {problem}; leave it out, or name another model."


def both_planes_have_one_precision(c: Config) -> Iterator[str]:
    sampled, trained = c.models.rollout_dtype, c.models.dtype
    if c.models.parity == "exact" and sampled not in ("auto", trained):
        yield (
            f"{_EXACT} needs one precision in both planes, and --rollout-dtype {sampled} is not --dtype {trained}; "
            "leave --rollout-dtype out."
        )


def exact_training_is_fsdps(c: Config) -> Iterator[str]:
    if c.models.parity == "exact" and c.train.train_backend != "fsdp":
        yield (
            f"{_EXACT} is not for --train-backend {c.train.train_backend}, which has operations of its own; use fsdp."
        )


def both_planes_add_up_over_as_many_ranks(c: Config) -> Iterator[str]:
    engine, trainer = c.cluster.rollout_num_gpus_per_engine, c.parallel.tensor_model_parallel_size
    if c.models.parity == "exact" and c.algo.loss_type not in GIVEN and engine != trainer:
        yield (
            f"{_EXACT} needs as many tensor ranks in both planes, since sums over ranks round, and "
            f"--rollout-num-gpus-per-engine {engine} is not --tensor-model-parallel-size {trainer}; make them alike."
        )


EXACT_ENGINE: tuple[Callable[[Config], Iterator[str]], ...] = (a_model_is_one_whose_arithmetic_can_be_exact,)
EXACT = (
    *EXACT_ENGINE,
    models_beside_the_policy_can_be_exact_too,
    both_planes_have_one_precision,
    exact_training_is_fsdps,
    both_planes_add_up_over_as_many_ranks,
)

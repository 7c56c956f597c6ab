"""Rules of the schedule: length, staleness, async rollout, save and load, debug runs, and elastic GPUs."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from miles.algo.config import OFFLINE_LOSSES
from miles.config.value_types import format_value
from miles.hooks.registry import ROLLOUT
from miles.launch.config import Config
from miles.launch.plan.plan import choose_parity_tolerance
from miles.launch.plan.topology import get_split, is_remote, list_splits
from miles.launch.rules.flags import Rule
from miles.launch.rules.training import PARALLEL_RULES
from miles.observe.config import STEP_PLACEHOLDER, format_step_path

_SAVE_DATA, _LOAD_DATA = "--save-debug-rollout-data", "--load-debug-rollout-data"
_ROLLOUT_ONLY, _TRAIN_ONLY = "--debug-rollout-only", "--debug-train-only"

# -- length, staleness and folders ------------------------------------------------------------


def check_run_length(c: Config) -> Iterator[str]:
    s = c.schedule
    if s.num_rollout is None and s.num_epoch is None:
        yield "--num-rollout is missing: give the number of training steps (or of epochs with --num-epoch)."
    elif s.num_rollout is not None and s.num_epoch is not None:
        yield "--num-rollout and --num-epoch both set the length of the run; keep one (--no-num-epoch unsets it)."


def check_staleness(c: Config) -> Iterator[str]:
    staleness, window = c.schedule.max_weight_staleness, c.schedule.reorder_window
    if c.schedule.colocate and staleness:
        yield (
            f"--colocate runs trainer and engines in turns, so --max-weight-staleness {staleness} is not possible; "
            "remove one of them."
        )
    spare = staleness * c.rollout.rollout_batch_size
    if window - 1 > spare:
        yield (
            f"--reorder-window {window} lets groups overtake further than --max-weight-staleness {staleness} allows; "
            f"use at most {spare + 1}."
        )


def check_parity_thresholds(c: Config) -> Iterator[str]:
    stop, tolerance = c.schedule.parity_stop, choose_parity_tolerance(c)
    if stop is not None and stop < tolerance:
        yield (
            f"--parity-stop {format_value(stop)} is below --parity-tolerance {format_value(tolerance)}, which warns "
            "first; raise it."
        )


def check_run_folders(c: Config) -> Iterator[str]:
    load, save = c.schedule.load, c.schedule.save
    starts_fresh = save is not None and load is not None and Path(load).resolve() == Path(save).resolve()
    if load is not None and not Path(load).is_dir() and not (starts_fresh and not Path(load).exists()):
        yield f"--load {load} is not a folder; name a run or one of its checkpoints."
    if save is not None and Path(save).exists() and not Path(save).is_dir():
        yield f"--save {save} is a file; name a folder for the run."


# -- async rollout --------------------------------------------------------------------------


def check_over_sampling(c: Config) -> Iterator[str]:
    size = c.async_rollout.over_sampling_batch_size
    needed = c.rollout.rollout_batch_size
    if size is None:
        return
    if size < needed:
        yield (
            f"--over-sampling-batch-size {size} is below --rollout-batch-size {needed}, so a step would never be full; "
            "raise it, or remove it."
        )
    if c.algo.loss_type in OFFLINE_LOSSES:
        yield f"--over-sampling-batch-size has no effect with --loss-type {c.algo.loss_type}; remove it."
    path = c.hooks.rollout_function_path
    if path is not None and not ROLLOUT.is_builtin(path):
        yield (
            "--over-sampling-batch-size interrupts the built-in rollout, but --rollout-function-path replaces it; "
            "remove one of them."
        )


def check_offpolicy_mask(c: Config) -> Iterator[str]:
    mixed = c.async_rollout.partial_rollout or c.schedule.max_weight_staleness > 0
    if c.async_rollout.mask_offpolicy_in_partial_rollout and not mixed:
        yield (
            "--mask-offpolicy-in-partial-rollout masks tokens of older weights, of which this run has none; add "
            "--partial-rollout, or remove it."
        )


# -- debug runs -----------------------------------------------------------------------------


def check_offload_rollout(c: Config) -> Iterator[str]:
    flags = [
        flag
        for flag, given in (("--offload", c.train.offload), ("--offload-rollout", c.schedule.offload_rollout))
        if given
    ]
    if c.schedule.max_weight_staleness > 0:
        for flag in flags:
            yield (
                f"{flag} is for engines and a trainer that take turns, but --max-weight-staleness "
                f"{c.schedule.max_weight_staleness} lets both work at once; remove one of them."
            )
    if c.train.offload and c.schedule.offload_rollout is False:
        yield "--offload stands for --offload-rollout too, so --no-offload-rollout contradicts it; keep one."


def check_save_hf(c: Config) -> Iterator[str]:
    path = c.schedule.save_hf
    try:
        if path is not None:
            format_step_path(path, 1)
    except ValueError as error:
        yield f"--save-hf {path} has a placeholder that {error}; the step is {{{STEP_PLACEHOLDER}}}."


def check_train_env_vars(c: Config) -> Iterator[str]:
    for name, value in c.cluster.train_env_vars.items():
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            yield f'--train-env-vars {name} must be a text or a number, as in \'{{"{name}": "1"}}\'.'


def check_profile(c: Config) -> Iterator[str]:
    o = c.observe
    if not o.use_pytorch_profiler:
        return
    if o.profile_step_end <= o.profile_step_start:
        yield (
            f"--profile-step-end {o.profile_step_end} must be above --profile-step-start {o.profile_step_start}: it is "
            "the first step that is not profiled."
        )


def check_memory_history(c: Config) -> Iterator[str]:
    if c.observe.record_memory_history and c.cluster.device == "cpu":
        yield "--record-memory-history records the memory of an accelerator, which --device cpu has not; remove one."


def check_debug_modes(c: Config) -> Iterator[str]:
    o = c.observe
    if o.debug_rollout_only and o.debug_train_only:
        yield f"{_ROLLOUT_ONLY} does not train and {_TRAIN_ONLY} does not sample; keep one."
    elif o.debug_rollout_only and o.load_debug_rollout_data is not None:
        yield f"{_ROLLOUT_ONLY} samples groups and {_LOAD_DATA} reads them; keep one."
    if not o.debug_rollout_only:
        return
    if c.schedule.load is not None:
        yield f"{_ROLLOUT_ONLY} samples with the weights of --hf-checkpoint; name a checkpoint there instead of --load."
    if c.algo.loss_type in OFFLINE_LOSSES:
        yield f"--loss-type {c.algo.loss_type} samples nothing, so {_ROLLOUT_ONLY} does nothing; remove one of them."


def check_loaded_rollouts(c: Config) -> Iterator[str]:
    path, staleness = c.observe.load_debug_rollout_data, c.schedule.max_weight_staleness
    if path is None:
        return
    if c.schedule.eval_interval is not None:
        yield f"{_LOAD_DATA} runs without an engine, which --eval-interval needs; remove it (--no-eval-interval)."
    if staleness:
        yield (
            f"--max-weight-staleness {staleness} has no effect with {_LOAD_DATA}, whose groups record their versions; "
            "remove it."
        )
    if c.rollout.curriculum_path is not None:
        yield f"--curriculum-path chooses prompts, but {_LOAD_DATA} has them in a fixed order; remove one of them."
    if c.algo.loss_type in OFFLINE_LOSSES:
        yield f"--loss-type {c.algo.loss_type} samples nothing, so {_LOAD_DATA} has no effect; remove it."
    if c.schedule.num_epoch is not None:
        yield f"{_LOAD_DATA} has steps and no epochs; use --num-rollout instead of --num-epoch."
    if "{" in path:
        yield from _check_step_pattern(_LOAD_DATA, path)
    elif not Path(path).is_dir():
        yield (
            f"{_LOAD_DATA} {path} is not a folder; name a run, its rollouts/, or files as "
            f"dumps/{{{STEP_PLACEHOLDER}}}.parquet."
        )


def check_saved_rollouts(c: Config) -> Iterator[str]:
    path = c.observe.save_debug_rollout_data
    if path is None:
        return
    yield from (problems := list(_check_step_pattern(_SAVE_DATA, path)))
    if not problems and c.observe.load_debug_rollout_data == path:
        yield f"{_SAVE_DATA} and {_LOAD_DATA} name the same files, which would be overwritten; name others."


def check_saved_train_data(c: Config) -> Iterator[str]:
    path = c.observe.save_debug_train_data
    if path is not None:
        yield from _check_step_pattern("--save-debug-train-data", path)
    if c.observe.load_debug_rollout_data_subsample is not None and c.observe.load_debug_rollout_data is None:
        yield f"--load-debug-rollout-data-subsample takes a share of what {_LOAD_DATA} reads; add that."


def _check_step_pattern(flag: str, path: str) -> Iterator[str]:
    try:
        is_constant = format_step_path(path, 1) == format_step_path(path, 2)
    except ValueError:
        yield f"{flag} {path} has a placeholder other than {{{STEP_PLACEHOLDER}}}, the step number; use only that one."
        return
    if is_constant:
        yield (
            f"{flag} {path} names one file for all steps; put {{{STEP_PLACEHOLDER}}} into it, as in "
            f"dumps/{{{STEP_PLACEHOLDER}}}.parquet."
        )


# -- elastic GPUs ---------------------------------------------------------------------------


def check_elastic_schedule(c: Config) -> Iterator[str]:
    if not c.elastic.elastic:
        return
    if c.schedule.colocate:
        yield "--elastic moves GPUs between trainer and engines, but --colocate shares all of them; remove one of them."
    elif c.schedule.max_weight_staleness == 0:
        yield (
            "--elastic measures how long trainer and engines wait for each other, but with --max-weight-staleness 0 "
            "they run in turns; use --max-weight-staleness 1 or more."
        )
    if c.cluster.rollout_num_gpus is None:
        yield "--elastic needs --rollout-num-gpus: give the number of GPUs that engines have at the start."


def check_elastic_engines(c: Config) -> Iterator[str]:
    if not c.elastic.elastic:
        return
    if c.algo.loss_type in OFFLINE_LOSSES or c.observe.debug_rollout_only or c.observe.load_debug_rollout_data:
        yield "--elastic is for runs that both sample and train; remove it."
    elif c.sglang.rollout_external_engine_addrs:
        yield (
            "--elastic starts and stops engines, but --rollout-external-engine-addrs names running ones; remove one of "
            "them."
        )
    elif not is_remote(c):
        yield "--elastic needs engines in processes of their own; use --rollout-backend served."
    if c.sglang.update_weight_transport == "distributed":
        yield (
            "--update-weight-transport distributed uses a process group that --elastic breaks when ranks change; use "
            "auto, tensor, delta or disk."
        )


def check_elastic_trainer(c: Config) -> Iterator[str]:
    if not c.elastic.elastic:
        return
    if c.ray.runtime == "ray" and c.cluster.actor_num_nodes > 1:
        yield (
            f"--elastic adds and removes single ranks, but --actor-num-nodes {c.cluster.actor_num_nodes} needs equally "
            "many on each node; give all ranks with --actor-num-gpus-per-node."
        )
    if c.train.train_backend != "fsdp":
        yield f"--elastic needs --train-backend fsdp, not {c.train.train_backend}; remove it."
    if c.train.async_save:
        yield "--async-save writes from ranks that --elastic may stop; remove one of them."


def check_elastic_bounds(c: Config) -> Iterator[str]:
    e = c.elastic
    if not e.elastic or c.cluster.rollout_num_gpus is None:
        return
    start, count = get_split(c), c.sglang.rollout_num_engines
    if start.engines < e.elastic_min_engines:
        yield f"--elastic-min-engines {e.elastic_min_engines} exceeds the {start.engines} engines at start; lower it."
    if start.ranks < e.elastic_min_ranks:
        yield f"--elastic-min-ranks {e.elastic_min_ranks} exceeds the {start.ranks} ranks at start; lower it."
    if count is not None and count * c.cluster.rollout_num_gpus_per_engine != c.cluster.rollout_num_gpus:
        yield f"--elastic uses all of --rollout-num-gpus; remove --rollout-num-engines {count}."
    elif len(list_splits(c)) == 1:
        yield "--elastic cannot move any GPU within its bounds; lower --elastic-min-ranks or --elastic-min-engines."


def check_elastic_splits(c: Config) -> Iterator[str]:
    """Every other split must pass the rules of parallel dims, which check the split at start by themselves."""
    if not c.elastic.elastic or c.cluster.rollout_num_gpus is None:
        return
    for split in list_splits(c):
        cluster = _Override(c.cluster, actor_num_gpus_per_node=split.ranks)
        resized = cast(Config, _Override(c, cluster=cluster))
        problem = next((problem for rule in PARALLEL_RULES for problem in rule(resized)), None)
        if problem is not None and split != get_split(c):
            yield f"--elastic may change to {split.ranks} ranks, and then: {problem}"
            return


class _Override:
    """``inner`` with other values for some attributes; it may be a config in which some options are invalid."""

    def __init__(self, inner: object, **values: object) -> None:
        self._inner = inner
        self._values = values

    def __getattr__(self, name: str) -> object:
        return self._values[name] if name in self._values else getattr(self._inner, name)


SCHEDULE_RULES: tuple[Rule, ...] = (
    check_run_length,
    check_staleness,
    check_parity_thresholds,
    check_run_folders,
    check_over_sampling,
    check_offpolicy_mask,
    check_debug_modes,
    check_profile,
    check_memory_history,
    check_offload_rollout,
    check_save_hf,
    check_train_env_vars,
    check_loaded_rollouts,
    check_saved_rollouts,
    check_saved_train_data,
    check_elastic_schedule,
    check_elastic_engines,
    check_elastic_trainer,
    check_elastic_bounds,
    check_elastic_splits,
)

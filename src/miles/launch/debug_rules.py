"""Rules of runs that have one plane without the other: what they need, and what contradicts them."""

from collections.abc import Callable, Iterator
from pathlib import Path

from miles.algo.config import GIVEN
from miles.launch.config import Config
from miles.observe.naming import STEP, named

_SAVE, _LOAD = "--save-debug-rollout-data", "--load-debug-rollout-data"
_ROLLOUT, _TRAIN = "--debug-rollout-only", "--debug-train-only"


def one_plane_at_most_is_left_out(c: Config) -> Iterator[str]:
    if c.observe.debug_rollout_only and c.observe.debug_train_only:
        yield f"{_ROLLOUT} trains nothing and {_TRAIN} samples nothing; keep one."
    elif c.observe.debug_rollout_only and c.observe.load_debug_rollout_data is not None:
        yield f"{_ROLLOUT} makes groups and {_LOAD} reads them; keep one."


def training_alone_has_groups_to_train_on(c: Config) -> Iterator[str]:
    if c.observe.debug_train_only and c.observe.load_debug_rollout_data is None:
        yield f"{_TRAIN} samples nothing, so it needs groups to train on: add {_LOAD}."


def training_alone_asks_no_engine(c: Config) -> Iterator[str]:
    if c.observe.load_debug_rollout_data is None:
        return
    if c.schedule.eval_interval is not None:
        yield f"{_LOAD} trains without an engine, which --eval-interval needs; leave it out, or add --no-eval-interval."
    if c.schedule.max_weight_staleness:
        yield (
            f"--max-weight-staleness {c.schedule.max_weight_staleness} is for planes that overlap, and {_LOAD} has one "
            "plane; leave it out, the groups know which weights wrote them."
        )
    if c.rollout.curriculum_path is not None:
        yield f"--curriculum-path chooses prompts, and {_LOAD} has them in their order; leave one out."
    if c.algo.loss_type in GIVEN:
        yield f"--loss-type {c.algo.loss_type} samples nothing to begin with, so {_LOAD} means nothing; leave it out."


def recorded_steps_are_counted(c: Config) -> Iterator[str]:
    if c.observe.load_debug_rollout_data is not None and c.schedule.num_epoch is not None:
        yield f"{_LOAD} has steps and no epochs: give --num-rollout instead of --num-epoch (--no-num-epoch drops it)."


def recorded_groups_are_where_they_are_said_to_be(c: Config) -> Iterator[str]:
    word = c.observe.load_debug_rollout_data
    if word is None:
        return
    if "{" in word:
        yield from _misnamed(_LOAD, word)
    elif not Path(word).is_dir():
        yield f"{_LOAD} {word} is not a folder; name a run, its rollouts/, or files as in dumps/{{{STEP}}}.parquet."


def every_step_is_written_to_a_file_of_its_own(c: Config) -> Iterator[str]:
    word = c.observe.save_debug_rollout_data
    if word is None:
        return
    yield from (problems := list(_misnamed(_SAVE, word)))
    if not problems and c.observe.load_debug_rollout_data == word:
        yield f"{_SAVE} and {_LOAD} name the same files, which would be written over while they are read; name others."


def sampling_alone_has_one_set_of_weights(c: Config) -> Iterator[str]:
    if not c.observe.debug_rollout_only:
        return
    if c.schedule.load is not None:
        yield f"{_ROLLOUT} takes the weights of --hf-checkpoint; name a checkpoint there instead of --load."
    if c.algo.loss_type in GIVEN:
        yield f"--loss-type {c.algo.loss_type} samples nothing, so {_ROLLOUT} leaves nothing to do; leave one out."


def _misnamed(flag: str, word: str) -> Iterator[str]:
    try:
        alike = named(word, 1) == named(word, 2)
    except ValueError:
        yield f"{flag} {word} has another blank than {{{STEP}}}, which stands for the step; write only that."
        return
    if alike:
        yield f"{flag} {word} names one file for all steps; put {{{STEP}}} into it, as in dumps/{{{STEP}}}.parquet."


DEBUG: tuple[Callable[[Config], Iterator[str]], ...] = (
    one_plane_at_most_is_left_out,
    training_alone_has_groups_to_train_on,
    training_alone_asks_no_engine,
    recorded_steps_are_counted,
    recorded_groups_are_where_they_are_said_to_be,
    every_step_is_written_to_a_file_of_its_own,
    sampling_alone_has_one_set_of_weights,
)

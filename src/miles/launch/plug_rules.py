"""Rules of a user's own code: each plug has an address, and a place in this run where it is called."""

from collections.abc import Callable, Iterator
from dataclasses import fields

from miles.algo.config import GIVEN
from miles.launch.config import Config
from miles.launch.layout_rules import is_team
from miles.plug.load import is_path
from miles.plug.points import (
    ADVANTAGE,
    ALL_SAMPLES,
    BEFORE_LOG_PROBS,
    BUFFER_FILTER,
    DATA_BUFFER,
    DATA_SOURCE,
    EVAL_LOG,
    EVALUATE,
    GENERATE,
    POINTS,
    PROVIDE,
    ROLLOUT,
    ROLLOUT_LOG,
    SAMPLE_FILTER,
)

_ROOMS = {knob.name: room.name for room in fields(Config) if isinstance(room.type, type) for knob in fields(room.type)}
# They work out what each token is worth in the trainer, from all of a batch.
_RETURNS = frozenset({"ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
_SFT = "miles.rollout.sft_rollout.generate_rollout"


def a_plug_has_an_address(c: Config) -> Iterator[str]:
    for point in {point.flag: point for point in POINTS}.values():
        path = getattr(getattr(c, _ROOMS[point.knob]), point.knob)
        names = (*point.builtins, *point.named)
        if path is not None and path not in names and not is_path(path):
            own = "package.module:name, or file.py:name"
            known = f"; built in are {', '.join(names)}" if names else ""
            yield f"{point.flag} {path} is not an address: write {own}{known}."


def an_agent_that_answers_is_named(c: Config) -> Iterator[str]:
    path = c.rollout.custom_generate_function_path
    if GENERATE.now(path) == "agent" and not c.agents.custom_agent_function_path:
        yield f"{GENERATE.flag} {path} has an agent answer; name it with --custom-agent-function-path."


def a_source_of_ones_own_has_no_epochs(c: Config) -> Iterator[str]:
    if c.plug.data_source_path is None:
        return
    if c.schedule.num_epoch is not None:
        yield f"{DATA_SOURCE.flag} deals out prompts without end, so --num-epoch says nothing; use --num-rollout."
    if c.rollout.curriculum_path is not None:
        yield f"{DATA_SOURCE.flag} and --curriculum-path both say which prompt comes next; keep one."


def a_buffer_has_groups_to_choose_from(c: Config) -> Iterator[str]:
    if c.plug.custom_async_data_buffer_path is not None and c.schedule.shelf_window < 2:
        yield f"{DATA_BUFFER.flag} chooses among groups that wait; allow it some with --shelf-window."


def a_model_of_ones_own_is_held_whole(c: Config) -> Iterator[str]:
    if c.plug.custom_model_provider_path is None:
        return
    if is_team(c) or c.cluster.rollout_num_gpus_per_engine > 1:
        yield f"{PROVIDE.flag} makes a model that one device holds; leave it out, or train and sample on one."
    if c.models.model_impl == "transformers":
        yield f"{PROVIDE.flag} is given the decoder of this program, not that of --model-impl transformers; drop one."


def advantages_of_ones_own_are_the_last_word(c: Config) -> Iterator[str]:
    name = c.algo.advantage_estimator
    if c.plug.custom_advantage_function_path is not None and name in _RETURNS:
        yield (
            f"{ADVANTAGE.flag} and --advantage-estimator {name} both say what each token is worth; use grpo, whose "
            "advantages it replaces."
        )


def a_plug_is_called_in_this_run(c: Config) -> Iterator[str]:
    loss, p = c.algo.loss_type, c.plug
    given = {
        ROLLOUT.flag: p.rollout_function_path,
        SAMPLE_FILTER.flag: p.rollout_sample_filter_path,
        ALL_SAMPLES.flag: p.rollout_all_samples_process_path,
        BUFFER_FILTER.flag: p.buffer_filter_path,
        ADVANTAGE.flag: p.custom_advantage_function_path,
        BEFORE_LOG_PROBS.flag: p.custom_megatron_before_log_prob_hook_path,
        ROLLOUT_LOG.flag: p.custom_rollout_log_function_path,
    }
    if p.rollout_function_path == _SFT:
        del given[ROLLOUT.flag]
        if loss not in GIVEN:
            yield f"{ROLLOUT.flag} {_SFT} learns from replies of the data; that is --loss-type sft_loss here."
    for flag in (flag for flag, path in given.items() if path is not None and loss in GIVEN):
        yield f"--loss-type {loss} learns from {GIVEN[loss]}, where {flag} means nothing; leave it out."
    for flag, path in ((EVALUATE.flag, p.eval_function_path), (EVAL_LOG.flag, p.custom_eval_rollout_log_function_path)):
        if path is not None and not c.rollout.eval_prompt_data:
            yield f"{flag} is for evaluations; name held-out sets with --eval-prompt-data."


PLUGS: tuple[Callable[[Config], Iterator[str]], ...] = (
    an_agent_that_answers_is_named,
    a_source_of_ones_own_has_no_epochs,
    a_buffer_has_groups_to_choose_from,
    a_model_of_ones_own_is_held_whole,
    advantages_of_ones_own_are_the_last_word,
    a_plug_is_called_in_this_run,
)

"""Rules between knobs and rooms. Each is one sentence and one function; they refuse, and never repair in silence.

A rule yields what is wrong, with the mend. It sees the config as far as it could be read: when it
looks at a knob that was refused already, it is dropped, so that no complaint follows from another.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from miles.algo.config import GIVEN, UNREWARDED
from miles.config.help import shown
from miles.config.origin import Reading
from miles.core.errors import MilesError
from miles.launch.agent_rules import AGENTS
from miles.launch.algorithm_rules import ALGORITHM
from miles.launch.config import Config
from miles.launch.data_rules import DATA, held_out_sets_are_pairs_of_a_name_and_a_file
from miles.launch.debug_rules import DEBUG
from miles.launch.distill_rules import DISTILLATION
from miles.launch.elastic_rules import ELASTIC
from miles.launch.engine_rules import ENGINE, an_engine_spans_devices_that_are_there
from miles.launch.exact_rules import EXACT, EXACT_ENGINE
from miles.launch.found import spec_or_none, told, why_not_a_checkpoint
from miles.launch.layout_rules import LAYOUT, a_trainer_spans_devices_that_are_there
from miles.launch.lora_rules import LORA, adapters_are_for_training
from miles.launch.machine import choose_device
from miles.launch.member_rules import CAST, across
from miles.launch.mismatch_rules import MISMATCH
from miles.launch.plug_rules import PLUGS, a_plug_has_an_address
from miles.launch.ranges import out_of_range
from miles.launch.ray_rules import RAY
from miles.launch.returns_rules import RETURNS
from miles.launch.reward_rules import REWARDS
from miles.launch.server_rules import SERVERS
from miles.launch.tempo_rules import TEMPO
from miles.launch.update_rules import UPDATES
from miles.models.choice import chosen_spec
from miles.plug.points import GENERATE
from miles.rollout.reward.table import check_name

Command = Literal["train", "plan", "eval", "chat"]
Rule = Callable[[Config], Iterator[str]]


# -- what a run is made of ------------------------------------------------------------------


def a_run_starts_from_a_checkpoint_of_a_known_architecture(c: Config) -> Iterator[str]:
    name = c.models.hf_checkpoint
    if name is None:
        yield "--hf-checkpoint is missing: name the folder of the model to start from."
    elif found := why_not_a_checkpoint(Path(name)):
        yield f"--hf-checkpoint {name} {found}"
    else:
        try:
            chosen_spec(name, c.models.model_impl)
        except MilesError as error:
            yield f"--hf-checkpoint {name} cannot be used: {error}"


def a_reference_model_is_a_checkpoint_too(c: Config) -> Iterator[str]:
    name = c.train.ref_load
    if name is not None and (found := why_not_a_checkpoint(Path(name))):
        yield f"--ref-load {name} {found}"


def a_run_has_a_length(c: Config) -> Iterator[str]:
    given = (c.schedule.num_rollout is not None) + (c.schedule.num_epoch is not None)
    if given == 0:
        yield "--num-rollout is missing: say how many steps to train (or --num-epoch, how often to read the prompts)."
    elif given == 2:
        yield "--num-rollout and --num-epoch both set the length of the run; keep one (--no-num-epoch drops the other)."


def attempts_are_scored_by_a_reward(c: Config) -> Iterator[str]:
    learned = c.algo.loss_type not in GIVEN and c.algo.advantage_estimator != UNREWARDED
    attempts = (learned and c.observe.load_debug_rollout_data is None) or c.rollout.eval_prompt_data
    if attempts and c.rollout.rm_type is None and c.rollout.custom_rm_path is None and not _may_score(c):
        yield "--rm-type is missing: name a built-in reward, or your own with --custom-rm-path."


def _may_score(c: Config) -> bool:
    """Whether who answers a prompt may say itself what the answer earned; produce tells of attempts nobody scored."""
    generate = GENERATE.now(c.rollout.custom_generate_function_path)
    own = generate is not None and generate not in GENERATE.named
    asked = (c.tools.generate_environment, c.agents.custom_agent_function_path, c.cast.custom_cast_function_path)
    return own or any(each is not None for each in asked)


def there_is_one_reward(c: Config) -> Iterator[str]:
    if c.rollout.rm_type is not None and c.rollout.custom_rm_path is not None:
        yield "--rm-type and --custom-rm-path both name a reward; keep one."


def a_built_in_reward_is_in_the_table(c: Config) -> Iterator[str]:
    if c.rollout.rm_type is not None:
        yield from told(check_name, c.rollout.rm_type)


def supervised_training_makes_no_attempts(c: Config) -> Iterator[str]:
    loss = c.algo.loss_type
    if loss not in GIVEN:
        return
    evaluates = bool(c.rollout.eval_prompt_data)  # held-out prompts are answered and scored all the same
    idle = {
        "--rm-type": c.rollout.rm_type is not None and not evaluates,
        "--custom-rm-path": c.rollout.custom_rm_path is not None and not evaluates,
        "--custom-generate-function-path": c.rollout.custom_generate_function_path is not None and not evaluates,
        "--dynamic-sampling-filter-path": c.rollout.dynamic_sampling_filter_path is not None,
        "--use-kl-loss": c.algo.use_kl_loss,
        "--use-rollout-routing-replay": c.algo.use_rollout_routing_replay,
        "--use-routing-replay": c.algo.use_routing_replay,
        "--use-tis": c.algo.use_tis,
        "--use-rs": c.algo.use_rs,
        "--rs-veto-threshold": c.algo.rs_veto_threshold is not None,
        "--n-samples-per-prompt": c.rollout.n_samples_per_prompt > 1,
        "--max-weight-staleness": c.schedule.max_weight_staleness > 0,
    }
    for flag in (flag for flag, given in idle.items() if given):
        yield f"--loss-type {loss} learns from {GIVEN[loss]}, where {flag} means nothing; leave it out."


# -- sizes ----------------------------------------------------------------------------------


def a_rollout_batch_is_a_whole_number_of_global_batches(c: Config) -> Iterator[str]:
    prompts, attempts = c.rollout.rollout_batch_size, c.rollout.n_samples_per_prompt
    size, steps = c.train.global_batch_size, c.train.num_steps_per_rollout
    made = prompts * attempts
    left = f"--rollout-batch-size {prompts} × --n-samples-per-prompt {attempts} = {made}"
    if size is not None and steps is not None and made != size * steps:
        right = f"--global-batch-size {size} × --num-steps-per-rollout {steps} = {size * steps}"
        mend = "drop one of the last two" if made % size == 0 or made % steps == 0 else "make both sides equal"
        yield f"{left}, but {right}; {mend}."
    elif size is not None and steps is None and made % size:
        yield f"{left}, which --global-batch-size {size} does not divide; {_near(made, size)}."
    elif steps is not None and size is None and made % steps:
        yield f"{left}, which --num-steps-per-rollout {steps} does not divide; {_near(made, steps)}."


def overtaking_stays_within_the_staleness_budget(c: Config) -> Iterator[str]:
    window, spare = c.schedule.shelf_window, c.schedule.max_weight_staleness * c.rollout.rollout_batch_size
    if window - 1 > spare:
        yield (
            f"--shelf-window {window} lets groups overtake further than --max-weight-staleness "
            f"{c.schedule.max_weight_staleness} allows; at most {spare + 1} here."
        )


def a_group_relative_credit_needs_a_group(c: Config) -> Iterator[str]:
    a, name = c.algo, c.algo.advantage_estimator
    alone = name in ("reinforce_plus_plus", "ppo", UNREWARDED) or a.loss_type in GIVEN
    own = a.custom_reward_post_process_path or a.custom_convert_samples_to_train_data_path
    if not alone and not own and c.rollout.n_samples_per_prompt < 2:
        yield f"--advantage-estimator {name} compares attempts, so --n-samples-per-prompt must be at least 2."


def a_context_has_room_for_a_prompt_and_a_response(c: Config) -> Iterator[str]:
    whole, prompt = c.rollout.rollout_max_context_len, c.rollout.rollout_max_prompt_len
    if whole is not None and prompt is not None and prompt >= whole:
        yield (
            f"--rollout-max-prompt-len {prompt} leaves no room for a response within --rollout-max-context-len {whole}."
        )


def a_model_reads_as_far_as_its_positions_go(c: Config) -> Iterator[str]:
    spec, r = spec_or_none(c.models.hf_checkpoint, c.models.model_impl), c.rollout
    if r.rollout_max_context_len is None:
        lengths = {
            "--rollout-max-prompt-len": r.rollout_max_prompt_len,
        }
    else:
        lengths = {"--rollout-max-context-len": r.rollout_max_context_len}
    for flag, length in lengths.items():
        if spec is not None and length is not None and length > spec.max_positions:
            yield f"{flag} {length} is more than the {spec.max_positions} positions of --hf-checkpoint; lower it."


# -- mathematics ----------------------------------------------------------------------------


def a_trained_policy_samples(c: Config) -> Iterator[str]:
    if c.algo.loss_type not in GIVEN and c.rollout.rollout_temperature == 0:
        yield "--rollout-temperature 0 is greedy, and all attempts at a prompt would be the same; use 1."


def a_penalty_is_switched_on_to_count(c: Config) -> Iterator[str]:
    if c.algo.kl_loss_coef > 0 and not c.algo.use_kl_loss:
        yield f"--kl-loss-coef {shown(c.algo.kl_loss_coef)} does nothing without --use-kl-loss; add that."


def a_warm_up_is_given_once(c: Config) -> Iterator[str]:
    if c.train.lr_warmup_iters and c.train.lr_warmup_fraction is not None:
        yield "--lr-warmup-iters and --lr-warmup-fraction both set the warm-up; keep one."


def a_schedule_goes_down(c: Config) -> Iterator[str]:
    t = c.train
    if t.min_lr > t.lr:
        yield f"--min-lr {shown(t.min_lr)} is above --lr {shown(t.lr)}; a schedule ends at or below its peak."
    if t.lr_decay_iters is not None and t.lr_warmup_iters > t.lr_decay_iters:
        yield f"--lr-warmup-iters {t.lr_warmup_iters} is longer than the whole --lr-decay-iters {t.lr_decay_iters}."


# -- time and place -------------------------------------------------------------------------


def colocated_planes_take_turns(c: Config) -> Iterator[str]:
    k = c.schedule.max_weight_staleness
    if c.schedule.colocate and k:
        yield (
            f"--colocate and --max-weight-staleness {k} contradict each other: planes that take turns cannot run ahead."
        )


def a_light_turns_red_before_a_run_stops(c: Config) -> Iterator[str]:
    stop, red = c.schedule.parity_stop, c.schedule.parity_tolerance
    if stop is not None and stop < red:
        yield f"--parity-stop {shown(stop)} is below --parity-tolerance {shown(red)}; the light turns red first."


def evaluation_on_a_cadence_needs_held_out_sets(c: Config) -> Iterator[str]:
    if c.schedule.eval_interval is not None and not c.rollout.eval_prompt_data:
        yield "--eval-interval needs --eval-prompt-data: a name and a file for each held-out set."


def an_evaluation_has_held_out_sets(c: Config) -> Iterator[str]:
    if not c.rollout.eval_prompt_data:
        yield "--eval-prompt-data is missing: give a name and a file for each held-out set."


def a_run_continues_from_what_exists(c: Config) -> Iterator[str]:
    if c.schedule.load is not None and not Path(c.schedule.load).is_dir():
        yield f"--load {c.schedule.load} is not a folder; name a run or one of its checkpoints."


def a_run_directory_is_a_directory(c: Config) -> Iterator[str]:
    if c.schedule.save is not None and Path(c.schedule.save).exists() and not Path(c.schedule.save).is_dir():
        yield f"--save {c.schedule.save} is a file; name a folder for the run."


def an_accelerator_that_is_asked_for_is_there(c: Config) -> Iterator[str]:
    if c.cluster.device == "cuda" and (found := choose_device("auto")).name == "cpu":
        yield f"--device cuda cannot be had: {found.why}; use --device cpu, or see miles doctor."


CHAT: tuple[Rule, ...] = (
    a_run_starts_from_a_checkpoint_of_a_known_architecture,
    adapters_are_for_training,
    *ENGINE,
    *EXACT_ENGINE,
    an_engine_spans_devices_that_are_there,
    an_accelerator_that_is_asked_for_is_there,
)
SCORE: tuple[Rule, ...] = (
    attempts_are_scored_by_a_reward,
    there_is_one_reward,
    a_built_in_reward_is_in_the_table,
    *REWARDS,
    a_plug_has_an_address,
    a_context_has_room_for_a_prompt_and_a_response,
    held_out_sets_are_pairs_of_a_name_and_a_file,
)
TRAIN: tuple[Rule, ...] = (
    a_run_starts_from_a_checkpoint_of_a_known_architecture,
    a_reference_model_is_a_checkpoint_too,
    *DATA,
    a_run_has_a_length,
    *SCORE,
    supervised_training_makes_no_attempts,
    a_rollout_batch_is_a_whole_number_of_global_batches,
    a_group_relative_credit_needs_a_group,
    overtaking_stays_within_the_staleness_budget,
    a_trained_policy_samples,
    a_penalty_is_switched_on_to_count,
    *MISMATCH,
    *ALGORITHM,
    *RETURNS,
    *UPDATES,
    *LORA,
    *AGENTS,
    *TEMPO,
    *PLUGS,
    *CAST,
    *DISTILLATION,
    *DEBUG,
    a_warm_up_is_given_once,
    a_schedule_goes_down,
    colocated_planes_take_turns,
    a_light_turns_red_before_a_run_stops,
    evaluation_on_a_cadence_needs_held_out_sets,
    a_run_continues_from_what_exists,
    a_run_directory_is_a_directory,
    *ENGINE,
    *SERVERS,
    *RAY,
    *LAYOUT,
    *ELASTIC,
    *EXACT,
    a_model_reads_as_far_as_its_positions_go,
)
RULES: dict[Command, tuple[Rule, ...]] = {
    "train": (
        *TRAIN,
        an_accelerator_that_is_asked_for_is_there,
        an_engine_spans_devices_that_are_there,
        a_trainer_spans_devices_that_are_there,
    ),
    "plan": TRAIN,
    "eval": (*CHAT, *SCORE, an_evaluation_has_held_out_sets, a_model_reads_as_far_as_its_positions_go),
    "chat": CHAT,
}


def broken(reading: Reading[Config], command: Command) -> list[str]:
    """Everything ``command`` could not do with this config, beyond what ``reading`` says itself."""
    return [] if reading.config is None else across(reading.config, lambda config: _broken(config, reading, command))


def _broken(config: Config, reading: Reading[Config], command: Command) -> list[str]:
    numbers = [(n, s) for n, s in out_of_range(config, reading.origins) if n not in reading.unread]
    seen = cast(Config, _Guarded(config, reading.unread | {name for name, _ in numbers}))
    return [sentence for _, sentence in numbers] + [s for rule in RULES[command] for s in _applied(rule, seen)]


class _Unread(Exception):
    """A rule looked at a knob whose value is not known."""


class _Guarded:
    """A config whose unread knobs cannot be looked at."""

    def __init__(self, config: Any, unread: frozenset[str] | set[str]) -> None:
        self._config, self._unread = config, unread

    def __getattr__(self, name: str) -> Any:
        if name in self._unread:
            raise _Unread(name)
        value = getattr(self._config, name)
        return _Guarded(value, self._unread) if hasattr(value, "__dataclass_fields__") else value


def _applied(rule: Rule, config: Config) -> Sequence[str]:
    try:
        return list(rule(config))
    except _Unread:
        return ()
    except OSError as error:  # a path that cannot even be looked at
        return (f"{error.filename} cannot be read: {error.strerror}.",)


def _near(made: int, divisor: int) -> str:
    smaller, larger = (max(d for d in range(1, divisor) if made % d == 0), _next_divisor(made, divisor))
    return f"{smaller} or {larger} would" if larger else f"{smaller} would"


def _next_divisor(made: int, divisor: int) -> int | None:
    return next((d for d in range(divisor + 1, made + 1) if made % d == 0), None)

"""Rules of tempo: what may be cut, kept and interrupted together with what."""

from collections.abc import Iterator

from miles.algo.config import GIVEN
from miles.launch.config import Config


def more_prompts_enter_a_step_than_it_needs(c: Config) -> Iterator[str]:
    entering, needed = c.tempo.over_sampling_batch_size, c.rollout.rollout_batch_size
    if entering is None:
        return
    if entering < needed:
        yield (
            f"--over-sampling-batch-size {entering} is below --rollout-batch-size {needed}, so that no step would ever "
            "be full; raise it, or leave it out."
        )
    if c.schedule.max_weight_staleness:
        yield (
            "--over-sampling-batch-size is for planes in step: with --max-weight-staleness "
            f"{c.schedule.max_weight_staleness} late attempts hold nobody up; leave one of the two out."
        )
    if c.algo.loss_type in GIVEN:
        yield f"--over-sampling-batch-size cuts attempts, and --loss-type {c.algo.loss_type} makes none; leave it out."
    if c.plug.rollout_function_path is not None:
        yield (
            "--over-sampling-batch-size cuts the attempts of the rollout in the box, and --rollout-function-path names "
            "another; leave one of the two out."
        )


def what_is_cut_may_go_on(c: Config) -> Iterator[str]:
    if c.tempo.partial_rollout and c.tempo.over_sampling_batch_size is None:
        yield (
            "--partial-rollout goes on with attempts that were cut, and nothing is cut; say how many prompts enter a "
            "step with --over-sampling-batch-size, or let planes drift with --max-weight-staleness alone."
        )
    mixed = c.tempo.partial_rollout or c.schedule.max_weight_staleness > 0
    if c.tempo.mask_offpolicy_in_partial_rollout and not mixed:
        yield (
            "--mask-offpolicy-in-partial-rollout masks what older weights wrote, and here one set writes all of an "
            "attempt; add --partial-rollout, or leave it out."
        )


def what_new_weights_interrupt_is_under_way(c: Config) -> Iterator[str]:
    if c.tempo.pause_generation_mode != "in_place" and c.schedule.max_weight_staleness == 0:
        yield (
            f"--pause-generation-mode {c.tempo.pause_generation_mode} is for attempts under way when weights come, and "
            "with --max-weight-staleness 0 there are none; leave one of the two out."
        )


TEMPO = (
    more_prompts_enter_a_step_than_it_needs,
    what_is_cut_may_go_on,
    what_new_weights_interrupt_is_under_way,
)

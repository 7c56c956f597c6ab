"""Rules about what is done where engine and trainer disagree on a token."""

from collections.abc import Callable, Iterator

from miles.algo.ladder import corrects
from miles.launch.config import Config
from miles.launch.found import spec_or_none


def a_correction_compares_the_trainer_with_the_engine(c: Config) -> Iterator[str]:
    if not c.algo.use_rollout_logprobs:
        return
    on = {
        "--use-tis": c.algo.use_tis,
        "--use-rs": c.algo.use_rs,
        "--rs-veto-threshold": c.algo.rs_veto_threshold is not None,
    }
    for flag in (flag for flag, given in on.items() if given):
        yield (
            f"{flag} weighs the trainer's log-probs against the engine's, and with --use-rollout-logprobs they are "
            "one and the same; drop one of the two."
        )


def a_correction_is_switched_on_to_count(c: Config) -> Iterator[str]:
    a = c.algo
    needs = {
        "--use-tis": {
            "--tis-mode": a.tis_mode != "truncate",
            "--tis-level": a.tis_level != "token",
            "--tis-clip": a.tis_clip is not None,
            "--tis-clip-low": a.tis_clip_low is not None,
            "--custom-tis-function-path": a.custom_tis_function_path is not None,
        },
        "--use-rs": {
            "--rs-level": a.rs_level != "token",
            "--rs-upper-bound": a.rs_upper_bound != 2,
            "--rs-lower-bound": a.rs_lower_bound != 0.5,
        },
    }
    for switch, on in (("--use-tis", a.use_tis), ("--use-rs", a.use_rs)):
        for flag in (flag for flag, given in needs[switch].items() if given and not on):
            yield f"{flag} does nothing without {switch}; add that."
    if a.tis_batch_normalize and not corrects(a):
        yield "--tis-batch-normalize does nothing without --use-tis or --use-rs; add one of them."


def what_older_weights_wrote_is_weighed(c: Config) -> Iterator[str]:
    a, k = c.algo, c.schedule.max_weight_staleness
    if k == 0 or a.use_tis or a.use_rollout_logprobs is not None or not corrects(a):
        return
    flag = "--use-rs" if a.use_rs else "--rs-veto-threshold"
    yield (
        f"{flag} leaves tokens out and weighs none, and with --max-weight-staleness {k} those that older weights wrote "
        "need a weight; add --use-tis, or --no-use-rollout-logprobs to go without."
    )


def a_mode_that_sets_its_own_terms_is_given_no_others(c: Config) -> Iterator[str]:
    a = c.algo
    if not a.use_tis:
        return
    if a.tis_mode in ("icepop", "auto") and a.tis_level != "token":
        yield f"--tis-mode {a.tis_mode} weighs single tokens; leave --tis-level {a.tis_level} out."
    bounds = {"--tis-clip": a.tis_clip, "--tis-clip-low": a.tis_clip_low}
    for flag in (flag for flag, bound in bounds.items() if a.tis_mode == "auto" and bound is not None):
        yield f"--tis-mode auto brings the bounds of the mode it takes; leave {flag} out, or name the mode."


def a_correction_of_ones_own_stands_alone(c: Config) -> Iterator[str]:
    a = c.algo
    if a.custom_tis_function_path is None:
        return
    built_in = {
        "--tis-mode": a.tis_mode != "truncate",
        "--tis-level": a.tis_level != "token",
        "--tis-clip": a.tis_clip is not None,
        "--tis-clip-low": a.tis_clip_low is not None,
        "--tis-batch-normalize": a.tis_batch_normalize,
        "--use-rs": a.use_rs,
        "--rs-veto-threshold": a.rs_veto_threshold is not None,
    }
    for flag in (flag for flag, given in built_in.items() if given):
        yield f"{flag} is for the built-in corrections, which --custom-tis-function-path replaces; leave one out."


def routing_is_replayed_where_it_is_recorded(c: Config) -> Iterator[str]:
    if c.algo.use_rollout_routing_replay and not c.native.engine_record_routing:
        yield "--use-rollout-routing-replay needs recorded routing; drop --disable-engine-record-routing."
    asked = {
        "--use-rollout-routing-replay": c.algo.use_rollout_routing_replay,
        "--use-routing-replay": c.algo.use_routing_replay,
    }
    spec = spec_or_none(c.models.hf_checkpoint) if any(asked.values()) else None
    for flag in (flag for flag, given in asked.items() if given):
        if c.models.model_impl == "transformers":
            yield (
                f"{flag} needs routers of our own, and --model-impl transformers has that library's; "
                "leave one of them out."
            )
        elif spec is not None and spec.moe is None:
            yield f"{flag} is for mixtures of experts, and --hf-checkpoint is not one; leave it out."


def a_precision_of_the_engines_own_is_of_our_decoder(c: Config) -> Iterator[str]:
    if c.models.rollout_dtype != "auto" and c.models.model_impl == "transformers":
        yield (
            f"--rollout-dtype {c.models.rollout_dtype} needs a decoder of our own, and --model-impl transformers has "
            "that library's; leave one of them out."
        )


MISMATCH: tuple[Callable[[Config], Iterator[str]], ...] = (
    a_correction_compares_the_trainer_with_the_engine,
    a_correction_is_switched_on_to_count,
    what_older_weights_wrote_is_weighed,
    a_mode_that_sets_its_own_terms_is_given_no_others,
    a_correction_of_ones_own_stands_alone,
    routing_is_replayed_where_it_is_recorded,
    a_precision_of_the_engines_own_is_of_our_decoder,
)

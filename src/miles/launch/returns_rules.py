"""Rules about returns, advantages over a whole batch, and the critic."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from miles.algo.config import GIVEN, TOKEN_RETURNS, WITH_CRITIC
from miles.config.help import shown
from miles.core.errors import MilesError
from miles.launch.config import Config
from miles.launch.found import spec_or_none, why_not_a_checkpoint
from miles.launch.machine import accelerator_count
from miles.models.choice import chosen_spec


def returns_are_for_estimators_that_reckon_them(c: Config) -> Iterator[str]:
    a = c.algo
    if a.loss_type in GIVEN:
        return
    if a.kl_coef > 0 and a.advantage_estimator not in TOKEN_RETURNS:
        yield (
            f"--kl-coef {shown(a.kl_coef)} is charged to the rewards of tokens, which --advantage-estimator "
            f"{a.advantage_estimator} does not look at; put the KL in the loss with --use-kl-loss and --kl-loss-coef."
        )
    if a.gamma != 1 and a.advantage_estimator not in TOKEN_RETURNS:
        yield (
            f"--gamma {shown(a.gamma)} discounts returns, which --advantage-estimator {a.advantage_estimator} does not "
            "reckon; leave it out."
        )
    if a.lambd != 1 and a.advantage_estimator not in WITH_CRITIC:
        yield f"--lambd {shown(a.lambd)} is for --advantage-estimator ppo, not {a.advantage_estimator}; leave it out."


def reinforce_plus_plus_is_normalised_over_the_batch(c: Config) -> Iterator[str]:
    a, reckoned = c.algo, c.algo.advantage_estimator in TOKEN_RETURNS - WITH_CRITIC
    if a.loss_type not in GIVEN and reckoned and not a.normalize_advantages:
        yield (
            f"--advantage-estimator {a.advantage_estimator} has no scale of its own and is defined with advantages "
            "normalised over the batch; add --normalize-advantages."
        )


def supervised_training_reckons_no_returns(c: Config) -> Iterator[str]:
    loss = c.algo.loss_type
    if loss not in GIVEN:
        return
    idle = {
        "--advantage-estimator ppo": c.algo.advantage_estimator in WITH_CRITIC,
        "--kl-coef": c.algo.kl_coef > 0,
        "--gamma": c.algo.gamma != 1,
        "--lambd": c.algo.lambd != 1,
        "--normalize-advantages": c.algo.normalize_advantages,
    }
    for flag in (flag for flag, given in idle.items() if given):
        yield f"--loss-type {loss} learns from {GIVEN[loss]}, where {flag} means nothing; leave it out."


def a_critic_is_set_up_where_there_is_one(c: Config) -> Iterator[str]:
    if c.algo.advantage_estimator in WITH_CRITIC:
        return
    idle = {
        "--critic-load": c.train.critic_load is not None,
        "--critic-device": c.train.critic_device != "auto",
        "--critic-lr": c.train.critic_lr is not None,
        "--critic-lr-warmup-iters": c.train.critic_lr_warmup_iters > 0,
        "--num-critic-only-steps": c.train.num_critic_only_steps > 0,
    }
    for flag in (flag for flag, given in idle.items() if given):
        yield f"{flag} is for a critic, and --advantage-estimator {c.algo.advantage_estimator} has none; leave it out."


def a_critics_device_is_one_there_is(c: Config) -> Iterator[str]:
    name = c.train.critic_device
    if not re.fullmatch(r"auto|cpu|cuda(?::\d+)?", name):
        yield f"--critic-device {name} is no device; write auto, cpu, cuda or cuda:1."
    elif name.startswith("cuda") and c.algo.advantage_estimator in WITH_CRITIC:
        count, number = accelerator_count(), int(name.partition(":")[2] or 0)
        if count is not None and number >= count:
            yield f"--critic-device {name} is not there: this machine has {count or 'no'} accelerators; name another."


def a_critic_starts_from_a_checkpoint_that_reads_the_policys_tokens(c: Config) -> Iterator[str]:
    name, policy = c.train.critic_load, spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if name is None or c.algo.advantage_estimator not in WITH_CRITIC:
        return
    if found := why_not_a_checkpoint(Path(name)):
        yield f"--critic-load {name} {found}"
        return
    try:
        spec = chosen_spec(name, c.models.model_impl)
    except MilesError as error:
        yield f"--critic-load {name} cannot be used: {error}"
        return
    if policy is not None and spec.vocab_size < policy.vocab_size:
        yield (
            f"--critic-load {name} knows {spec.vocab_size} tokens and --hf-checkpoint {policy.vocab_size}; "
            "a critic must read all of the policy's."
        )


def a_critics_schedule_goes_down_too(c: Config) -> Iterator[str]:
    t = c.train
    if t.critic_lr is not None and t.min_lr > t.critic_lr:
        yield f"--min-lr {shown(t.min_lr)} is above --critic-lr {shown(t.critic_lr)}; a schedule ends below its peak."
    if t.lr_decay_iters is not None and t.critic_lr_warmup_iters > t.lr_decay_iters:
        warm = f"--critic-lr-warmup-iters {t.critic_lr_warmup_iters}"
        yield f"{warm} is longer than the whole --lr-decay-iters {t.lr_decay_iters}."


def a_policy_learns_after_its_critic(c: Config) -> Iterator[str]:
    alone, steps = c.train.num_critic_only_steps, c.schedule.num_rollout
    if steps is not None and alone >= steps:
        yield f"--num-critic-only-steps {alone} leaves none of the --num-rollout {steps} steps to the policy; lower it."


RETURNS: tuple[Callable[[Config], Iterator[str]], ...] = (
    returns_are_for_estimators_that_reckon_them,
    reinforce_plus_plus_is_normalised_over_the_batch,
    supervised_training_reckons_no_returns,
    a_critic_is_set_up_where_there_is_one,
    a_critics_device_is_one_there_is,
    a_critic_starts_from_a_checkpoint_that_reads_the_policys_tokens,
    a_critics_schedule_goes_down_too,
    a_policy_learns_after_its_critic,
)

"""Rules of multi-policy runs: each policy's config passes the rules, and the policies fit together."""

from collections.abc import Callable, Iterator, Sequence

from miles.algo.config import OFFLINE_LOSSES, uses_distillation
from miles.launch.config import Config
from miles.launch.policies.config import PolicyConfig, parse_policies
from miles.launch.rules.flags import list_set_flags


def check_policies(config: Config, check: Callable[[Config], list[str]]) -> list[str]:
    """The problems of every policy's config: once where all have it, otherwise under the policy's name."""
    policies, problems = parse_policies(config)
    if not config.multi_agent.policies or not policies:
        return problems + check(config)
    found = {policy.name: check(policy.config) for policy in policies}
    shared = [problem for problem in found[policies[0].name] if all(problem in each for each in found.values())]
    own = [f"--policies: for {name}, {p}" for name, each in found.items() for p in each if p not in shared]
    return problems + shared + own + list(check_policies_together(config))


def check_policies_together(c: Config) -> Iterator[str]:
    """Problems of a run that names several policies."""
    if c.multi_agent.custom_cast_function_path is None:
        yield "--policies needs a function that runs them together; add --custom-cast-function-path."
    if c.algo.loss_type in OFFLINE_LOSSES:
        yield f"--loss-type {c.algo.loss_type} samples nothing, so --policies has no effect; remove it."
    if c.observe.debug_rollout_only:
        yield "--debug-rollout-only samples for one policy, but --policies names several; remove one of them."
    if c.elastic.elastic:
        yield "--elastic works with one policy, but --policies names several; remove one of them."
    policies, _ = parse_policies(c)
    yield from _check_kept_references(policies)
    if any(uses_distillation(policy.config.algo) for policy in policies):
        for flag in list_set_flags(c, "--opd-teacher-urls", "--opd-teachers"):
            yield (
                f"{flag} does not work with --policies, each of which has one teacher in its trainer; use "
                "--opd-teacher-load, in the table of the policy that it teaches."
            )
    yield from _check_servers(policies)


def _check_kept_references(policies: Sequence[PolicyConfig]) -> Iterator[str]:
    """The reference of a policy that is not trained at every step is in an older checkpoint."""
    for policy in (p for p in policies if p.owns_weights and p.train_every > 1 and not p.frozen):
        every, schedule = policy.config.train.ref_update_interval, policy.config.schedule
        if every is None or schedule.save_interval is None or schedule.keep_checkpoints is None:
            continue
        needed = every * policy.train_every // schedule.save_interval
        if schedule.keep_checkpoints <= needed:
            yield (
                f"--ref-update-interval {every} needs the checkpoints of the last {every * policy.train_every} steps, "
                f"in which {policy.name} is trained {every} times; raise --keep-checkpoints to {needed + 1}."
            )


def _check_servers(policies: Sequence[PolicyConfig]) -> Iterator[str]:
    """Running servers belong to one policy: they have its weights."""
    seen: dict[str, str] = {}
    for policy in (p for p in policies if p.owns_weights):
        for address in policy.config.sglang.rollout_external_engine_addrs:
            if address in seen:
                yield (
                    f"--policies: {seen[address]} and {policy.name} both name the server {address} with "
                    "--rollout-external-engine-addrs, which has the weights of one policy; give each its own."
                )
            seen[address] = policy.name

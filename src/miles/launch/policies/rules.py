"""Rules of multi-policy runs: each policy's config passes the rules, and the policies fit together."""

from collections.abc import Callable, Iterator

from miles.algo.config import OFFLINE_LOSSES, uses_distillation
from miles.launch.config import Config
from miles.launch.plan.topology import is_distributed
from miles.launch.policies.config import parse_policies


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
    if is_distributed(c):
        yield "--policies trains each policy in this process; remove the flags that use several ranks."
    if c.algo.loss_type in OFFLINE_LOSSES:
        yield f"--loss-type {c.algo.loss_type} samples nothing, so --policies has no effect; remove it."
    if uses_distillation(c.algo):
        yield "--policies does not work with distillation from a teacher; remove one of them."

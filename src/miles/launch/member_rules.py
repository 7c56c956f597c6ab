"""Rules of runs with several policies: what each of them breaks, and what does not go with being several."""

from collections.abc import Callable, Iterator

from miles.algo.config import GIVEN, distils
from miles.launch.config import Config
from miles.launch.layout_rules import is_team
from miles.launch.members import read_members


def across(config: Config, complain: Callable[[Config], list[str]]) -> list[str]:
    """What ``complain`` says of every policy's config: once where all have it, and else under the policy's name."""
    members, problems = read_members(config)
    if not config.cast.policies or not members:
        return problems + complain(config)
    said = {member.name: complain(member.config) for member in members}
    everywhere = [s for s in said[members[0].name] if all(s in theirs for theirs in said.values())]
    own = [f"--policies: for {name}, {s}" for name, theirs in said.items() for s in theirs if s not in everywhere]
    return problems + everywhere + own + list(policies_go_together(config))


def policies_go_together(c: Config) -> Iterator[str]:
    """Of a run that names several."""
    if c.cast.custom_cast_function_path is None:
        yield "--policies names policies that nobody brings together; add --custom-cast-function-path."
    if is_team(c):
        yield "--policies trains each policy whole in this process; leave out what makes ranks share one."
    if c.algo.loss_type in GIVEN:
        yield f"--loss-type {c.algo.loss_type} samples nothing, so policies cannot meet; leave out --policies."
    if distils(c.algo):
        yield "--policies and distillation from a teacher do not go together; leave one of them out."


def a_cast_answers_prompts_by_itself(c: Config) -> Iterator[str]:
    """Of every policy, and of a run that names none."""
    path = c.cast.custom_cast_function_path
    if path is None:
        return
    others = {
        "--custom-agent-function-path": c.agents.custom_agent_function_path,
        "--custom-generate-function-path": c.rollout.custom_generate_function_path,
    }
    for flag in (flag for flag, given in others.items() if given):
        yield f"--custom-cast-function-path {path} and {flag} both answer prompts; keep one."
    if c.tempo.over_sampling_batch_size is not None or c.tempo.partial_rollout:
        yield (
            f"--custom-cast-function-path {path} plays to the end, and cannot be cut as --over-sampling-batch-size and "
            "--partial-rollout do; leave them out."
        )
    if not c.rollout.apply_chat_template:
        yield "Policies that meet write chats: add --apply-chat-template."


CAST: tuple[Callable[[Config], Iterator[str]], ...] = (a_cast_answers_prompts_by_itself,)

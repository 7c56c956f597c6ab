"""The table of every plug point: its flag, its door, what is there when nothing is plugged, when it is called."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

from miles.plug.load import NO_BUILTINS, load


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One place for a user's own code. ``door`` is the name of its protocol in the module ``room``.

    ``former`` are addresses under which upstream had what is built in here; ``named`` are names of what a run makes
    from its knobs and does not load.
    """

    flag: str
    door: str
    default: str
    when: str
    builtins: Mapping[str, str] = field(default_factory=lambda: NO_BUILTINS)
    former: Mapping[str, str] = field(default_factory=lambda: NO_BUILTINS)
    room: str = "miles.core.protocols"
    named: tuple[str, ...] = ()

    def protocol(self) -> type:
        """The door itself; imported on demand, since the nouns it speaks of need numpy or torch."""
        return getattr(import_module(self.room), self.door)

    def load(self, path: str) -> Any:
        """What the user named under this point's flag, checked against its door."""
        return load(self.former.get(path, path), self.protocol(), builtins=self.builtins, flag=self.flag)


GENERATE = Point(
    flag="--custom-generate-function-path",
    door="Generate",
    default="one reply to each prompt (miles.rollout.generate.single_turn); multi_turn is with tools",
    when="once for each attempt at a prompt",
    named=("single_turn", "multi_turn"),
)
AGENT = Point(
    flag="--custom-agent-function-path",
    door="Agent",
    default="no agent: prompts are answered by --custom-generate-function-path",
    when="once for each attempt at a prompt",
    room="miles.rollout.generate.agent",
)
MATCH = Point(
    flag="--session-message-matcher-path",
    door="Match",
    default="loose_tool_call: tool calls as what they say, all else to the letter",
    when="for each message of an agent's request that stands where one is remembered",
    builtins=MappingProxyType(
        {
            "strict": "miles.rollout.session.match:strict",
            "loose_tool_call": "miles.rollout.session.match:loose_tool_call",
            "role_content_only": "miles.rollout.session.match:role_content_only",
        }
    ),
    room="miles.rollout.session.match",
)
PICK = Point(
    flag="--session-sample-picker-path",
    door="Pick",
    default="all conversations of a session, tokens they share once",
    when="once for each attempt of an agent",
    room="miles.rollout.session.ledger",
)
REWARD = Point(
    flag="--custom-rm-path",
    door="RewardFn",
    default="the built-in reward named by --rm-type",
    when="once for each finished attempt",
)
GROUP_REWARD = Point(
    flag="--custom-rm-path",
    door="GroupRewardFn",
    default="the built-in reward named by --rm-type",
    when="with --group-rm, once for all attempts at a prompt",
)
FILTER = Point(
    flag="--dynamic-sampling-filter-path",
    door="Filter",
    default="every group is kept",
    when="once for each scored group; a dropped one is replaced by another prompt's",
    builtins=MappingProxyType(
        {"nonzero_std": "miles.rollout.filters:nonzero_std", "keep_all": "miles.rollout.filters:keep_all"}
    ),
    former=MappingProxyType(
        {"miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": "nonzero_std"}
    ),
)
CURRICULUM = Point(
    flag="--curriculum-path",
    door="Curriculum",
    default="every prompt in its turn, or parts by their weights",
    when="before a prompt is drawn, when a step has passed or the prompts it named last are used up",
    builtins=MappingProxyType(
        {
            "learnable_parts": "miles.rollout.lessons:learnable_parts",
            "unsolved_first": "miles.rollout.lessons:unsolved_first",
        }
    ),
)
CORRECTION = Point(
    flag="--custom-tis-function-path",
    door="Correction",
    default="the built-in correction named by --tis-mode",
    when="with --use-tis, once for each micro-batch",
    room="miles.algo.objective",
)

WORTH = Point(
    flag="--custom-reward-post-process-path",
    door="Worth",
    default="the comparison that --advantage-estimator makes",
    when="once for each scored group that is kept",
)
CREDIT = Point(
    flag="--custom-convert-samples-to-train-data-path",
    door="Credit",
    default="a row for each branch of an attempt, all its tokens worth the same (miles.algo.credit)",
    when="once for each scored group that is kept",
)
OBJECTIVE = Point(
    flag="--custom-loss-function-path",
    door="Objective",
    default="the policy loss of --advantage-estimator",
    when="with --loss-type custom_loss, once for each micro-batch",
    room="miles.algo.objective",
)
REDUCER = Point(
    flag="--custom-pg-loss-reducer-function-path",
    door="Reducer",
    default="the mean over trajectories of the mean over tokens",
    when="once for each global batch",
    room="miles.algo.reduce",
)

POINTS: tuple[Point, ...] = (
    GENERATE,
    AGENT,
    MATCH,
    PICK,
    REWARD,
    GROUP_REWARD,
    FILTER,
    WORTH,
    CREDIT,
    OBJECTIVE,
    REDUCER,
    CORRECTION,
    CURRICULUM,
)

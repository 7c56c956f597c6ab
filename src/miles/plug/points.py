"""The table of every plug point: its flag, its door, what is there when nothing is plugged, when it is called."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from miles.plug.load import NO_BUILTINS, load


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One place for a user's own code. ``door`` is the name of its protocol in core.protocols.

    ``former`` are addresses under which upstream had what is built in here.
    """

    flag: str
    door: str
    default: str
    when: str
    builtins: Mapping[str, str] = field(default_factory=lambda: NO_BUILTINS)
    former: Mapping[str, str] = field(default_factory=lambda: NO_BUILTINS)

    def protocol(self) -> type:
        """The door itself; imported on demand, since the nouns it speaks of need numpy."""
        import miles.core.protocols

        return getattr(miles.core.protocols, self.door)

    def load(self, path: str) -> Any:
        """What the user named under this point's flag, checked against its door."""
        return load(self.former.get(path, path), self.protocol(), builtins=self.builtins, flag=self.flag)


GENERATE = Point(
    flag="--custom-generate-function-path",
    door="Generate",
    default="one reply to each prompt (miles.rollout.generate.single_turn)",
    when="once for each attempt at a prompt",
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

POINTS: tuple[Point, ...] = (GENERATE, REWARD, GROUP_REWARD, FILTER)

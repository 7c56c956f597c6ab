"""The processes that share a model with the engine's own: a team whose end is the engine's."""

from __future__ import annotations

from collections.abc import Sequence

from miles.backends.native.parcel import CODEC
from miles.cluster.team import Follow, Team
from miles.core.errors import EngineError


def ranks_of(engine: str, devices: Sequence[str], follow: Follow, *, apart: bool, patience: float) -> Team:
    """The followers of one engine, one a device after the first."""
    return Team(
        engine,
        devices,
        follow,
        codec=CODEC,
        apart=apart,
        patience=patience,
        error=EngineError,
        mend="start it again",
    )

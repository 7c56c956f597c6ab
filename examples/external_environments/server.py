"""An environment of OpenEnv's, served by its own server: walk to a chest on a board, the straighter the better.

python server.py [GAMES]    prints http://127.0.0.1:PORT, and serves there, so many games at once, until it is ended
"""

from __future__ import annotations

import random
import socket
import sys
from typing import Any, Literal

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

Move = Literal["north", "south", "east", "west"]
AWAY: dict[Move, tuple[int, int]] = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
SIDE, MOST_MOVES = 3, 6
GAMES = 256
"""As many attempts may be under way at once, when nothing is said; others wait until there is a place."""


class Walk(Action):
    move: Move


class Place(Observation):
    text: str


class Board(Environment[Walk, Place, State]):
    """One walk. Whoever arrives has earned the share of their moves that was needed, and whoever does not, nothing."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._here, self._chest, self._needed = (0, 0), (0, 0), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Place:
        self._state = State(episode_id=episode_id)
        squares = [(column, row) for column in range(SIDE) for row in range(SIDE)]
        self._here, self._chest = random.Random(seed).sample(squares, 2)
        self._needed = sum(abs(a - b) for a, b in zip(self._here, self._chest, strict=True))
        return Place(text=self._seen())

    def step(self, action: Walk, timeout_s: float | None = None, **kwargs: Any) -> Place:
        self._state.step_count += 1
        column, row = (min(max(at + by, 0), SIDE - 1) for at, by in zip(self._here, AWAY[action.move], strict=True))
        self._here = (column, row)
        arrived = self._here == self._chest
        reward = self._needed / self._state.step_count if arrived else 0.0
        return Place(text=self._seen(), done=arrived or self._state.step_count == MOST_MOVES, reward=reward)

    def _seen(self) -> str:
        return f"{_name(self._here)} to {_name(self._chest)}"

    @property
    def state(self) -> State:
        return self._state


def _name(square: tuple[int, int]) -> str:
    return f"{'abc'[square[0]]}{square[1] + 1}"


def main() -> None:
    games = int(sys.argv[1]) if len(sys.argv) > 1 else GAMES
    app = create_fastapi_app(Board, Walk, Place, max_concurrent_envs=games)
    door = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{door.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[door])


if __name__ == "__main__":
    main()

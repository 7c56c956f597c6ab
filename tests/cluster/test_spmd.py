"""SPMD groups: commands, replies, failures and the end of all ranks."""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles.cluster.spmd import RankChannel, RankContext, RankLost, SpmdGroup
from miles.core.errors import TrainerError
from miles.core.serialization import CORE_TYPES, Codec

CODEC = Codec(CORE_TYPES)
PATIENCE = 60.0


def follow(place: RankContext, line: RankChannel) -> None:
    """Does a few things that ranks do."""
    line.send("here", os.getpid())
    while True:
        verb, content = line.receive()
        if verb == "close":
            return
        line.send(verb, DEEDS[verb](place, content))


def _fails(place: RankContext, wrong: int) -> None:
    if place.rank == wrong:
        raise ValueError("this rank is the one\nand here is more of it")
    raise RankLost("another one is gone")


def _waits(place: RankContext, who: int) -> int:
    if place.rank == who:
        threading.Event().wait()
    return place.rank


def _interrupted(place: RankContext, _: Any) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    return place.rank


DEEDS = {
    "who": lambda place, content: (place.rank, place.world_size, place.device, content),
    "sum": lambda _, content: float(content["numbers"].sum()),
    "fail": _fails,
    "wait": _waits,
    "interrupted": _interrupted,
}


@contextmanager
def team(
    world: int, patience: float = PATIENCE, logs: Path | None = None, heartbeat: float = 0.0
) -> Iterator[SpmdGroup]:
    made = SpmdGroup(
        "the team",
        [f"place {i}" for i in range(world)],
        follow,
        codec=CODEC,
        exclusive_devices=True,
        timeout=patience,
        error=TrainerError,
        hint="begin again",
        log_dir=logs,
        heartbeat_timeout=heartbeat,
    )
    try:
        yield made
    finally:
        made.close()
        assert not [one for one in multiprocessing.active_children() if one.name.startswith("the team")]


def test_all_are_told_and_heard_in_their_order():
    with team(3) as made:
        assert len(set(made.gather_replies())) == 2
        made.broadcast("who", "content")
        made.broadcast("interrupted")  # which is the leader's to act on
        assert made.gather_replies() == [(1, 3, "place 1", "content"), (2, 3, "place 2", "content")]
        assert made.gather_replies() == [1, 2]
        numbers = np.arange(300_000, dtype=np.float64)  # long enough to be laid down once for both
        for _ in range(2):
            made.broadcast("sum", {"numbers": numbers})
            assert made.gather_replies() == [numbers.sum()] * 2
            assert list(made.context.folder.iterdir()) == []
        folder = made.context.folder
    assert not folder.exists()
    with pytest.raises(TrainerError, match=r"^the team was closed$"):
        made.broadcast("who")


def test_the_rank_that_failed_is_named_and_not_those_who_lost_it(tmp_path: Path):
    with team(3, logs=tmp_path / "logs") as made:
        made.gather_replies()
        made.broadcast("fail", 2)
        with pytest.raises(TrainerError) as raised:
            made.gather_replies()
        log = tmp_path / "logs" / "rank-2.txt"
        assert str(raised.value) == (
            "the team was stopped, because rank 2 of 3 failed: ValueError: this rank is the one "
            f"(its traceback is in {log}); begin again"
        )
        assert "in _fails" in log.read_text()
        assert [file.name for file in log.parent.iterdir()] == ["rank-2.txt"]
        with pytest.raises(TrainerError, match="rank 2 of 3 failed"):  # and so is everything that is asked later
            made.broadcast("who")


def test_a_rank_that_is_frozen_misses_its_heartbeats_and_is_ended():
    with team(3, heartbeat=4.0) as made:
        pids = made.gather_replies()
        made.start_heartbeat_monitor()
        made.broadcast("wait", 2)  # the other one only waits, which is no crime
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(TrainerError) as raised:
            made.gather_replies()
        assert "because rank 1 of 3 sent no heartbeat for 4 s (--heartbeat-timeout) and was killed" in str(raised.value)
        assert made.rank_died


def test_a_rank_that_reads_no_message_is_killed_without_a_heartbeat_monitor():
    with team(3, patience=3.0) as made:
        pids = made.gather_replies(PATIENCE)
        os.kill(pids[1], signal.SIGSTOP)
        numbers = np.zeros(120_000)  # more than a pipe holds, and too little to be laid down for all
        with pytest.raises(TrainerError, match=r"rank 2 of 3 read no message for 3 s and was killed; begin again"):
            made.broadcast("sum", {"numbers": numbers})
        assert made.rank_died


def test_a_rank_that_dies_after_it_answered_is_not_waited_for_by_way_of_the_others():
    with team(3) as made:
        pids = made.gather_replies()
        made.broadcast("wait", 2)
        assert made._pipes[0].poll(PATIENCE)  # rank 1 has said what it had to say; rank 2 never will
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(TrainerError, match=r"rank 1 of 3 ended with SIGKILL"):
            made.gather_replies()
        assert made.rank_died


def test_a_rank_that_is_killed_is_noticed_at_once_and_named():
    with team(3) as made:
        pids = made.gather_replies()
        noticed = threading.Event()
        made.watch(noticed.set)
        made.broadcast("wait", 2)
        os.kill(pids[1], signal.SIGKILL)
        assert noticed.wait(PATIENCE)
        started = time.monotonic()
        with pytest.raises(TrainerError, match=r"rank 2 of 3 ended with SIGKILL[^;]*; begin"):
            made.gather_replies()
        assert time.monotonic() - started < PATIENCE / 2


def test_a_rank_that_does_not_answer_is_given_up():
    with team(2) as made:
        made.gather_replies()
        made.broadcast("wait", 1)
        with pytest.raises(TrainerError, match=r"rank 1 of 2 did not reply within 0\.2 s"):
            made.gather_replies(0.2)


LONE = """
import sys
from tests.cluster.test_spmd import team

if __name__ == "__main__":
    with team(2) as made:
        pid = made.gather_replies()[0]
        made.broadcast("wait", 1)
        print(pid, made.context.folder, flush=True)
        sys.stdin.read()
"""


def test_no_rank_outlives_a_leader_that_is_killed_wherever_it_waits(tmp_path: Path):
    script = tmp_path / "lone.py"
    script.write_text(LONE)
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    leader = subprocess.Popen([sys.executable, str(script)], stdin=pipe, stdout=pipe, text=True, env=environment)
    assert leader.stdout is not None
    pid, folder = leader.stdout.readline().split()
    follower = os.pidfd_open(int(pid))
    leader.send_signal(signal.SIGKILL)
    leader.communicate()
    watch = select.poll()
    watch.register(follower, select.POLLIN)
    assert watch.poll(30_000), "a rank goes on without its leader"
    assert not Path(folder).exists()
    os.close(follower)

"""Process groups: a rank that waits for an unreachable one can be aborted."""

import multiprocessing
import os
import signal
import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import distributed as dist

from miles.cluster import process_group
from miles.cluster.spmd import RankContext, RankLost

PATIENCE = 300.0


def rank(number: int, meeting: str, folder: Path, pipe: Connection) -> None:
    """Add up once, and once more, for which the second rank has stopped, as if its machine were cut off."""
    own = {"rank": number, "world_size": 2, "device": "cpu", "folder": folder, "rendezvous": meeting}
    process_group.init_process_group(
        RankContext(group_name="the team", exclusive_devices=True, timeout=PATIENCE, **own)
    )
    process_group.set_group_timeouts(PATIENCE)
    ones_n = torch.ones(3)
    dist.all_reduce(ones_n)
    pipe.send(ones_n.tolist())
    if number == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Timer(0.2, process_group.abort_process_groups).start()
    try:
        with process_group.convert_group_errors():
            dist.all_reduce(ones_n)
    except RankLost:
        pipe.send("lost")
    os._exit(0)


def test_who_waits_for_a_rank_that_is_cut_off_is_woken(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    ranks = [context.Process(target=rank, args=(i, meeting, tmp_path, pipes[i][1]), daemon=True) for i in range(2)]
    for each in ranks:
        each.start()
    try:
        assert [pipe.recv() for pipe, _ in pipes] == [[2.0] * 3] * 2
        assert pipes[0][0].poll(PATIENCE / 3), "it waits as long as it would have anyway"
        assert pipes[0][0].recv() == "lost"
    finally:
        for each in ranks:
            each.kill()
            each.join()

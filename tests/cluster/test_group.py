"""Ranks in torch's group: who waits for one that never answers, and whose connection does not break, can be woken."""

import multiprocessing
import os
import signal
import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import distributed as dist

from miles.cluster import group
from miles.cluster.team import Lost, Place

PATIENCE = 300.0


def rank(number: int, meeting: str, folder: Path, pipe: Connection) -> None:
    """Add up once, and once more, for which the second rank has stopped, as if its machine were cut off."""
    own = {"rank": number, "world": 2, "device": "cpu", "folder": folder, "meeting": meeting}
    group.join(Place(team="the team", apart=True, patience=PATIENCE, **own))
    group.bound(PATIENCE)
    ones_n = torch.ones(3)
    dist.all_reduce(ones_n)
    pipe.send(ones_n.tolist())
    if number == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Timer(0.2, group.abort).start()
    try:
        with group.told():
            dist.all_reduce(ones_n)
    except Lost:
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

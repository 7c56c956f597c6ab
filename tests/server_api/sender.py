"""A trainer's side of a weight group, as a program: rank 0 makes the group and broadcasts a checkpoint's tensors.

    python -m tests.server_api.sender FOLDER PORT GROUP

Sends when a line comes in, and ends with the next. It is a program because torch knows one group
of a name in a process, and in the tests our server is in the process that asks.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous


def main(folder: str, port: str, name: str) -> None:
    limit = timedelta(seconds=120)
    store, _, _ = next(iter(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=limit)))
    store = c10d.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(2, 0, [], dist.Backend("gloo"), store, group_name=name, timeout=limit)
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    sys.stdin.readline()
    for tensor in load_file(Path(folder) / "model.safetensors").values():
        dist.broadcast(tensor, src=0, group=group)
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])

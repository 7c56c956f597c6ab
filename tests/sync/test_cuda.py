"""On a card: what another process writes out of this one's memory is the same bits, counted on the way."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miles.kernels.sums import Tally, sums_of
from miles.sync.manifest import folded, folded_all
from miles.sync.window import shown

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
OTHER = """
import json, sys, torch
from miles.kernels.sums import Tally
from miles.sync.manifest import folded_all
from miles.sync.window import opened
device = torch.device("cuda")
print("ready", flush=True)
told = json.loads(sys.stdin.readline())
views = [opened(one, device).view(torch.bfloat16) for one in told]
into = [torch.empty_like(view) for view in views]
tally = Tally(views, into)
for _ in range(2):
    sys.stdin.readline()
    tally.start()
    print(json.dumps(folded_all(tally.read()).tolist()), flush=True)
"""


def drawn(count):
    return torch.randn(count, device="cuda").to(torch.bfloat16)


@needs_card
def test_a_tally_counts_and_copies_what_is_there_each_time_it_is_started():
    tensors = [drawn(count) for count in (1, 7, 200_000, 3_000_001)]
    into = [torch.zeros_like(tensor) for tensor in tensors]
    counting, copying = Tally(tensors), Tally(tensors, into)
    for _ in range(3):
        for tensor in tensors:
            tensor.neg_()
        counting.start()
        copying.start()
        wanted = [folded(pair) for pair in sums_of([tensor.cpu() for tensor in tensors])]
        assert folded_all(counting.read()).tolist() == folded_all(copying.read()).tolist() == wanted
        assert all(torch.equal(a, b) for a, b in zip(tensors, into, strict=True))


@needs_card
def test_another_process_writes_what_lies_in_this_ones_memory_now_and_later():

    tensors = [drawn(count) for count in (512, 70_000, 9_000_000)]
    source = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-c", OTHER]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": source, "PATH": "/usr/bin"},
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        print(json.dumps([shown(tensor) for tensor in tensors]), file=other.stdin, flush=True)
        for _ in range(2):
            for tensor in tensors:
                tensor.neg_()
            tally = Tally(tensors)
            tally.start()
            ours = folded_all(tally.read()).tolist()
            print("go", file=other.stdin, flush=True)
            assert json.loads(other.stdout.readline()) == ours


@needs_card
def test_a_server_in_another_process_takes_weights_in_place_and_proves_them():
    root = Path(__file__).parents[2]
    sys.path.insert(0, str(root / "benchmarks"))
    import sync
    from sync_sides import made, stand_in

    stand_in()

    async def run(server):
        from miles.backends.sglang.mapped import ByMemory

        spec, platform, decoder = made("tiny", 2)
        weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
        url = f"http://127.0.0.1:{server.heard('port ').split()[1]}"
        it = sync.Comparison(spec, platform, weights, url, server)
        return await it.through(ByMemory(), 3, skip=2)

    command = [sys.executable, str(root / "benchmarks" / "sync.py"), "--serve", "--model", "tiny"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        try:
            found = asyncio.run(run(sync.Server(process)))
        finally:
            process.stdin.close()
    assert found["request write"] > 0, "what is compared is compared by the publication"

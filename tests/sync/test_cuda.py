"""On a card: what another process writes out of this one's memory is the same bits, counted on the way."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miles.kernels.runtime.checksum import ChecksumBatch, compute_checksums
from miles.sync.manifest import combine_sums, combine_sums_batch
from miles.sync.shared_memory import export_handle

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
OTHER = """
import json, sys, torch
from miles.kernels.runtime.checksum import ChecksumBatch
from miles.sync.manifest import combine_sums_batch
from miles.sync.shared_memory import open_handle
device = torch.device("cuda")
print("ready", flush=True)
handles = json.loads(sys.stdin.readline())
views = [open_handle(handle, device).view(torch.bfloat16) for handle in handles]
into = [torch.empty_like(view) for view in views]
tally = ChecksumBatch(views, into)
for _ in range(2):
    sys.stdin.readline()
    tally.start()
    print(json.dumps(combine_sums_batch(tally.read()).tolist()), flush=True)
"""


def drawn(count):
    return torch.randn(count, device="cuda").to(torch.bfloat16)


@needs_card
def test_a_tally_counts_and_copies_what_is_there_each_time_it_is_started():
    tensors = [drawn(count) for count in (1, 7, 200_000, 3_000_001)]
    into = [torch.zeros_like(tensor) for tensor in tensors]
    counting, copying = ChecksumBatch(tensors), ChecksumBatch(tensors, into)
    for _ in range(3):
        for tensor in tensors:
            tensor.neg_()
        counting.start()
        copying.start()
        wanted = [combine_sums(pair) for pair in compute_checksums([tensor.cpu() for tensor in tensors])]
        assert combine_sums_batch(counting.read()).tolist() == combine_sums_batch(copying.read()).tolist() == wanted
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
        print(json.dumps([export_handle(tensor) for tensor in tensors]), file=other.stdin, flush=True)
        for _ in range(2):
            for tensor in tensors:
                tensor.neg_()
            tally = ChecksumBatch(tensors)
            tally.start()
            ours = combine_sums_batch(tally.read()).tolist()
            print("go", file=other.stdin, flush=True)
            assert json.loads(other.stdout.readline()) == ours


@needs_card
def test_a_server_in_another_process_takes_weights_in_place_and_proves_them():
    root = Path(__file__).parents[2]
    sys.path.insert(0, str(root / "benchmarks"))
    import bench_weight_sync
    from weight_sync_processes import build_model, stand_in

    stand_in()

    async def run(server):
        from miles.backends.remote.transports.ipc import IpcTransport

        spec, platform, decoder = build_model("tiny", 2)
        weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
        url = f"http://127.0.0.1:{server.read_line('port ').split()[1]}"
        it = bench_weight_sync.Comparison(spec, platform, weights, url, server)
        return await it.through(IpcTransport(), 3, skip=2)

    command = [sys.executable, str(root / "benchmarks" / "bench_weight_sync.py"), "--serve", "--model", "tiny"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        try:
            found = asyncio.run(run(bench_weight_sync.Server(process)))
        finally:
            process.stdin.close()
    assert found["request write"] > 0, "what is compared is compared by the publication"

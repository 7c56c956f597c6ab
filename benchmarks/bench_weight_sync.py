"""Weight update time between two processes on one GPU: every transport beside a plain copy of the same bytes.

    python benchmarks/bench_weight_sync.py [--model Qwen3-4B | tiny | many | experts] [--only direct shared]
        [--without http]

bf16, random weights of the published shape. This process is the trainer; a server (engine and HTTP as in ``miles
serve``) runs in another on the same device. ``direct``: ``ipc`` where the server overwrites its own weights from the
trainer's; ``windows``: ``ipc`` through buckets; ``http``: in requests; ``disk``: through files; ``delta``: one element
in a hundred changed; ``shared``: an engine in this process; ``kernel``: other sizes of the copy-and-checksum kernel.
Times run from the call until servers resume, digests included, and are medians; every tensor changes between two
publications. ``many`` and ``experts`` are small tensors, as many as a model of 4B or of 48 layers of 128 experts has:
what is left is host time.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weight_sync_processes import SHAPES, Plain, build_engine, build_model, serve, stand_in

WAYS = ("shared", "direct", "windows", "kernel", "disk", "http")
_ACTION = re.compile(rb'"action": ?"(\w+)"')


class TimedClient:
    """A client whose words are timed: seconds by action, and what the server says it took."""

    def __init__(self, client: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._ask = client.request
        client.request = self.request

    async def request(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        started = time.perf_counter()
        word = path
        if isinstance(body, bytes) and (found := _ACTION.search(body[:200])) is not None:
            word = found[1].decode()
        elif isinstance(body, dict):
            word = body.get("action", path)
        reported: Any = None
        try:
            reported = await self._ask(method, path, body, **more)
            return reported
        finally:
            self.seconds[f"request {word}"] += time.perf_counter() - started
            for name, spent in reported.get("seconds", {}).items() if isinstance(reported, dict) else ():
                self.seconds[f"  server: {name}"] += spent


class Server:
    """The other process: what it is told, and how long it has run on a CPU."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def read_line(self, start: str) -> str:
        assert self._process.stdout is not None
        line = next((line for line in self._process.stdout if line.startswith(start)), None)
        assert line is not None, "the server has ended"
        return line

    def say(self, word: str) -> None:
        print(word, file=self._process.stdin, flush=True)
        self.read_line("heard")

    def ran(self) -> float:
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


class Trainer:
    """One publication after another to the server at ``url``."""

    def __init__(
        self,
        spec: Any,
        url: str,
        weights: dict[str, Any],
        transport: Any,
        bucket_bytes: int,
        server_ran: Callable[[], float],
    ) -> None:
        from miles.backends.remote.client import SglangClient
        from miles.backends.remote.pool.engine_pool import EnginePool
        from miles.backends.remote.weight_update import RemoteWeightUpdate
        from miles.cluster.executor import InlineExecutor

        self.weights, self.server_ran, self.ran = weights, server_ran, 0.0
        self.pool = EnginePool(["engine 0"], eos_token_ids=frozenset([0]))
        self.client = SglangClient(url, "engine 0", vocab_size=spec.vocab_size)
        self.clock = TimedClient(self.client)
        self.sync = RemoteWeightUpdate(
            self.pool,
            weights=lambda: self.weights,
            spec=spec,
            transport=transport,
            executor=InlineExecutor(),
            bucket_bytes=bucket_bytes,
            seconds=300.0,
            log=lambda sentence: print(f"    ({sentence})"),
        )
        self._watch(self.pool, "pause")
        self._watch(self.pool, "resume")
        self._watch(self.sync, "_commit")
        if self.sync._writer is not None:
            for word in ("is_resident", "prepare", "start", "write", "_compare"):
                self._watch(self.sync._writer, word)

    def _watch(self, whose: Any, word: str) -> None:
        """Time what is called ``word``, too."""
        method, seconds = getattr(whose, word), self.clock.seconds

        def timed_call(*args: Any, **more: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **more)
            finally:
                seconds[f"here {word}"] += time.perf_counter() - started

        async def timed_wait(*args: Any, **more: Any) -> Any:
            started = time.perf_counter()
            try:
                return await method(*args, **more)
            finally:
                seconds[f"here {word}"] += time.perf_counter() - started
                self.ran = time.process_time()  # what comes after the last of these is kept, and not sent

        setattr(whose, word, timed_wait if asyncio.iscoroutinefunction(method) else timed_call)

    async def times(
        self, count: int, change: Callable[[], None] = lambda: None, skip: int = 0, *, ahead: bool = False
    ) -> dict[str, Any]:
        """Medians of ``count`` publications after ``skip`` others, and of where their time went.

        ``ahead``: digests are taken when the weights have changed, before anybody asks for a publication.
        """
        from miles.core.types import Version

        await self.sync.join(self.pool.slots[0], self.client)
        found: dict[str, list[float]] = defaultdict(list)
        for number in range(skip + count):
            change()
            if ahead:
                self.sync.start_digests()
                change_is_over()
            self.clock.seconds.clear()
            there, ran, started = self.server_ran(), time.process_time(), time.perf_counter()
            seconds = await self.sync.publish(Version(number=number))
            kept = seconds.get("publish/keep", 0.0)
            found["s"].append(time.perf_counter() - started - kept)
            found["CPU here"].append(self.ran - ran)
            found["CPU of the server"].append(self.server_ran() - there)
            found["kept after"].append(kept)
            for word, spent in self.clock.seconds.items():
                found[word].append(spent)
        await self.sync.close()
        await self.client.close()
        last = {name: statistics.median(values[-count:]) for name, values in found.items()}
        return {"first": found["s"][0], "least": min(found["s"][skip:])} | last


def change_is_over() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_median(work: Callable[[], Any], platform: Any, count: int = 7) -> float:
    """The median, after two that are not counted."""
    spent = []
    for _ in range(count + 2):
        platform.synchronize()
        started = time.perf_counter()
        work()
        platform.synchronize()
        spent.append(time.perf_counter() - started)
    return statistics.median(spent[2:])


def plain(weights: dict[str, Any], platform: Any, sizes: Sequence[tuple[int, int, int]] = ()) -> dict[str, float]:
    """A copy of all tensors here, digests alone, and both in one; these at other ``sizes``, where some are given."""
    import torch

    from miles.kernels.runtime import checksum

    tensors = list(weights.values())
    copies = [torch.empty_like(tensor) for tensor in tensors]

    def copy() -> None:
        for to, tensor in zip(copies, tensors, strict=True):
            to.copy_(tensor)

    def again(tally: Any) -> float:
        def work() -> None:
            tally.start()
            tally.read()

        return measure_median(work, platform)

    with torch.no_grad():
        if not sizes:
            found = {
                "plain copy": measure_median(copy, platform),
                "digests alone": again(checksum.ChecksumBatch(tensors)),
            }
            return {**found, "copy that takes digests": again(checksum.ChecksumBatch(tensors, copies))}
        found = {}
        before = checksum._LANES, checksum._STEPS, checksum._WARPS
        for size in sizes:
            checksum._LANES, checksum._STEPS, checksum._WARPS = size
            name = "{} x {}, {} warps".format(*size)
            found[f"digests, {name}"] = again(checksum.ChecksumBatch(tensors))
            found[f"copy too, {name}"] = again(checksum.ChecksumBatch(tensors, copies))
        checksum._LANES, checksum._STEPS, checksum._WARPS = before
        return found


_SIZES = ((1024, 64, 8), (1024, 128, 8), (1024, 32, 8), (512, 64, 4), (2048, 64, 8), (2048, 32, 16))


async def measure_shared(spec: Any, platform: Any, weights: dict[str, Any]) -> dict[str, float]:
    """An engine of this process computes with the trainer's own memory."""
    from miles.cluster.executor import InlineExecutor
    from miles.core.types import Version
    from miles.sync.publish import Publication

    engine = build_engine(spec, platform, InlineExecutor())
    sync = Publication(weights=lambda: weights, engines=[engine], transport="shared", run=InlineExecutor())
    spent = []
    for number in range(8):
        started = time.perf_counter()
        await sync.publish(Version(number=number))
        spent.append(time.perf_counter() - started)
    there = engine.weights()
    copied = sum(t.nbytes for name, t in weights.items() if there[name].data_ptr() != t.data_ptr())
    await engine.close()
    return {"s": statistics.median(spent[1:]), "least": min(spent), "bytes copied": copied}


def show(name: str, found: dict[str, Any], copy: float) -> None:
    print(f"{name}: {found['s'] * 1e3:.2f} ms, {found['s'] / copy:.2f} x a plain copy", flush=True)
    for word, spent in found.items():
        if word != "s":
            print(f"    {word:28s} {spent * 1e3 if 'bytes' not in word else spent:.2f}")


def rows(found: dict[str, float], size: int) -> None:
    for name, spent in found.items():
        print(f"  {name:40s} {spent * 1e3:8.2f} ms  {size / spent / 1e9:8.0f} GB/s", flush=True)


class Comparison:
    """One way after another, from ``weights`` to the server at ``url``; ``server`` is its process."""

    def __init__(self, spec: Any, platform: Any, weights: dict[str, Any], url: str, server: Server) -> None:
        self.spec, self.platform, self.weights, self.url, self.server = spec, platform, weights, url, server
        self.memory: Any = None
        self.copy = 1.0
        if platform.device.type == "cpu":
            self._settle()

    def _settle(self) -> None:
        """On a CPU, weights that another process can look into lie in a window."""
        from miles.sync.shared_memory import SharedBuffer

        sizes = [-(-tensor.nbytes // 64) * 64 for tensor in self.weights.values()]
        self.memory, at = SharedBuffer(sum(sizes), self.platform.device), 0
        for (name, tensor), size in zip(list(self.weights.items()), sizes, strict=True):
            place = self.memory.memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self.weights[name] = place.copy_(tensor)
            at += size

    def change(self) -> None:
        """Every number of every tensor."""
        import torch

        torch._foreach_neg_(list(self.weights.values()))  # pyright: ignore[reportPrivateImportUsage]
        self.platform.synchronize()

    async def through(
        self, transport: Any, count: int, bucket: int = 512 << 20, skip: int = 0, *, ahead: bool = False
    ) -> dict[str, Any]:
        trainer = Trainer(self.spec, self.url, self.weights, transport, bucket, self.server.ran)
        return await trainer.times(count, self.change, skip, ahead=ahead)

    async def direct(self) -> None:
        """As it is, and with nobody counting: the difference is what proving takes."""
        from miles.backends.remote.transports import ipc_inplace as direct
        from miles.backends.remote.transports.ipc import IpcTransport
        from miles.sync.shared_memory import export_handle

        show_memory = export_handle if self.memory is None else lambda tensor: self.memory.export_handle()
        proven = await self.through(IpcTransport(export=show_memory), 9, 2 << 30, skip=3)
        show("ipc, in place", proven, self.copy)
        ahead = await self.through(IpcTransport(export=show_memory), 9, 2 << 30, skip=3, ahead=True)
        show("ipc, in place, counted ahead here", ahead, self.copy)
        counted = direct.ChecksumBatch, direct.SPARSE_WRITE_FRACTION
        direct.ChecksumBatch, direct.SPARSE_WRITE_FRACTION = Plain, 0.0
        self.server.say("plain")
        bare = await self.through(IpcTransport(export=show_memory), 9, 2 << 30, skip=3)
        direct.ChecksumBatch, direct.SPARSE_WRITE_FRACTION = counted
        self.server.say("proven")
        show("ipc, in place, unproven", bare, self.copy)
        for name, found in {"in place": proven, "counted ahead": ahead}.items():
            shares = [100 * (found[word] - bare[word]) / found[word] for word in ("s", "least")]
            print("digests' share, {}: {:.1f} % of the medians, {:.1f} % of the least".format(name, *shares))

    async def windows(self, buckets: list[int]) -> None:
        from miles.backends.remote.transports.ipc import IpcTransport

        for bucket in buckets:
            found = await self.through(IpcTransport(export=lambda tensor: None), 3, bucket, skip=2)
            show(f"ipc, windows of {bucket >> 20} MiB", found, self.copy)

    async def delta(self) -> None:
        """One element in a hundred changes between two versions."""
        from miles.backends.remote.transports.delta import DeltaTransport

        transport = DeltaTransport()

        def nudge() -> None:
            for tensor in self.weights.values():
                tensor.view(-1)[::100] *= 1.5

        trainer = Trainer(self.spec, self.url, self.weights, transport, 512 << 20, self.server.ran)
        show("delta, 1 % changed", await trainer.times(1, nudge, 1), self.copy)
        print(f"    bytes sent {transport.sent} of {sum(tensor.nbytes for tensor in self.weights.values())}")


async def compare(args: argparse.Namespace, url: str, server: Server) -> None:
    from miles.backends.remote.transports.senders import DiskTransport, HttpTransport

    spec, platform, decoder = build_model(args.model, 2)
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    del decoder
    it = Comparison(spec, platform, weights, url, server)
    size = sum(tensor.nbytes for tensor in weights.values())
    print(f"{args.model}: {size / 1e9:.2f} GB in {len(weights)} tensors, {platform.name}")
    base = plain(weights, platform)
    rows(base, size)
    it.copy = base["plain copy"]
    if "shared" in args.only:
        show("shared, one process", await measure_shared(spec, platform, weights), it.copy)
    if "direct" in args.only:
        await it.direct()
    if "windows" in args.only:
        await it.windows(args.bucket)
    if "kernel" in args.only and platform.device.type == "cuda":
        rows(plain(weights, platform, _SIZES), size)
    with tempfile.TemporaryDirectory() as folder:
        if "disk" in args.only:
            show("disk", await it.through(DiskTransport(Path(folder) / "w", Path(folder)), 1), it.copy)
        if "http" in args.only:
            show("http, in requests", await it.through(HttpTransport(), 1), it.copy)
    if "delta" in args.only:
        await it.delta()
    if it.memory is not None:
        it.memory.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-4B", help=f"a published shape, or {', '.join(SHAPES)}")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", default=list(WAYS))
    parser.add_argument("--without", nargs="+", default=[])
    parser.add_argument("--bucket", nargs="+", type=int, default=[2 << 30])
    args = parser.parse_args()
    args.only = [way for way in args.only if way not in args.without]
    stand_in()
    if args.serve:
        asyncio.run(serve(args))
        return
    command = [sys.executable, __file__, "--serve", "--model", args.model]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as server:
        assert server.stdin is not None
        there = Server(server)
        try:
            asyncio.run(compare(args, f"http://127.0.0.1:{there.read_line('port ').split()[1]}", there))
        finally:
            server.stdin.close()


if __name__ == "__main__":
    main()

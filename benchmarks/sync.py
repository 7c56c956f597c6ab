"""Weights from one process to another on one device: every transport beside a plain copy of the same bytes.

    python benchmarks/sync.py [--model Qwen3-4B] [--tiny] [--only ipc tensor disk delta shared]

bf16, random weights of the published shape. This process is the trainer; a server (engine and HTTP as in ``miles
serve``) runs in another on the same device. ``ipc``: the server copies out of this process's memory; ``tensor``: in
requests; ``disk``: through files; ``delta``: one element in a hundred changed; ``shared``: an engine in this process.
Times run from the call until the server has committed, digests included, and are medians. ``--tiny``: a small model on
whatever device there is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

TINY = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}


def made(args: argparse.Namespace, seed: int) -> tuple[Any, Any, Any]:
    """The shape, the device, and a model with random weights there."""
    import torch

    from miles.cluster.platform import find
    from miles.models.decoder import Decoder
    from miles.models.families.table import spec_of
    from miles.models.published import config_named

    config = TINY if args.tiny else config_named(args.model)
    assert config is not None, f"{args.model} is not among the published shapes"
    spec, platform = spec_of(config), find("auto")
    torch.manual_seed(seed)
    decoder = Decoder(spec, device=platform.device, dtype=torch.bfloat16)
    for parameter in decoder.parameters():
        parameter.data.normal_(std=0.02)
    return spec, platform, decoder


def engine_of(spec: Any, platform: Any, run: Any) -> Any:
    import torch

    from miles.backends.native.config import NativeConfig
    from miles.backends.native.engine import NativeEngine

    config = NativeConfig(engine_max_running=4, engine_kv_tokens=4096)
    return NativeEngine(spec, device=platform.device, dtype=torch.bfloat16, config=config, run=run, decode=None)


# -- the server's process -------------------------------------------------------------------


async def serve(args: argparse.Namespace) -> None:
    """Until the other side hangs up."""
    from miles.backends.native.server.app import Server
    from miles.cluster.local import Inline, Threaded
    from miles.core.types import Version
    from miles.sync.publish import Publication

    spec, platform, decoder = made(args, 1)
    run = Threaded("engine")
    engine = engine_of(spec, platform, run)
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    await Publication(weights=lambda: weights, engines=[engine], transport="shared", run=Inline()).publish(Version())
    weights.clear()
    del decoder
    server = Server(engine, None)
    print(f"port {await server.start('127.0.0.1', 0)}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


# -- the trainer's process ------------------------------------------------------------------


class Clocked:
    """A client whose words are timed: seconds by action."""

    def __init__(self, client: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._ask = client.ask
        client.ask = self.ask

    async def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        started = time.perf_counter()
        told = json.loads(body) if isinstance(body, bytes) else body
        word = told.get("action", path) if isinstance(told, dict) else path
        try:
            return await self._ask(method, path, body, **more)
        finally:
            self.seconds[word] += time.perf_counter() - started


class Trainer:
    """One publication after another to the server at ``url``."""

    def __init__(self, spec: Any, url: str, weights: dict[str, Any], carrier: Any, bucket_bytes: int) -> None:
        from miles.backends.sglang.client import Client
        from miles.backends.sglang.fleet import Fleet
        from miles.backends.sglang.weights import ServerPublication
        from miles.cluster.local import Inline

        self.weights = weights
        self.fleet = Fleet(["engine 0"], ends=frozenset([0]))
        self.client = Client(url, "engine 0", vocabulary=spec.vocab_size)
        self.clock = Clocked(self.client)
        self.sync = ServerPublication(
            self.fleet,
            weights=lambda: self.weights,
            spec=spec,
            carrier=carrier,
            run=Inline(),
            bucket_bytes=bucket_bytes,
            seconds=300.0,
        )

    async def times(self, count: int, before: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Medians of ``count`` publications, and of where their time went."""
        from miles.core.types import Version

        await self.sync.join(self.fleet.seats[0], self.client)
        found: dict[str, list[float]] = defaultdict(list)
        for number in range(count):
            before()
            self.clock.seconds.clear()
            started = time.perf_counter()
            seconds = await self.sync.publish(Version(number=number))
            kept = seconds.get("publish/keep", 0.0)
            found["s"].append(time.perf_counter() - started - kept)
            found["kept_after_s"].append(kept)
            for word, spent in self.clock.seconds.items():
                found[f"  {word}"].append(spent)
        await self.sync.close()
        await self.client.close()
        return {"first_s": found["s"][0]} | {name: statistics.median(values[-3:]) for name, values in found.items()}


def timed(work: Callable[[], Any], platform: Any, count: int = 7) -> float:
    """The median, after two that are not counted."""
    spent = []
    for _ in range(count + 2):
        platform.synchronize()
        started = time.perf_counter()
        work()
        platform.synchronize()
        spent.append(time.perf_counter() - started)
    return statistics.median(spent[2:])


def plain(weights: dict[str, Any], platform: Any) -> dict[str, float]:
    """A copy of all tensors here, the same with digests taken on the way, and digests alone."""
    import torch

    from miles.kernels.sums import sums_of

    tensors = list(weights.values())
    copies = [torch.empty_like(tensor) for tensor in tensors]

    def copy() -> None:
        for to, tensor in zip(copies, tensors, strict=True):
            to.copy_(tensor)

    with torch.no_grad():
        return {
            "plain copy": timed(copy, platform),
            "copy that takes digests": timed(lambda: sums_of(tensors, into=copies), platform),
            "digests alone": timed(lambda: sums_of(tensors), platform),
        }


async def shared(spec: Any, platform: Any, weights: dict[str, Any]) -> dict[str, float]:
    """An engine of this process computes with the trainer's own memory."""
    from miles.cluster.local import Inline
    from miles.core.types import Version
    from miles.sync.publish import Publication

    engine = engine_of(spec, platform, Inline())
    sync = Publication(weights=lambda: weights, engines=[engine], transport="shared", run=Inline())
    spent = []
    for number in range(4):
        started = time.perf_counter()
        await sync.publish(Version(number=number))
        spent.append(time.perf_counter() - started)
    there = engine.weights()
    copied = sum(t.nbytes for name, t in weights.items() if there[name].data_ptr() != t.data_ptr())
    await engine.close()
    return {"s": statistics.median(spent[1:]), "bytes_copied": copied}


def show(name: str, found: dict[str, Any], copy: float) -> None:
    print(f"{name}: {found['s'] * 1e3:.1f} ms, {found['s'] / copy:.2f} x a plain copy", flush=True)
    for word, spent in found.items():
        if word != "s":
            print(f"    {word.strip():28s} {spent * 1e3 if 'bytes' not in word else spent:.1f}")


async def compare(args: argparse.Namespace, url: str) -> None:
    from miles.backends.sglang.carriers import ByFolder, InRequests
    from miles.backends.sglang.mapped import ByMemory

    spec, platform, decoder = made(args, 2)
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    size = sum(tensor.nbytes for tensor in weights.values())
    print(f"{'tiny' if args.tiny else args.model}: {size / 1e9:.2f} GB in {len(weights)} tensors, {platform.name}")
    base = plain(weights, platform)
    for name, spent in base.items():
        print(f"  {name:26s} {spent * 1e3:10.2f} ms  {size / spent / 1e9:8.0f} GB/s", flush=True)
    copy = base["plain copy"]
    over = max(0.0, base["copy that takes digests"] - copy)
    if "shared" in args.only:
        show("shared, one process", await shared(spec, platform, weights), copy)
    for bucket in args.bucket if "ipc" in args.only else ():
        found = await Trainer(spec, url, weights, ByMemory(), bucket).times(6)
        show(f"ipc, buckets of {bucket >> 20} MiB", found, copy)
        print(f"    digests, both sides           {200 * over / found['s']:.1f} % of it (what they add to two copies)")
    with tempfile.TemporaryDirectory() as folder:
        ways = {"tensor": InRequests, "disk": lambda: ByFolder(Path(folder) / "w", Path(folder))}
        for name, way in ways.items():
            if name in args.only:
                show(name, await Trainer(spec, url, weights, way(), 512 << 20).times(1), copy)
    if "delta" in args.only:
        await delta(spec, url, weights, copy)


async def delta(spec: Any, url: str, weights: dict[str, Any], copy: float) -> None:
    """One element in a hundred changes between two versions."""
    from miles.backends.sglang.deltas import Delta

    carrier = Delta()

    def nudge() -> None:
        for tensor in weights.values():
            tensor.view(-1)[::100] *= 1.5

    show("delta, 1 % changed", await Trainer(spec, url, weights, carrier, 512 << 20).times(2, nudge), copy)
    print(f"    bytes sent                    {carrier.sent} of {sum(tensor.nbytes for tensor in weights.values())}")


def stand_in() -> None:
    """Where a package that only metrics or files need is not installed, one that is enough for this."""
    if find_spec("prometheus_client") is None:
        sys.modules["prometheus_client"] = MagicMock()
    if find_spec("safetensors") is None:
        package, part = ModuleType("safetensors"), ModuleType("safetensors.torch")
        vars(package).update(torch=part, SafetensorError=ValueError, safe_open=None)
        vars(part).update(save=_save, load=_load)
        sys.modules |= {"safetensors": package, "safetensors.torch": part}


def _save(tensors: dict[str, Any]) -> bytes:
    import torch

    head, parts, at = {}, [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        head[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at := at + tensor.nbytes]}
        parts.append(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    words = json.dumps(head).encode()
    words += b" " * (-len(words) % 64 + 56)
    return b"".join([len(words).to_bytes(8, "little"), words, *parts])


def _load(raw: bytes) -> dict[str, Any]:
    import torch

    start = 8 + int.from_bytes(raw[:8], "little")
    found = {}
    for name, told in json.loads(raw[8:start]).items():
        begin, end = told["data_offsets"]
        part = torch.frombuffer(bytearray(raw[start + begin : start + end]), dtype=torch.uint8)
        found[name] = part.view(getattr(torch, told["dtype"])).view(told["shape"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-4B")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", default=["shared", "ipc", "tensor", "disk"])
    parser.add_argument("--bucket", nargs="+", type=int, default=[512 << 20, 2 << 30])
    args = parser.parse_args()
    stand_in()
    if args.serve:
        asyncio.run(serve(args))
        return
    command = [sys.executable, __file__, "--serve", "--model", args.model, *(["--tiny"] if args.tiny else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = next((line for line in server.stdout if line.startswith("port ")), None)
        assert line is not None, "the server did not start"
        try:
            asyncio.run(compare(args, f"http://127.0.0.1:{line.split()[1]}"))
        finally:
            assert server.stdin is not None
            server.stdin.close()


if __name__ == "__main__":
    main()

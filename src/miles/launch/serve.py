"""``miles serve``: a checkpoint on the native engine behind HTTP, until it is told to stop.

Only dataclasses are imported here; what a server needs is imported when one is started.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from miles.backends.native.server.config import ServeConfig
from miles.cluster import stacks
from miles.config.cli import chunks_of, parse
from miles.core.errors import UsageError
from miles.kernels import arithmetic
from miles.launch.config import ServeRoot
from miles.launch.found import newest_checkpoint, spec_or_none, why_not_a_checkpoint
from miles.launch.ranges import out_of_range
from miles.launch.serve_reward import build_reward, is_reward_model
from miles.models.config import ModelConfig
from miles.models.exactness import inexact

if TYPE_CHECKING:
    from miles.backends.fsdp.scorer import Scorer
    from miles.backends.fsdp.serving import RewardServer
    from miles.backends.native.engine import NativeEngine
    from miles.backends.native.server.app import Server
    from miles.cluster.local import Run

KEY = "MILES_API_KEY"
NEEDED = {"aiohttp": "aiohttp", "prometheus_client": "prometheus-client"}


def serve(config: ServeRoot, environment: Mapping[str, str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    key = read_key(config.serve, os.environ if environment is None else environment)
    refuse_open_doors(config.serve, key)
    stacks.register(f"server {config.serve.port}")
    arithmetic.use(config.models.parity)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, key))
    return 0


def read(argv: Sequence[str]) -> ServeRoot:
    """What is to be served and how, or a UsageError with everything that is wrong."""
    loose, _ = chunks_of(argv)
    problems = (
        [] if len(loose) < 2 else [f"miles serve takes one model, but was given {len(loose)}: {' '.join(loose)}."]
    )
    folder = None if not loose else newest_checkpoint(Path(loose[0])) or loose[0]
    words = [*argv[len(loose) :]] if folder is None else ["--hf-checkpoint", str(folder), *argv[len(loose) :]]
    reading = parse(ServeRoot, words)
    problems += reading.problems
    if reading.config is not None:
        problems += [sentence for _, sentence in out_of_range(reading.config, reading.origins)]
        problems += _no_model(reading.config.models)
        problems += _inexact(reading.config.models)
        problems += _not_installed()
    if problems or reading.config is None:
        raise UsageError(problems)
    return reading.config


def _no_model(config: ModelConfig) -> Iterator[str]:
    if config.hf_checkpoint is None:
        yield "What is to be served is missing: name the folder of a checkpoint or of a run, as in miles serve MODEL."
    elif why := why_not_a_checkpoint(Path(config.hf_checkpoint)):
        yield f"{config.hf_checkpoint} {why}"


def _inexact(config: ModelConfig) -> Iterator[str]:
    spec = spec_or_none(config.hf_checkpoint, config.model_impl) if config.parity == "exact" else None
    if spec is not None and (problem := inexact(spec)) is not None:
        yield f"--parity exact cannot be had of this model: {problem}; leave it out."


def _not_installed() -> Iterator[str]:
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        yield f"miles serve needs {' and '.join(missing)}: pip install 'miles-rl[serve]'."


def read_key(config: ServeConfig, environment: Mapping[str, str]) -> str | None:
    """The key clients must send: from a file or the environment, never from the command line, which others can see."""
    if config.api_key_file is None:
        return environment.get(KEY) or None
    try:
        key = Path(config.api_key_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {config.api_key_file} cannot be read: {error}.") from error
    if not key:
        raise UsageError(f"--api-key-file {config.api_key_file} is empty.")
    return key


def refuse_open_doors(config: ServeConfig, key: str | None) -> None:
    """A server that other machines can reach asks for a key, unless it is told not to."""
    if key is None and not config.allow_unauthenticated and not is_loopback(config.host):
        raise UsageError(
            f"--host {config.host} lets other machines in, and there is no key: give --api-key-file or {KEY}, "
            "or say --allow-unauthenticated."
        )


def is_loopback(host: str) -> bool:
    """Is this an address only this machine reaches?"""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


async def _serve(config: ServeRoot, key: str | None) -> None:
    from miles.cluster.local import Threaded
    from miles.launch.garbage import collecting_seldom

    run = Threaded("engine")
    started = time.perf_counter()
    assert config.models.hf_checkpoint is not None
    make = build_reward if is_reward_model(config.models.hf_checkpoint) else build
    server, engine = await make(config, key, run)
    try:
        if config.serve.server_warmup:
            await _warm(engine, config.serve)
        port = await _listen(server, config.serve)
        host = f"[{config.serve.host}]" if ":" in config.serve.host else config.serve.host
        seconds = time.perf_counter() - started
        print(
            f"Serving {server.card.served_model_name} at http://{host}:{port} (ready in {seconds:.1f} s).", flush=True
        )
        with collecting_seldom():
            await _told_to_stop()
        print(f"Finishing what is under way, for up to {config.serve.drain_seconds:g} s.", file=sys.stderr, flush=True)
        await server.drain(config.serve.drain_seconds)
    finally:
        await server.stop()
        await engine.close()
        run.close()


async def _warm(engine: NativeEngine | Scorer, config: ServeConfig) -> None:
    from miles.backends.native.engine import NativeEngine
    from miles.cluster import platform
    from miles.launch.warming import warm
    from miles.observe.view import make_view

    if not isinstance(engine, NativeEngine) or platform.find(config.device).kind == "cpu":
        return
    view = make_view("auto", stream=sys.stderr)
    try:
        await warm(engine, view)
    finally:
        view.close()


async def _listen(server: Server | RewardServer, config: ServeConfig) -> int:
    try:
        return await server.start(config.host, config.port)
    except OSError as error:
        raise UsageError(
            f"--host {config.host} --port {config.port} cannot be listened on: {error.strerror}."
        ) from None


async def build(config: ServeRoot, key: str | None, run: Run) -> tuple[Server, NativeEngine]:
    """The engine with the checkpoint's weights as version 0, and the server before it."""
    from miles.backends.native.engine import NativeEngine
    from miles.backends.native.server.app import Server
    from miles.backends.native.server.card import card_of
    from miles.cluster import platform
    from miles.cluster.local import Inline
    from miles.core.types import Version
    from miles.models import hub, impl
    from miles.models.choice import chosen_spec
    from miles.models.files import read_config
    from miles.models.shard import spec_of_rank
    from miles.models.tokenizer import load_tokenizer
    from miles.sync.publish import Publication

    assert config.models.hf_checkpoint is not None
    folder = Path(config.models.hf_checkpoint)
    papers, trusted = read_config(folder), config.models.trust_remote_code
    spec = chosen_spec(folder, config.models.model_impl)
    tokenizer = None if config.serve.skip_tokenizer_init else load_tokenizer(folder, trusted)
    device = platform.find(config.serve.device, threads=config.serve.num_threads).device
    dtype = hub.choose_dtype(config.models.dtype, papers, device)
    devices = platform.several(device, config.serve.tensor_parallel_size)
    spec_of_rank(spec, len(devices))  # what cannot be shared is refused before it is read
    # What several devices share need not fit on one.
    home = device if len(devices) == 1 else "cpu"
    model = impl.load(folder, spec, device=home, dtype=dtype, trust_remote_code=trusted)
    engine = NativeEngine(
        model.spec,
        device=device,
        dtype=dtype,
        config=config.native,
        run=run,
        decode=None if tokenizer is None else tokenizer.decode,
        model=impl.unfilled(model),
        devices=devices,
    )
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    await Publication(weights=lambda: weights, engines=[engine], transport="shared", run=Inline()).publish(Version())
    card = card_of(
        folder,
        papers,
        config.serve.served_model_name,
        created=int(time.time()),
        own_defaults=config.serve.sampling_defaults == "model",
    )
    return Server(engine, tokenizer, config=config.serve, card=card, api_key=key), engine


async def _told_to_stop() -> None:
    """Wait for SIGTERM or SIGINT; a second one ends the process the hard way."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()

    def tell(number: signal.Signals) -> None:
        told.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell, number)
    await told.wait()


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.Loop
